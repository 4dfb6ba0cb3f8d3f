#!/usr/bin/env bash
# The Benjamini-Hochberg procedure of permutation_test stops at the first p-value above its limit,
# and so rejects less than the procedure.
#
# Packages: permutation-test 0.18, numpy 1.23.5.
# Behaviour: The procedure looks for the largest k whose p-value is at most k/m of the level, and
#   rejects all up to it. benjamini_hochberg_procedure goes up from the smallest p-value and stops
#   at the first one above its limit. Two p-values of 0.03 and 0.04 are both rejected by the
#   procedure and not by it.
# Expected: the step-up procedure of the paper.
# Instead: scipy.stats.false_discovery_control(p) <= alpha.
# Source: Benjamini and Hochberg, Controlling the False Discovery Rate, Journal of the Royal
#   Statistical Society B 1995, procedure 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.23.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'permutation-test==0.18'
cat > expected.txt <<'EXPECTED'
[0.03, 0.04]: rejects 0, by the procedure 2
[0.03, 0.035, 0.04, 0.045]: rejects 0, by the procedure 4
[0.001, 0.03, 0.031, 0.032, 0.2]: rejects 1, by the procedure 4
[0.04, 0.01, 0.3]: rejects 1, by the procedure 1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from permutation_test import benjamini_hochberg_procedure

def right(p, alpha=0.05):
    p = np.asarray(p)
    order = np.sort(p)
    below = np.flatnonzero(order <= alpha * np.arange(1, len(p) + 1) / len(p))
    return p <= order[below[-1]] if len(below) else np.zeros(len(p), bool)

for p in ([0.03, 0.04], [0.03, 0.035, 0.04, 0.045], [0.001, 0.03, 0.031, 0.032, 0.2], [0.04, 0.01, 0.3]):
    print(f'{p}: rejects {np.sum(benjamini_hochberg_procedure(p))}, by the procedure {np.sum(right(p))}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
