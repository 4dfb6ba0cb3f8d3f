#!/usr/bin/env bash
# The tax of an investment in downpyment is taken from the money that was invested.
#
# Packages: downpyment 0.1.1, numpy 2.4.6, matplotlib 3.10.7.
# Behaviour: Investment.simulate multiplies the whole value by 1 - tax_perc, the first amount and all
#   contributions with the earnings. Savings of 10,000 that earn nothing are worth 8,000 after a year
#   at a tax of 20 %, and 10,000 that earn 5 % a year are worth 8,400 after a year. With
#   only_interest=True the same tax is taken from the earnings alone.
# Expected: a tax on the earnings, 10,000 and 10,400, as in the other mode.
# Instead: use tax_perc=0 and take the tax from the earnings.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'downpyment==0.1.1' 'numpy==2.4.6' 'matplotlib==3.10.7'
cat > expected.txt <<'EXPECTED'
0 % a year, 0 a month: after a year 8000, with tax on the earnings 10000, paid in 10000; earnings in its other mode 0
0 % a year, 100 a month: after a year 8960, with tax on the earnings 11200, paid in 11200; earnings in its other mode 0
5 % a year, 0 a month: after a year 8400, with tax on the earnings 10400, paid in 10000; earnings in its other mode 400
5 % a year, 100 a month: after a year 9382, with tax on the earnings 11622, paid in 11200; earnings in its other mode 422
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from downpyment.interest import Interest
from downpyment.investment import Investment

for rate in (0.0, 5.0):
    for contribution in (0, 100):
        plain = Investment(10000, contribution, Interest(rate=rate)).simulate(12)[-1]
        taxed = Investment(10000, contribution, Interest(rate=rate), tax_perc=20)
        paid_in = 10000 + 12 * contribution
        print(f'{rate:.0f} % a year, {contribution} a month: after a year {taxed.simulate(12)[-1]:.0f},',
              f'with tax on the earnings {plain - 0.2 * (plain - paid_in):.0f}, paid in {paid_in};',
              f'earnings in its other mode {sum(taxed.simulate(12, only_interest=True)):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
