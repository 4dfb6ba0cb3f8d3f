#!/usr/bin/env bash
# zepid documents its four counts in an order that gives a wrong risk ratio.
#
# Packages: zepid 0.9.1, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, statsmodels 0.15.0, matplotlib 3.11.2.
# Behaviour: risk_ratio, risk_difference and number_needed_to_treat of zepid.calc document a, b, c, d as
#   exposed with the outcome, unexposed with the outcome, exposed without it, unexposed without it.
#   They compute a / (a + b) against c / (c + d): b has to be the exposed without the outcome. In the
#   documented order 10 of 100 exposed and 40 of 200 unexposed give a ratio of 0.56 in place of 0.50,
#   a difference of -16 in place of -10 points, and one life for 6 treated, not for 10. Only the odds
#   ratio is the same in both orders.
# Expected: the order that is documented.
# Instead: exposed with, exposed without, unexposed with, unexposed without.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'zepid==0.9.1' 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'statsmodels==0.15.0' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
documented: exposed with, unexposed with, exposed without, unexposed without
by hand: ratio 0.50, difference -0.10, one in -10.0, odds 0.44
documented [10, 40, 90, 160]: ratio 0.56, difference -0.16, one in -6.3, odds 0.44
exposed first [10, 90, 40, 160]: ratio 0.50, difference -0.10, one in -10.0, odds 0.44
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import re

from zepid import calc

text = re.findall(r'Count of (\w+) individuals (\w+) outcome', calc.risk_ratio.__doc__)
print('documented:', ', '.join(' '.join(words) for words in text))
counts = {
    ('exposed', 'with'): 10, ('unexposed', 'with'): 40,
    ('exposed', 'without'): 90, ('unexposed', 'without'): 160,
}
documented = [counts[words] for words in text]
computed = [10, 90, 40, 160]
print(f'by hand: ratio {0.10 / 0.20:.2f}, difference {0.10 - 0.20:.2f},',
      f'one in {1 / (0.10 - 0.20):.1f}, odds {10 * 160 / (90 * 40):.2f}')
for name, order in (('documented', documented), ('exposed first', computed)):
    results = [function(*order)[0] for function in (
        calc.risk_ratio, calc.risk_difference, calc.number_needed_to_treat, calc.odds_ratio)]
    print(f'{name} {order}: ratio {results[0]:.2f}, difference {results[1]:.2f},',
          f'one in {results[2]:.1f}, odds {results[3]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
