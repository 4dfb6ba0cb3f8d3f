#!/usr/bin/env bash
# PyDVH adds the volume of each voxel below the lower limit of its doses to that limit, in Gy: with a limit of 5 Gy,
# 13.3 cm³ of a lung receive 12 Gy, and in truth 7.9.
#
# Packages: PyDVH 1.0.10, numpy 2.4.6.
# Behaviour: from_dose_matrix counts a voxel above the upper limit as overflow. For one below the lower limit it adds
#   the volume to lower_dose, by which all following voxels are put into bins, and counts the voxel in a bin from the
#   end as well, since its place is negative.
# Expected: the volume in underflow, whose field exists, and the other voxels in the bins of their doses.
# Why it matters here: the volume above a dose decides whether a plan is accepted.
# Instead: keep lower_dose_limit at 0.
# Source: ICRU Report 83 (2010), section 3: V_D is the volume that receives at least D.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'PyDVH==1.0.10' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
lower limit 0 Gy, which is 0.00 Gy afterwards: cm³ above 8, 12 and 16 Gy ['11.8', '7.9', '4.1'], by hand ['11.8', '7.9', '4.1']
lower limit 1 Gy, which is 2.72 Gy afterwards: cm³ above 8, 12 and 16 Gy ['13.0', '9.1', '5.2'], by hand ['11.8', '7.9', '4.1']
lower limit 5 Gy, which is 13.48 Gy afterwards: cm³ above 8, 12 and 16 Gy ['17.2', '13.3', '9.8'], by hand ['11.8', '7.9', '4.1']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pydvh import DVHData, DVHType

doses = np.random.default_rng(0).uniform(0, 20, 2000)  # Gy, for voxels of 0.01 cm³
for limit in (0, 1, 5):
    histogram = DVHData.from_dose_matrix('lung', DVHType.CDVH, doses, 'Gy', 0.01, 'cm3', 30, limit, 0.1)
    found = [f'{histogram.get_volume_at_dose(dose):.1f}' for dose in (8, 12, 16)]
    right = [f'{0.01 * (doses >= dose).sum():.1f}' for dose in (8, 12, 16)]
    print(f'lower limit {limit} Gy, which is {histogram.lower_dose:.2f} Gy afterwards: cm³ above 8, 12 and 16 Gy '
          f'{found}, by hand {right}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
