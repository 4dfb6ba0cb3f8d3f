#!/usr/bin/env bash
# The restricted mean survival time of lifelines ends at the last time of a survival function that it is
# given, and the variance beside it is the one of a person, not of the mean.
#
# Packages: lifelines 0.30.3, scipy 1.15.3, pandas 2.3.3, numpy 2.2.6.
# Behaviour: restricted_mean_survival_time(kmf.survival_function_, t), which is in its example, adds the
#   area up to the last time before t, by lines between the steps. Where nobody dies or leaves from month
#   6 to 15, those months count nothing. A warning says that the fitted model is more accurate.
#   return_variance, which has no description, gives the variance of min(T, t), which does not fall with
#   the number of people, so that by it hardly any two groups differ.
# Expected: the area of the steps up to t, as for the fitted model, and Greenwood's variance of it.
# Why it matters here: the mean is the outcome of a trial where hazards are not proportional.
# Instead: pass the fitted model, and take the variance from a bootstrap.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'lifelines==0.30.3'
cat > expected.txt <<'EXPECTED'
three of ten die in months 2, 4 and 6, the others live at 20
mean up to month 6: of the model 5.4, of its survival function 5.1
mean up to month 10: of the model 8.2, of its survival function 5.1
mean up to month 15: of the model 11.7, of its survival function 5.1
100 people: mean 6.8, its variance 12.5, by the bootstrap 0.12
1000 people: mean 6.3, its variance 12.8, by the bootstrap 0.01
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from lifelines import KaplanMeierFitter
from lifelines.utils import restricted_mean_survival_time

times, deaths = [2, 4, 6] + [20] * 7, [1] * 3 + [0] * 7
model = KaplanMeierFitter().fit(times, deaths)
print('three of ten die in months 2, 4 and 6, the others live at 20')
for limit in (6, 10, 15):
    print(f'mean up to month {limit}: of the model {restricted_mean_survival_time(model, t=limit):.1f},',
          'of its survival function',
          f'{restricted_mean_survival_time(model.survival_function_, t=limit):.1f}')
random = np.random.default_rng(0)
for people in (100, 1000):
    lives, follow_up = random.exponential(10, people), random.uniform(0, 30, people)
    times, deaths = np.minimum(lives, follow_up), lives <= follow_up
    fitted = KaplanMeierFitter().fit(times, deaths)
    mean, variance = restricted_mean_survival_time(fitted, t=10, return_variance=True)
    draws = []
    for draw in range(200):
        rows = random.integers(0, people, people)
        again = KaplanMeierFitter().fit(times[rows], deaths[rows])
        draws.append(restricted_mean_survival_time(again, t=10))
    print(f'{people} people: mean {mean:.1f}, its variance {variance:.1f}, by the bootstrap',
          f'{np.var(draws):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
