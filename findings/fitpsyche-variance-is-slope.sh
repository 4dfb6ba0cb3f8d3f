#!/usr/bin/env bash
# The variance of FitPsyche is a slope in its default model: the worse a listener, the smaller it is.
#
# Packages: FitPsyche 0.1.0, numpy 1.26.4, scipy 1.13.1, scikit-learn 1.5.2, matplotlib 3.9.4.
# Behaviour: PsychometricCurve documents var as the variance of a cumulative normal distribution for both
#   of its models: lower means that the decision flips quicker and is better. The logit model, the
#   default, multiplies by it, so that lower is flatter, and the other one has the standard deviation in
#   its place. Four listeners from good to bad have 3.4, 1.7, 0.8 and 0.4 by the one and 0.5, 1, 2 and 4
#   by the other.
# Expected: numbers that rise with the variance in both.
# Instead: take 1 / var of the logit model as the scale of a logistic distribution.
# Source: Wichmann and Hill, The psychometric function, 2001.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.13.1' 'scikit-learn==1.5.2' 'matplotlib==3.9.4' 'FitPsyche==0.1.0'
cat > expected.txt <<'EXPECTED'
Lower means the decision flips quicker, so is "better"
a listener with a standard deviation of 0.5: var 3.41 by the default model, 0.50 by wh; variance 0.25
a listener with a standard deviation of 1: var 1.70 by the default model, 1.00 by wh; variance 1
a listener with a standard deviation of 2: var 0.85 by the default model, 2.00 by wh; variance 4
a listener with a standard deviation of 4: var 0.42 by the default model, 4.00 by wh; variance 16
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import re

import numpy as np
from fit_psyche.psychometric_curve import PsychometricCurve
from scipy import stats

import inspect

text = ' '.join(inspect.getsource(PsychometricCurve).split())
print(re.search(r'Lower means the decision flips quicker, so is "better"', text).group(0))
tones = np.linspace(8, 20, 25)
for spread in (0.5, 1, 2, 4):
    heard = stats.norm.cdf(tones, 14, spread)
    logit = PsychometricCurve(model='logit').fit(tones, heard).coefs_['var']
    normal = PsychometricCurve(model='wh', guess_rate_lims=(0, 1e-6), lapse_rate_lims=(0, 1e-6)).fit(tones, heard).coefs_['var']
    print(f'a listener with a standard deviation of {spread}: var {logit:.2f} by the default model, {normal:.2f} by wh; variance {spread**2:g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
