#!/usr/bin/env bash
# The dose to 2 cm³ of an organ is its maximum dose in PyDVH where the histogram is in per cent: 60.0 Gy in place of
# 57.6.
#
# Packages: PyDVH 1.0.10, numpy 2.4.6.
# Behaviour: for a histogram in per cent, a volume in cm³ is divided by 100 and by the volume of the organ, where it
#   should be multiplied by 100: 2 of 50 cm³ are 0.0004 % and not 4 %.
# Expected: the same dose as from the same histogram in cm³.
# Why it matters here: the dose to the 2 cm³ with the highest dose is the limit for rectum and bladder in
#   brachytherapy.
# Instead: convert to per cent before, or to_absolute_volume_values() first.
# Source: Pötter and others (2006), "Recommendations from gynaecological (GYN) GEC ESTRO working group (II)",
#   Radiotherapy and Oncology 78(1), D2cc.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'PyDVH==1.0.10' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
dose to 1 cm³ of 50: in per cent 60.00 Gy, in cm³ 58.80 Gy, by hand 58.80 Gy
dose to 2 cm³ of 50: in per cent 60.00 Gy, in cm³ 57.60 Gy, by hand 57.60 Gy
dose to 5 cm³ of 50: in per cent 60.00 Gy, in cm³ 54.00 Gy, by hand 54.00 Gy
dose to 2 %: in per cent 58.80 Gy, in cm³ 58.80 Gy
dose to 4 %: in per cent 57.60 Gy, in cm³ 57.60 Gy
dose to 10 %: in per cent 54.00 Gy, in cm³ 54.00 Gy
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pydvh import DVHData, DVHType

doses = np.arange(0.0, 61.0)
share = np.clip(100 * (1 - doses / 60), 0, 100)  # every dose up to 60 Gy is as frequent
in_per_cent = DVHData.from_DDVH_fixed_bin_width('rectum', DVHType.CDVH, doses, share, 'Gy', '%', total_volume=50.0)
absolute = DVHData.from_DDVH_fixed_bin_width('rectum', DVHType.CDVH, doses, share / 2, 'Gy', 'cm3', total_volume=50.0)
for volume in (1, 2, 5):
    print(f"dose to {volume} cm³ of 50: in per cent {in_per_cent.get_dose_at_volume(volume, 'cm3'):.2f} Gy, in cm³ "
          f"{absolute.get_dose_at_volume(volume, 'cm3'):.2f} Gy, by hand {60 * (1 - volume / 50):.2f} Gy")
for share_of_volume in (2, 4, 10):
    print(f"dose to {share_of_volume} %: in per cent {in_per_cent.get_dose_at_volume(share_of_volume, '%'):.2f} Gy, "
          f"in cm³ {absolute.get_dose_at_volume(share_of_volume, '%'):.2f} Gy")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
