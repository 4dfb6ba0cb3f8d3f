#!/usr/bin/env bash
# The audits of fare leave the last window of a ranking out where the windows fit, and with it the
# people at the end: nine windows of ten are equal, and the one that is not is in no audit.
#
# Packages: fare 0.1.1, numpy 2.4.6, scipy 1.17.1, matplotlib 3.11.2.
# Behaviour: audit_parity, audit_calibration and audit_equality stop as soon as the end of a window is
#   the end of the ranking, and add a last window only if the next one would begin behind the last
#   start. Where the length minus the window is a multiple of the step, neither happens. With 100
#   people and windows of 99 the last person is in the audit, with a window of 100 nobody is.
# Expected: each person in a window, as for lengths that do not fit.
# Why it matters here: unfair rankings are those whose ends differ, and round numbers fit.
# Instead: call rank_parity for the last window, or repeat the last person.
# Source: Kuhlman, VanValkenburg and Rundensteiner, FARE: Diagnostics for Fair Ranking using Pairwise
#   Error Metrics, WWW 2019.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fare==0.1.1' 'numpy==2.4.6' 'scipy==1.17.1' \
  'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
100 people, windows of 10 that do not overlap: 9 errors in place of 10, the mean 0.52; the last window by itself has 0.00
 99 people, windows of 10 that do not overlap: 10 errors in place of 10, the mean 0.47
100 people, one window of 100: 0 errors in place of 1
100 people, windows of 50 that move by 1: 50 errors in place of 51
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import ceil

from fare.audit import audit_parity
from fare.metrics import rank_parity

ranks = list(range(1, 101))
# Groups alternate so that they are equal in each window of ten, but the last: group 1, then group 0.
groups = 9 * [0, 1, 1, 0, 0, 1, 1, 0, 0, 1] + 5 * [1] + 5 * [0]


def audit(people, window, step):
    return audit_parity(ranks[:people], groups[:people], window, step)[0]


def windows(people, window, step):
    return ceil((people - window) / step) + 1


errors = audit(100, 10, 10)
print(f'100 people, windows of 10 that do not overlap: {len(errors)} errors in place of {windows(100, 10, 10)}, the mean '
      f'{sum(errors) / len(errors):.2f}; the last window by itself has {rank_parity(ranks[90:], groups[90:])[0]:.2f}')
errors = audit(99, 10, 10)
print(f' 99 people, windows of 10 that do not overlap: {len(errors)} errors in place of {windows(99, 10, 10)}, the mean '
      f'{sum(errors) / len(errors):.2f}')
print(f'100 people, one window of 100: {len(audit(100, 100, 10))} errors in place of {windows(100, 100, 10)}')
print(f'100 people, windows of 50 that move by 1: {len(audit(100, 50, 1))} errors in place of {windows(100, 50, 1)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
