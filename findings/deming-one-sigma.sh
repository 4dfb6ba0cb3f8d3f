#!/usr/bin/env bash
# deming draws control limits at one standard deviation.
#
# Packages: deming 0.1.3, matplotlib 3.10.6, numpy 2.2.6, pandas 2.3.3.
# Behaviour: control_chart_img_buffer, for "quality control charts", adds the columns Upper and
#   Lower Control Limit to the table and draws them. They are the mean and one standard deviation.
#   Shewhart's limits, which Deming used, are three, so that 0.3 % of the readings of a stable
#   process are outside. With one, 32 % are. The standard deviation is the one of all readings, so a
#   shift widens the limits as well.
# Expected: three standard deviations, from the differences of neighbouring readings for single
#   values: mean ± 2.66 times the mean moving range.
# Instead: compute the limits by hand as below.
# Source: Shewhart, Economic Control of Quality of Manufactured Product, 1931; ISO 7870-2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'matplotlib==3.10.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'deming==0.1.3'
cat > expected.txt <<'EXPECTED'
in control: limits 98.1 to 102.1, 33 of 100 outside; by Shewhart 94.3 to 105.9, 0 outside
a shift of 4 after 80 days: limits 98.5 to 103.5, 37 of 100 outside; by Shewhart 94.5 to 107.4, 1 outside
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from deming import control_chart_img_buffer

draw = np.random.RandomState(0)
for name, shift in (('in control', 0), ('a shift of 4 after 80 days', 4)):
    table = pd.DataFrame({'day': np.arange(100), 'glucose': 100 + 2 * draw.normal(size=100)})
    table.loc[80:, 'glucose'] += shift
    control_chart_img_buffer(table, 'day', 'glucose')
    seen = [table['Lower Control Limit'][0], table['Upper Control Limit'][0]]
    moving = 2.66 * table['glucose'].diff().abs().mean()
    right = [table['glucose'].mean() - moving, table['glucose'].mean() + moving]
    outside = [int((~table['glucose'].between(*limits)).sum()) for limits in (seen, right)]
    print(f'{name}: limits {seen[0]:.1f} to {seen[1]:.1f}, {outside[0]} of 100 outside;',
          f'by Shewhart {right[0]:.1f} to {right[1]:.1f}, {outside[1]} outside')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
