#!/usr/bin/env bash
# dscr-tools names per cents as basis points and loses rate shocks that are named alike.
#
# Packages: dscr-tools 0.2.0, numpy 2.4.6, pandas 2.3.3.
# Behaviour: rate_shock takes shares, 0.01 for one per cent, and names its columns by 100 times the
#   share, rounded, and "bps". A shock of 100 basis points is called 1. Shocks of 25 and 50 basis
#   points are both "+0bps" and those of 75, 100 and 150 "+1bps" or "+2bps"; a later one replaces an
#   earlier one without a message.
# Expected: +25bps, +50bps, +75bps, +100bps and +150bps.
# Instead: call analyze for each rate.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dscr-tools==0.2.0' 'numpy==2.4.6' 'pandas==2.3.3'
cat > expected.txt <<'EXPECTED'
Base: coverage 1.236
+0bps: coverage 1.174
+1bps: coverage 1.117
+2bps: coverage 1.065
by hand, 25 basis points: 1.204
by hand, 50 basis points: 1.174
by hand, 75 basis points: 1.145
by hand, 100 basis points: 1.117
by hand, 150 basis points: 1.065
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

from dscrtools import LoanParams, NOISchedule
from dscrtools.models.dscr import analyze
from dscrtools.models.stress import rate_shock

terms = {
    'loan_amount': 8_000_000, 'amortization_years': 30, 'loan_term_years': 10,
    'interest_method': 'fixed_30_360', 'payments_per_year': 12}
loan = LoanParams(interest_rate=0.065, **terms)
income = NOISchedule(base_noi=750_000, growth_rate=0.0, vacancy_rate=0.0, capex_reserve=0)
shocks = (0.0025, 0.005, 0.0075, 0.01, 0.015)
with contextlib.redirect_stdout(io.StringIO()):
    table = rate_shock(loan, income, list(shocks))
for name in table.columns:
    print(f'{name}: coverage {table[name].iloc[0]:.3f}')
for shock in shocks:
    shocked = LoanParams(interest_rate=0.065 + shock, **terms)
    print(f'by hand, {10000 * shock:.0f} basis points: {analyze(shocked, income)[0].dscr:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
