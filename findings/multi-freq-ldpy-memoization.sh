#!/usr/bin/env bash
# The longitudinal clients of multi-freq-ldpy draw a new answer each time, so that repeated reports
# of a person reveal the value, whatever eps_perm says.
#
# Packages: multi-freq-ldpy 0.2.5, numpy 2.4.6, numba 0.68.1.
# Behaviour: these protocols (L-GRR, RAPPOR and others) randomize twice: a permanent answer that is
#   kept (memoized), and a fresh one about it for each report. eps_perm is documented as the bound
#   for infinitely many reports. L_GRR_Client and its siblings take the true value and draw both
#   anew in each call, and offer no way to keep the first. The most frequent report of a person is
#   then the true value; with a kept answer it would be right as often as one permanent answer is.
# Expected: a client that holds its permanent answer, as the papers that the package cites
#   describe.
# Instead: draw the permanent answer once with GRR_Client, store it, and randomize that one each
#   time.
# Source: Erlingsson and others (2014), "RAPPOR", section 3, and Arcolezi and others (2021), arXiv
#   2111.04636.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'multi-freq-ldpy==0.2.5' 'numpy==2.4.6' 'numba==0.68.1' 'xxhash==3.8.2'
cat > expected.txt <<'EXPECTED'
4 values, eps_perm 1.0: one permanent answer is true for 0.48 of people
600 reports of L_GRR_Client: the most frequent is true for all
600 reports about a kept answer: the most frequent is true for about half
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from multi_freq_ldpy.long_freq_est.L_GRR import L_GRR_Client
from multi_freq_ldpy.pure_frequency_oracles.GRR import GRR_Client

VALUES, PERMANENT, SINGLE, PEOPLE, REPORTS = 4, 1.0, 0.5, 1000, 600
bound = np.exp(PERMANENT) / (np.exp(PERMANENT) + VALUES - 1)


def guess(reports):
    return np.bincount(reports, minlength=VALUES).argmax()


def describe(share):  # the package's generator takes no seed, so no digits
    return 'all' if share > 0.97 else 'about half' if 0.38 < share < 0.57 else f'{share:.2f}'


found = kept = 0
for person in range(PEOPLE):
    truth = person % VALUES
    reports = [L_GRR_Client(truth, VALUES, PERMANENT, SINGLE) for _ in range(REPORTS)]
    found += guess(reports) == truth
    permanent = GRR_Client(truth, VALUES, PERMANENT)
    kept += guess([GRR_Client(permanent, VALUES, 1.0) for _ in range(REPORTS)]) == truth
print(f'{VALUES} values, eps_perm {PERMANENT}: one permanent answer is true for {bound:.2f} of people')
print(f'{REPORTS} reports of L_GRR_Client: the most frequent is true for', describe(found / PEOPLE))
print(f'{REPORTS} reports about a kept answer: the most frequent is true for', describe(kept / PEOPLE))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
