#!/usr/bin/env bash
# tmval takes the first and the last entry out of the caller's lists of payments.
#
# Packages: tmval 0.0.12, numpy 1.23.5, scipy 1.10.1, python-dateutil 2.9.0.post0.
# Behaviour: dollar_weighted_yield takes lists of times and amounts and pops the opening and closing balance
#   off the lists that it was given. A second call with the same lists takes two contributions for the balances,
#   and returns another yield.
# Expected: lists as they were, as they are where a Payments object is passed, and the same yield.
# Instead: pass copies of the lists.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tmval==0.0.12' 'numpy==1.23.5' 'scipy==1.10.1' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
by hand: gain 130, yield 10.9474%
Payments: yield 10.9474%, amounts after it [1000, 100, 200, 50, 1480]
lists, call 1: yield 10.9474%, times after it [0.25, 0.5, 0.75], amounts [100, 200, 50]
lists, call 2: yield -150.0000%, times after it [0.5], amounts [200]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from tmval.value import Payments, dollar_weighted_yield

times, amounts = [0, 0.25, 0.5, 0.75, 1.0], [1000, 100, 200, 50, 1480]
gain = amounts[-1] - sum(amounts[:-1])
base = sum(amount * (1 - time) for time, amount in zip(times[:-1], amounts[:-1]))
print(f'by hand: gain {gain}, yield {gain / base:.4%}')
kept = Payments(times=times.copy(), amounts=amounts.copy())
print(f'Payments: yield {dollar_weighted_yield(payments=kept).rate:.4%}, amounts after it', kept.amounts)
for call in (1, 2):
    seen = dollar_weighted_yield(times=times, amounts=amounts)
    print(f'lists, call {call}: yield {seen.rate:.4%}, times after it {times}, amounts {amounts}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
