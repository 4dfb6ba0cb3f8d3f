#!/usr/bin/env bash
# The 95 % confidence band that kaplanmeier draws around a survival curve has a confidence of 5 %: it is a
# thirtieth as wide, and holds the true curve in 7 % of the cases.
#
# Packages: kaplanmeier 0.2.0, lifelines 0.30.3, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, matplotlib 3.11.2,
#   seaborn 0.13.2.
# Behaviour: plot has cii_alpha = 0.05, documented as confidence interval, and passes 1 - cii_alpha to
#   lifelines, whose alpha is the error as well. With cii_alpha=0.95 the band is the one of 95 %.
# Expected: the band of lifelines with alpha = 0.05, which is computed here beside it.
# Why it matters here: curves whose bands do not touch look different, and any two curves do.
# Instead: cii_alpha=0.95, or lifelines itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'matplotlib==3.11.2' 'seaborn==0.13.2' 'lifelines==0.30.3' 'kaplanmeier==0.2.0'
cat > expected.txt <<'EXPECTED'
default: mean width 0.004, holds the truth in 7% of 350 cases
cii_alpha=0.95: mean width 0.123, holds the truth in 93% of 350 cases
lifelines: mean width 0.123, holds the truth in 93% of 350 cases
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import matplotlib

matplotlib.use('Agg')
import kaplanmeier
import matplotlib.pyplot as plt
import numpy as np
from lifelines import KaplanMeierFitter


def measure(axes, time):
    heights = np.linspace(0, 1, 20_001)
    path = axes.collections[0].get_paths()[0]
    inside = heights[path.contains_points(np.column_stack((np.full(20_001, time), heights)))]
    return inside.min(), inside.max()


random = np.random.default_rng(0)
NAMES = 'default', 'cii_alpha=0.95', 'lifelines'
TIMES = 3, 5, 7, 9, 12, 16, 20
inside, widths = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0.0)
for study in range(50):
    times = random.exponential(10, 200)
    events = (times < 25).astype(int)
    times = np.minimum(times, 25)
    fitted = kaplanmeier.fit(times, events, np.repeat('all', 200))
    drawn = [kaplanmeier.plot(fitted, visible=False, **options)[1] for options in ({}, {'cii_alpha': 0.95})]
    band = KaplanMeierFitter(alpha=0.05).fit(times, events).confidence_interval_survival_function_
    for time in TIMES:
        row = band[band.index <= time].iloc[-1]
        limits = [measure(axes, time) for axes in drawn] + [(row.min(), row.max())]
        for name, (low, high) in zip(NAMES, limits):
            inside[name] += low <= np.exp(-time / 10) <= high
            widths[name] += high - low
    plt.close('all')
for name in NAMES:
    print(f'{name}: mean width {widths[name] / 50 / len(TIMES):.3f}, '
          f'holds the truth in {inside[name] / 50 / len(TIMES):.0%} of {50 * len(TIMES)} cases')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
