#!/usr/bin/env bash
# The continuous rate of PyCurve takes a power where it should divide by the time.
#
# Packages: PyCurve 0.1.4, numpy 2.2.6, scipy 1.15.3, matplotlib 3.10.7.
# Behaviour: continuous_rate(df, t) computes log(1 / df) to the power of t. The discount factor of 5 %
#   for two years, 0.9048, has a rate of 1 % in place of 5 %, for ten years one of 0.1 % and for half
#   a year one of 16 %. For one year it is right. discrete_rate, beside it, is right for each time.
# Expected: log(1 / df) / t, the inverse of continuous_df.
# Instead: divide the logarithm by the time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'PyCurve==0.1.4' 'numpy==2.2.6' 'scipy==1.15.3' 'matplotlib==3.10.7'
cat > expected.txt <<'EXPECTED'
0.5 years at 5 %: continuous rate of 0.9753 is 0.1581, discrete rate of 0.9759 is 0.0500
1 years at 5 %: continuous rate of 0.9512 is 0.0500, discrete rate of 0.9524 is 0.0500
2 years at 5 %: continuous rate of 0.9048 is 0.0100, discrete rate of 0.9070 is 0.0500
5 years at 5 %: continuous rate of 0.7788 is 0.0010, discrete rate of 0.7835 is 0.0500
10 years at 5 %: continuous rate of 0.6065 is 0.0010, discrete rate of 0.6139 is 0.0500
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from PyCurve.actuarial_implementation import continuous_df, continuous_rate, discrete_df, discrete_rate

for years in (0.5, 1, 2, 5, 10):
    print(f'{years} years at 5 %: continuous rate of {continuous_df(5, years):.4f} is {continuous_rate(continuous_df(5, years), years):.4f},',
          f'discrete rate of {discrete_df(5, years):.4f} is {discrete_rate(discrete_df(5, years), years):.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
