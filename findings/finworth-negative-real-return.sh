#!/usr/bin/env bash
# The savings that finworth asks for run out before the end where prices rise faster than savings.
#
# Packages: finworth 0.8.0.
# Behaviour: retirement_corpus computes what is needed at retirement for expenses that rise with
#   inflation. Where the return after inflation is negative, it takes a return of 0: 25 years of
#   expenses, whether inflation is 6 or 10 % with a return of 6 %. With an inflation of 8 % the money
#   lasts for 20 of the 25 years, and with 10 % for 17.
# Expected: the annuity factor for the negative return, 32.2 and 41.9 in place of 25, which the same
#   formula gives.
# Instead: compute the factor (1 - (1 + r) ** -n) / r for a negative r, too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'finworth==0.8.0'
cat > expected.txt <<'EXPECTED'
inflation 5%, return 6 %: needed 22.2 yearly expenses, by the formula 22.2; lasts 25 of 25 years
inflation 6%, return 6 %: needed 25.0 yearly expenses, by the formula 25.0; lasts 25 of 25 years
inflation 7%, return 6 %: needed 25.0 yearly expenses, by the formula 28.3; lasts 22 of 25 years
inflation 8%, return 6 %: needed 25.0 yearly expenses, by the formula 32.2; lasts 20 of 25 years
inflation 10%, return 6 %: needed 25.0 yearly expenses, by the formula 41.9; lasts 17 of 25 years
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from finworth.planning import retirement_corpus

for inflation in (0.05, 0.06, 0.07, 0.08, 0.10):
    seen = retirement_corpus(1000, current_age=59, retirement_age=60, life_expectancy=85, inflation=inflation,
                             post_retirement_return=0.06)
    yearly = 12 * 1000 * (1 + inflation)
    real = 1.06 / (1 + inflation) - 1
    factor = (1 - (1 + real) ** -25) / real if abs(real) > 1e-9 else 25
    money, lasts = float(seen['corpus_needed']), 0
    for year in range(1, 26):
        money = money * 1.06 - yearly * (1 + inflation) ** year
        lasts += money > -1000
    print(f'inflation {inflation:.0%}, return 6 %: needed {seen["corpus_needed"] / yearly:.1f} yearly expenses, by the formula {factor:.1f};',
          f'lasts {lasts} of 25 years')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
