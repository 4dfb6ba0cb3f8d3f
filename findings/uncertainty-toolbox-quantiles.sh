#!/usr/bin/env bash
# uncertainty-toolbox recalibrates quantiles in the wrong direction where predictions have a bias.
#
# Packages: uncertainty-toolbox 0.1.1, numpy 1.26.4, scipy 1.17.1.
# Behaviour: get_proportion_lists with prop_type='quantile' is described as the observed proportions
#   below a predicted quantile. It compares prediction minus truth with the quantile of the
#   residual, which is the other sign: predictions that are too high seem too low.
#   get_quantile_recalibrator learns from these shares and adds the bias a second time. With
#   symmetric errors, as in its examples, nothing is seen. Calibration errors with
#   prop_type='quantile' have the same size for the mirrored truth, so only the direction is wrong
#   there.
# Expected: half of the truth below the recalibrated median.
# Why it matters here: clipping and damping bias a private model towards the mean, and recalibration
#   on public data is meant to mend it.
# Instead: exchange two arguments, get_quantile_recalibrator(truth, deviation, mean); it is right
#   then.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'uncertainty-toolbox==0.1.1' 'numpy==1.26.4' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
shift 0, quantile 0.1: 0.10 of the truth is below, reported 0.10; below the recalibrated quantile 0.10
shift 0, quantile 0.5: 0.50 of the truth is below, reported 0.50; below the recalibrated quantile 0.50
shift 0, quantile 0.9: 0.90 of the truth is below, reported 0.90; below the recalibrated quantile 0.90
shift 1, quantile 0.1: 0.39 of the truth is below, reported 0.01; below the recalibrated quantile 0.76
shift 1, quantile 0.5: 0.84 of the truth is below, reported 0.16; below the recalibrated quantile 0.98
shift 1, quantile 0.9: 0.99 of the truth is below, reported 0.61; below the recalibrated quantile 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from uncertainty_toolbox.metrics_calibration import get_proportion_lists_vectorized
from uncertainty_toolbox.recalibration import get_quantile_recalibrator

random = np.random.default_rng(0)
truth = random.normal(0, 1, 20000)
for shift in (0, 1):  # predictions that are right, and ones that are too high by one
    mean, deviation = np.full_like(truth, shift), np.ones_like(truth)
    stated, seen = get_proportion_lists_vectorized(mean, deviation, truth, num_bins=11, prop_type='quantile')
    recalibrated = get_quantile_recalibrator(mean, deviation, truth)
    for level in (0.1, 0.5, 0.9):
        below = np.mean(truth <= mean + deviation * {0.1: -1.2816, 0.5: 0.0, 0.9: 1.2816}[level])
        after = np.mean(truth <= recalibrated(mean, deviation, level))
        print(f'shift {shift}, quantile {level}: {below:.2f} of the truth is below, reported '
              f'{seen[round(level * 10)]:.2f}; below the recalibrated quantile {after:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
