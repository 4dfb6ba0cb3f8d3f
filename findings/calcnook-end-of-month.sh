#!/usr/bin/env bash
# calcnook asks for too little a month, where the savings are paid at the end of the month as documented.
#
# Packages: calcnook 0.2.0.
# Behaviour: retirement.monthly_contribution_for documents "the ordinary annuity (end-of-period) SIP
#   formula". The code divides once more by 1 + r, which is for payments at the beginning: payments at the
#   end of each month miss the target by the interest of one month. The documented example says 10109.21,
#   near the 10108.61 of payments at the end; the function returns 10008.53.
# Expected: an amount that reaches the target when paid at the end of the month.
# Instead: multiply the result by 1 + annual_return / 12, or pay at the beginning of the month.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'calcnook==0.2.0'
cat > expected.txt <<'EXPECTED'
10000000 in 20 years at 12%: 10008.53 a month; paid at the end it grows to 9900990, at the beginning to 10000000; needed at the end 10108.61
500000 in 10 years at 6%: 3035.85 a month; paid at the end it grows to 497512, at the beginning to 500000; needed at the end 3051.03
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from calcnook.core.retirement import monthly_contribution_for

for target, years, rate in ((10000000, 20, 0.12), (500000, 10, 0.06)):
    seen = monthly_contribution_for(target, years, rate).monthly_contribution
    end = beginning = 0.0
    for _ in range(12 * years):
        end = end * (1 + rate / 12) + seen
        beginning = (beginning + seen) * (1 + rate / 12)
    factor = ((1 + rate / 12) ** (12 * years) - 1) / (rate / 12)
    print(f'{target} in {years} years at {rate:.0%}: {seen:.2f} a month;',
          f'paid at the end it grows to {end:.0f}, at the beginning to {beginning:.0f};',
          f'needed at the end {target / factor:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
