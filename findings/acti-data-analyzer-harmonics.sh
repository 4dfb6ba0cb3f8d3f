#!/usr/bin/env bash
# The cosinor model of acti-data-analyzer mixes the sine of the day with the sine of its harmonic.
#
# Packages: acti-data-analyzer 1.0.4, numpy 2.3.5, scipy 1.16.3, pandas 2.3.3, matplotlib 3.10.7.
# Behaviour: Linear fits sines and cosines of the period and of its harmonics, all sines before all
#   cosines, and reads the coefficients as pairs that follow each other. With one component there is
#   one pair. With two the amplitude of the day is made of the two sines and the one of the harmonic of
#   the two cosines: an exact curve of 40 and 15 has 25 and 34, and a second component, which can only
#   improve a fit, leaves twenty times the variance that the first alone leaves.
# Expected: the amplitudes 40 and 15, and no variance left.
# Instead: fit the sines and cosines by least squares, as it is done here.
# Source: Cornelissen, Cosinor-based rhythmometry, 2014.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.3.5' 'scipy==1.16.3' 'pandas==2.3.3' 'matplotlib==3.10.7' 'acti-data-analyzer==1.0.4'
cat > expected.txt <<'EXPECTED'
1 component(s): 24 h amplitude 40.0 phase -1.00; variance left 12%
2 component(s): 24 h amplitude 25.3 phase +0.55, 12 h amplitude 34.4 phase +2.93; variance left 240%
least squares: 24 h amplitude 40.0 phase -1.00, 12 h amplitude 15.0 phase +0.50; variance left 0%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from ada.data_containers.generic import GenericData
from ada.long.cosinor import Linear

hours = np.arange(0, 7 * 24, 1 / 60)
angle = 2 * np.pi * hours / 24
activity = 100 + 40 * np.sin(angle - 1) + 15 * np.sin(2 * angle + 0.5)
data = GenericData(np.vstack([hours * 3600, activity]), {'mesa_id': '1'}, 1 / 60, ['timestamp', 'activity'])
for components in (1, 2):
    result = Linear(24, n_components=components).fit(data, 'activity')[0]
    parts = [value for value in result.fit_params.values() if isinstance(value, dict)]
    fitted = result.fit_params['constant'] + sum(
        part['amplitude'] * np.sin(2 * np.pi * hours / part['period'] + part['phase']) for part in parts)
    left = np.var(activity - fitted) / np.var(activity)
    print(f'{components} component(s):', ', '.join(f"{part['period']:.0f} h amplitude {part['amplitude']:.1f} phase {part['phase']:+.2f}" for part in parts) + f'; variance left {left:.0%}')
terms = np.column_stack([np.ones_like(angle), np.sin(angle), np.cos(angle), np.sin(2 * angle), np.cos(2 * angle)])
weights = np.linalg.lstsq(terms, activity, rcond=None)[0]
print(f'least squares: 24 h amplitude {np.hypot(*weights[1:3]):.1f} phase {np.arctan2(weights[2], weights[1]):+.2f},',
      f'12 h amplitude {np.hypot(*weights[3:5]):.1f} phase {np.arctan2(weights[4], weights[3]):+.2f}; variance left {np.var(activity - terms @ weights) / np.var(activity):.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
