#!/usr/bin/env bash
# The kernel density normalisation of intensity-normalization finds white matter at the mean of the brain in
# a usual scan, and at white matter if the same scan is divided by 100.
#
# Packages: intensity-normalization 3.0.1, numpy 2.4.6, scipy 1.17.1, nibabel 5.4.2, scikit-fuzzy 0.5.0.
# Behaviour: the method divides an image by the most frequent intensity of white matter, the last peak of
#   a smoothed histogram. It asks scipy's gaussian_kde for a bandwidth of an 80th of the largest
#   intensity; scipy takes that number for a factor of the standard deviation of the image. For
#   intensities up to 900 the bandwidth is 11 standard deviations, and the smoothed histogram has one peak,
#   the mean of all tissues. White matter is then 1.16 to 1.45 in place of 1, by how much of each tissue
#   the scan shows.
# Expected: 1, in each unit; a normalisation that ignores the scale is what the method is for.
# Why it matters here: MRI has no unit, and scanners store different ranges.
# Instead: its whitestripe method, or gaussian_kde with a bandwidth divided by the standard deviation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'intensity-normalization==3.0.1' 'numpy==2.4.6' 'scipy==1.17.1' 'nibabel==5.4.2' 'scikit-fuzzy==0.5.0'
cat > expected.txt <<'EXPECTED'
10000 voxels of white matter around 800, mean 560: found at 551, normalized to 1.45
10000 voxels of white matter around 80, mean 56: found at 58, normalized to 1.38
10000 voxels of white matter around 8, mean 5.6: found at 8, normalized to 1.00
20000 voxels of white matter around 800, mean 628: found at 617, normalized to 1.30
20000 voxels of white matter around 80, mean 62.8: found at 70.2, normalized to 1.14
20000 voxels of white matter around 8, mean 6.28: found at 7.97, normalized to 1.00
40000 voxels of white matter around 800, mean 691: found at 687, normalized to 1.16
40000 voxels of white matter around 80, mean 69.1: found at 76.3, normalized to 1.05
40000 voxels of white matter around 8, mean 6.91: found at 8.01, normalized to 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from intensity_normalization import normalize_image
from intensity_normalization.adapters.images import create_image
from intensity_normalization.normalizers.individual.kde import KDENormalizer

random = np.random.default_rng(0)


def make_scan(white):
    tissues = (random.normal(200, 30, 5000), random.normal(500, 40, 10_000), random.normal(800, 30, white))
    return np.concatenate(tissues).reshape(50, 50, -1)


for white in (10_000, 20_000, 40_000):
    scan = make_scan(white)
    for scale in (1, 0.1, 0.01):
        found = KDENormalizer().fit(create_image(scan * scale)).tissue_mode
        normalized = normalize_image(scan * scale, method='kde').get_data()
        print(f'{white} voxels of white matter around {800 * scale:g}, mean {scan.mean() * scale:.3g}: '
              f'found at {found:.3g}, normalized to {normalized[scan > 700].mean():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
