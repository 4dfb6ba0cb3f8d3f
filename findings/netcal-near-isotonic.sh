#!/usr/bin/env bash
# netcal's near-isotonic regression returns the labels of its training records, so that its calibration
# looks perfect and is useless.
#
# Packages: netcal 1.4.0, torch 2.13.0 (CPU build), scikit-learn 1.9.1, numpy 2.4.6.
# Behaviour: NearIsotonicRegression stands beside HistogramBinning and IsotonicRegression in
#   netcal.binning. Its fit(X, y) stops at the start of the path, where nothing is penalised, and there
#   is no parameter for the penalty: each record is a group with its label for a value. transform gives
#   only 0 and 1. On the training records the calibration error and the Brier score are 0; on new ones
#   they are worse than without calibration.
# Expected: a function that falls seldom, near the isotonic one, or an error that a model is missing.
# Why it matters here: a private model is calibrated on few records, and this one gives them away.
# Instead: ENIR, which follows the path and averages its models, or IsotonicRegression.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'netcal==1.4.0' 'torch==2.13.0' 'scikit-learn==1.9.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
not calibrated: ECE of training 0.179, of new 0.192; Brier score of training 0.241, of new 0.255; 2000 values
HistogramBinning: ECE of training 0.000, of new 0.028; Brier score of training 0.206, of new 0.214; 10 values
IsotonicRegression: ECE of training 0.000, of new 0.032; Brier score of training 0.199, of new 0.211; 48 values
NearIsotonicRegression: ECE of training 0.000, of new 0.410; Brier score of training 0.000, of new 0.410; 2 values
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from netcal.binning import HistogramBinning, IsotonicRegression, NearIsotonicRegression
from netcal.metrics import ECE

random = np.random.default_rng(0)
logit = random.normal(size=4000)
label = (random.random(4000) < 1 / (1 + np.exp(-logit))).astype(int)
score = 1 / (1 + np.exp(-3 * logit - 1))  # too sure of itself, and shifted
train, new = slice(0, 2000), slice(2000, None)


def describe(name, trained, other):
    print(f'{name}: ECE of training {ECE(10).measure(trained, label[train]):.3f}, of new',
          f'{ECE(10).measure(other, label[new]):.3f}; Brier score of training',
          f'{np.mean((trained - label[train]) ** 2):.3f}, of new',
          f'{np.mean((other - label[new]) ** 2):.3f}; {len(np.unique(other))} values')


describe('not calibrated', score[train], score[new])
for kind in (HistogramBinning, IsotonicRegression, NearIsotonicRegression):
    model = kind().fit(score[train], label[train])
    describe(kind.__name__, model.transform(score[train]), model.transform(score[new]))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
