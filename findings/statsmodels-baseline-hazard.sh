#!/usr/bin/env bash
# The survival that statsmodels predicts from a Cox model is one event time behind: the deaths of a time
# are not counted until the next one, and those of the last time never.
#
# Packages: statsmodels 0.15.0, lifelines 0.30.3 (the same model), pandas 2.3.3, numpy 2.4.6.
# Behaviour: PHReg's baseline cumulative hazard at an event time leaves out the hazard of this time, and
#   its function and predict(pred_type='surv' or 'cumhaz') keep that value until the next event time.
#   Where follow-up is in years, a fifth of the patients die in the first year and the predicted survival
#   of one year is 1; it is too high at all times. The coefficients are right.
# Expected: the Nelson-Aalen estimator, which the documentation names, with the events at or before t.
# Why it matters here: the prediction is what a private model of survival is compared and calibrated with.
# Instead: CoxPHFitter of lifelines, or the cumulative sum of the hazards by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statsmodels==0.15.0' 'lifelines==0.30.3' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
years:                   [1.  2.  3.  4.  4.5]
PHReg, predicted:        [1.   0.82 0.64 0.46 0.46]
lifelines, predicted:    [0.82 0.64 0.46 0.28 0.28]
Nelson-Aalen by hand:    [0.82 0.64 0.46 0.28 0.28]
alive, of 200:           [0.8 0.6 0.4 0.2 0.2]
SurvfuncRight of statsmodels at 1 to 4: [0.8 0.6 0.4 0.2]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from lifelines import CoxPHFitter
from statsmodels.duration.hazard_regression import PHReg
from statsmodels.duration.survfunc import SurvfuncRight

# 200 patients: 40 die in each of the years 1 to 4, 40 are alive in year 5; the marker has no effect
years, marker = np.repeat([1.0, 2.0, 3.0, 4.0, 5.0], 40), np.tile([-1.0, 1.0], 100)
died = (years < 5).astype(int)
cox = PHReg(years, marker[:, None], status=died).fit()
other = CoxPHFitter().fit(
    pd.DataFrame({'years': years, 'died': died, 'marker': marker}), 'years', 'died'
)
times = np.array([1.0, 2.0, 3.0, 4.0, 4.5])
zero = np.zeros((len(times), 1))
at_risk = np.array([200, 160, 120, 80])
hazard = np.array([(40 / at_risk)[np.arange(1, 5) <= time].sum() for time in times])
print('years:                  ', times)
print('PHReg, predicted:       ', cox.predict(exog=zero, endog=times, pred_type='surv')
      .predicted_values.round(2))
print('lifelines, predicted:   ', other.predict_survival_function(
    pd.DataFrame({'marker': [0.0]}), times=times).iloc[:, 0].to_numpy().round(2))
print('Nelson-Aalen by hand:   ', np.exp(-hazard).round(2))
print('alive, of 200:          ', np.array([(years > time).mean() for time in times]))
print('SurvfuncRight of statsmodels at 1 to 4:', SurvfuncRight(years, died).surv_prob.round(2))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
