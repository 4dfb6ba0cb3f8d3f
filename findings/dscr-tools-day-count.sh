#!/usr/bin/env bash
# dscr-tools has one interest for all of its day counts.
#
# Packages: dscr-tools 0.2.0, numpy 2.4.6, pandas 2.3.3.
# Behaviour: fixed_actual_360, described as slightly higher than 30/360, multiplies the rate by
#   1/360 and by 360/12 days, and fixed_actual_365 by 1/365 and by 365/12. All three are a twelfth
#   of the rate in each month, whatever its length. A bank that charges actual/360 takes 365 days of
#   360, so that interest, payments and coverage of such a loan are the ones of another loan.
# Expected: interest of the days of each month, 365/360 of the rate in a year.
# Instead: multiply the rate of an actual/360 loan by 365/360.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dscr-tools==0.2.0' 'numpy==2.4.6' 'pandas==2.3.3'
cat > expected.txt <<'EXPECTED'
fixed_30_360: interest of a year on 8 million 520000, by hand 520000; left after ten years 6782090
fixed_actual_360: interest of a year on 8 million 520000, by hand 527222; left after ten years 6782090
fixed_actual_365: interest of a year on 8 million 520000, by hand 520000; left after ten years 6782090
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from dscrtools import LoanParams
from dscrtools.models.amortization import schedule
from dscrtools.models.loan import interest_payment

days = {'fixed_30_360': 360 / 360, 'fixed_actual_360': 365 / 360, 'fixed_actual_365': 365 / 365}
for method, share in days.items():
    loan = LoanParams(
        loan_amount=8_000_000, interest_rate=0.065, amortization_years=30, loan_term_years=10,
        interest_method=method, payments_per_year=12)
    year = 12 * interest_payment(loan, 8_000_000)
    rows = schedule(loan)
    print(f'{method}: interest of a year on 8 million {year:.0f}, by hand {8e6 * 0.065 * share:.0f};',
          f"left after ten years {rows[-1]['ending_balance']:.0f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
