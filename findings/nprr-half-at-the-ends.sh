#!/usr/bin/env bash
# nprr gives the smallest and the largest value half of their share of the noise.
#
# Packages: numpy 1.26.4, scipy 1.13.1, nprr 0.1.4.
# Behaviour: nprr answers with a value from a grid of G + 1 values where it does not tell the truth,
#   and its own formula for ε (r_from_G_eps, r_G_opt_entropy) has each of them with 1 in G + 1. It
#   rounds a number between 0 and 1 to the grid, which gives the two ends half the probability of
#   the values between. Who has 0 answers 0 with r + (1 - r) / 2G, who has 0.5 with (1 - r) / 2G:
#   their ratio is up to twice the stated one. With G = 1 both ends are all values and ε is right.
# Expected: one of the G + 1 values with equal probability.
# Instead: numpy.random.randint(0, G + 1) / G for the noise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.13.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'nprr==0.1.4'
cat > expected.txt <<'EXPECTED'
ε 1, G 1: answers 0 over answers of others, logarithm 1.0, by hand 1.00; stated 1.00
ε 1, G 2: answers 0 over answers of others, logarithm 1.2, by hand 1.19; stated 1.00
ε 1, G 10: answers 0 over answers of others, logarithm 1.4, by hand 1.42; stated 1.00
ε 4, G 51: answers 0 over answers of others, logarithm 4.7, by hand 4.66; stated 4.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math
import sys
from unittest.mock import MagicMock

# confseq has to be compiled and is used for confidence sequences alone, not for the mechanisms
for name in ('confseq', 'confseq.betting_strategies', 'confseq.boundaries', 'confseq.betting', 'confseq.conjmix_bounded'):
    sys.modules[name] = MagicMock()
import numpy as np
from nprr.mechanisms import nprr, r_from_G_eps, r_G_opt_entropy

np.random.seed(0)
settings = [(1.0, r_from_G_eps(steps, 1.0), steps) for steps in (1, 2, 10)]
settings.append((4.0, *r_G_opt_entropy(4.0)))
for epsilon, truth, steps in settings:
    of_zero = np.mean(nprr(np.zeros(1_000_000), truth, steps) == 0)
    other = 1.0 if steps == 1 else (steps // 2) / steps
    of_other = np.mean(nprr(np.full(1_000_000, other), truth, steps) == 0)
    by_hand = math.log(1 + 2 * steps * truth / (1 - truth))
    print(f'ε {epsilon:.0f}, G {steps}: answers 0 over answers of others, logarithm {math.log(of_zero / of_other):.1f},',
          f'by hand {by_hand:.2f}; stated {math.log(1 + (steps + 1) * truth / (1 - truth)):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
