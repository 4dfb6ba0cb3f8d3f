#!/usr/bin/env bash
# body-composition-analysis divides the density of a tissue by all pixels of the slice: muscle of 50 HU
# that covers a tenth of it has a mean of 5 HU, which is low muscle density by each published limit.
#
# Packages: body-composition-analysis 0.2.1, numpy 1.26.4, SimpleITK 2.4.0.
# Behaviour: get_intensity_at_center_L3 puts 0 outside the mask and takes the mean and the standard deviation of
#   the whole slice. So a mean depends on the area of the tissue and on the field of view of the image, and
#   the standard deviation has the zeros in it. get_intensity, for the liver, takes the pixels of the mask.
#   The script loads the module alone, since the package imports TotalSegmentator, which this does not use.
# Expected: the mean of the pixels of the tissue.
# Instead: ct[level][mask[level] > 0].mean().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4' 'SimpleITK==2.4.0'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'body-composition-analysis==0.2.1'
cat > expected.txt <<'EXPECTED'
muscle of 400 pixels in a slice of 10000: mean 2.0, standard deviation 9.9; by hand 49.9 and 8.0; get_intensity 49.7
muscle of 1024 pixels in a slice of 10000: mean 5.1, standard deviation 15.3; by hand 49.8 and 8.0; get_intensity 50.0
muscle of 400 pixels in a slice of 19600: mean 1.0, standard deviation 7.2; by hand 50.3 and 7.7; get_intensity 50.1
muscle of 1024 pixels in a slice of 19600: mean 2.6, standard deviation 11.3; by hand 49.9 and 8.2; get_intensity 50.1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import importlib.util
import sysconfig

import numpy

path = sysconfig.get_path('purelib') + '/body_composition/utils/vol_and_int_extraction.py'
specification = importlib.util.spec_from_file_location('extraction', path)
extraction = importlib.util.module_from_spec(specification)
specification.loader.exec_module(extraction)

generator = numpy.random.default_rng(0)
for field in (100, 140):
    for side in (20, 32):
        scan = numpy.full((3, field, field), -1000.0)
        mask = numpy.zeros(scan.shape)
        mask[:, 10:10 + side, 10:10 + side] = 1
        scan[mask > 0] = generator.normal(50, 8, int(mask.sum()))
        mean, spread = extraction.get_intensity_at_center_L3(scan, mask, 1)
        tissue = scan[1][mask[1] > 0]
        liver = extraction.get_intensity(scan, mask)
        print(f'muscle of {side ** 2} pixels in a slice of {field ** 2}: mean {mean:.1f}, standard deviation {spread:.1f}; '
              f'by hand {tissue.mean():.1f} and {tissue.std():.1f}; get_intensity {liver[0]:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
