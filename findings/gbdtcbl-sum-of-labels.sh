#!/usr/bin/env bash
# The class-balanced loss of gbdtCBL for several classes gives all of them the same weight.
#
# Packages: gbdtCBL 0.2.0, numpy 2.4.6, scikit-learn 1.9.1, scipy 1.17.1.
# Behaviour: LGBCBEMulti documents a class-balanced loss for LightGBM. The weight of a class is (1 - b) /
#   (1 - b^n) with its number of people n. The labels 0, 1, 2 are added up in place of counting each of
#   them in the encoded table, so there is one number for all classes: 110 here. It multiplies all
#   gradients and second derivatives alike, which changes nothing but the scale. CBELoss for two classes
#   counts both.
# Expected: the weights of the classes: 0.0017 for 900 people, 0.10 for 10.
# Why it matters here: the rare class is what the loss is chosen for.
# Instead: class weights of LightGBM with the formula below.
# Source: Cui and others, Class-balanced loss based on effective number of samples, CVPR 2019.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' \
  'scikit-learn==1.9.1' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'gbdtCBL==0.2.0'
cat > expected.txt <<'EXPECTED'
class 0 of 900 people: weight 0.00960, by the formula 0.00168
class 1 of 90 people: weight 0.00960, by the formula 0.01161
class 2 of 10 people: weight 0.00960, by the formula 0.10045
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from gbdtCBL.lgbmulti import LGBCBEMulti

people, b = [900, 90, 10], 0.999
labels = np.repeat([0, 1, 2], people)
gradient, _ = LGBCBEMulti(b)(labels, np.zeros((1000, 3)))
gradient = gradient.reshape(3, 1000).T
plain = np.full((1000, 3), 1 / 3) - np.eye(3)[labels]
for label, number in enumerate(people):
    rows = labels == label
    weight = np.abs(gradient[rows]).sum() / np.abs(plain[rows]).sum()
    print(f'class {label} of {number} people: weight {weight:.5f}, by the formula {(1 - b) / (1 - b ** number):.5f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
