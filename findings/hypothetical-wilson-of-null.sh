#!/usr/bin/env bash
# The Wilson interval of hypothetical is one of the proportion that is tested, not of the one that
# was observed.
#
# Packages: hypothetical 0.3.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, statsmodels 0.14.4,
#   numpy-indexed 0.3.7.
# Behaviour: BinomialTest documents the Wilson score interval with the observed proportion and
#   computes it with p, the proportion of the null hypothesis, which is 0.5 unless another one is
#   given. For 2 and for 98 of 100 people it is 0.40 to 0.60, and 0.83 to 0.94 for 2 of 100 that are
#   tested against 0.9. In its documented example, 682 of 925, it does not contain 0.74.
# Expected: 0.006 to 0.070 for 2 of 100, as the other three intervals of the same test.
# Instead: its Clopper-Pearson interval, or proportion_confint of statsmodels.
# Source: Wilson, Probable Inference, the Law of Succession, and Statistical Inference, 1927.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'numpy-indexed==0.3.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hypothetical==0.3.0'
cat > expected.txt <<'EXPECTED'
682 of 925, 0.737: 0.468 to 0.532, with its correction 0.468 to 0.532; Wilson 0.708 to 0.765
2 of 100, 0.020: 0.404 to 0.596, with its correction 0.403 to 0.597; Wilson 0.006 to 0.070
98 of 100, 0.980: 0.404 to 0.596, with its correction 0.403 to 0.597; Wilson 0.930 to 0.994
50 of 100, 0.500: 0.404 to 0.596, with its correction 0.403 to 0.597; Wilson 0.404 to 0.596
2 of 100, tested against 0.9: 0.826 to 0.945
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hypothetical.hypothesis import BinomialTest
from statsmodels.stats.proportion import proportion_confint

for cases, people in ((682, 925), (2, 100), (98, 100), (50, 100)):
    test = BinomialTest(people, cases, continuity=False)
    corrected = BinomialTest(people, cases)
    low, high = test.wilson_score_interval['interval']
    low_corrected, high_corrected = corrected.wilson_score_interval['interval']
    right = proportion_confint(cases, people, method='wilson')
    print(f'{cases} of {people}, {cases / people:.3f}: {low:.3f} to {high:.3f}, with its correction',
          f'{low_corrected:.3f} to {high_corrected:.3f}; Wilson {right[0]:.3f} to {right[1]:.3f}')
low, high = BinomialTest(100, 2, p=0.9, continuity=False).wilson_score_interval['interval']
print(f'2 of 100, tested against 0.9: {low:.3f} to {high:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
