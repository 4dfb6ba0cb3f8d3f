#!/usr/bin/env bash
# clintrials takes 0 as the positive value for "not given" and uses 1: the odds ratio for survival, coded 0, is the one for
# death, 0.26 in place of 3.86.
#
# Packages: clintrials 0.1.4, numpy 2.2.6, scipy 1.15.3, matplotlib 3.10.3.
# Behaviour: chi_squ_test replaces x_positive_value and y_positive_value by 1 if they are false, which 0 is. The confidence
#   interval is inverted with it. Other values, such as words, work.
# Expected: the odds ratio for the value that is asked for, "item in y corresponding to positive event, 1 by default".
# Why it matters here: 0 and 1 are the usual codes. A treatment that saves lives is reported as one that costs them.
# Instead: recode the list, so that the positive value is 1.
# Source: the cross product of the table, by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3' 'matplotlib==3.10.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'clintrials==0.1.4'
cat > expected.txt <<'EXPECTED'
dead is 1, asked for death (1): 0.259 by hand 0.259
dead is 1, asked for survival (0): 0.259 by hand 3.857
survival is 1, asked for it: 3.857
words, asked for alive: 3.857
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from clintrials.stats import chi_squ_test

treated = [1] * 100 + [0] * 100
died = [1] * 10 + [0] * 90 + [1] * 30 + [0] * 70
survived = [1 - value for value in died]
words = ['dead' if value else 'alive' for value in died]
print('dead is 1, asked for death (1):', f'{chi_squ_test(treated, died)["Odds"]["OR"]:.3f}', 'by hand', f'{10 * 70 / (90 * 30):.3f}')
print('dead is 1, asked for survival (0):', f'{chi_squ_test(treated, died, y_positive_value=0)["Odds"]["OR"]:.3f}',
      'by hand', f'{90 * 30 / (10 * 70):.3f}')
print('survival is 1, asked for it:', f'{chi_squ_test(treated, survived)["Odds"]["OR"]:.3f}')
print('words, asked for alive:', f'{chi_squ_test(treated, words, y_positive_value="alive")["Odds"]["OR"]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
