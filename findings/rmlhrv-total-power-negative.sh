#!/usr/bin/env bash
# The total power of a heart in rmlhrv is the sum of two logarithms, -14.5 in place of 1242 ms2, its LF and HF are
# frequencies and not powers, and its pNN50 of 12.6 % is 0.012.
#
# Packages: rmlhrv 1.0.0, numpy 1.26.4, scipy 1.10.1, pandas 2.2.3, matplotlib 3.9.4, six 1.17.0.
# Behaviour: get_features, the table of the package, takes TP as log(ULF) + log(VLF), though it has the total power
#   in a variable beside it; ULF, VLF, LF and HF are the peak frequencies of the bands; and the pNN50 in per cent
#   is divided by 1000 with the values in milliseconds, so that 12 % of all differences are 0.012.
# Expected: the sum of the powers, the powers, and 12 or 0.12.
# Instead: TimeDomain.nn50 and FrequencyDomain.welch_psd of the package.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'rmlhrv==1.0.0' 'numpy==1.26.4' 'scipy==1.10.1' 'pandas==2.2.3' \
  'matplotlib==3.9.4' 'six==1.17.0'
cat > expected.txt <<'EXPECTED'
get_features: TP -14.5, LF 0.13, HF 0.33, pNN50 0.012; welch_psd: TP 1242, LF 800, HF 442 ms2; by hand pNN50 12.6 %, variance 1250 ms2
get_features: TP -13.8, LF 0.05, HF 0.23, pNN50 0.049; welch_psd: TP 4966, LF 3196, HF 1770 ms2; by hand pNN50 49.3 %, variance 4999 ms2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import matplotlib

matplotlib.use('Agg')
import numpy
from rmlhrv.factory import FrequencyDomain
from rmlhrv.get_features import get_features

bands = {'ulf': (0.0, 0.003), 'vlf': (0.003, 0.04), 'lf': (0.04, 0.15), 'hf': (0.15, 0.4)}
for size in (1, 2):
    time, series = 0, []
    while time < 300:
        series.append(900 + size * (40 * numpy.sin(2 * numpy.pi * 0.1 * time) + 30 * numpy.sin(2 * numpy.pi * 0.25 * time)))
        time += series[-1] / 1000
    series = numpy.array(series)
    found = get_features(numpy.cumsum(series) / 1000, 30, series, plot=False)
    right = FrequencyDomain.welch_psd(series, fbands=bands, mode='dev')[0]
    share = (abs(numpy.diff(series)) > 50).mean() * 100
    print(f'get_features: TP {found["TP"]:.1f}, LF {found["LF"]:.2f}, HF {found["HF"]:.2f}, pNN50 {found["pNN50"]:.3f}; welch_psd: TP '
          f'{right["fft_total"]:.0f}, LF {right["fft_abs"][2]:.0f}, HF {right["fft_abs"][3]:.0f} ms2; by hand pNN50 {share:.1f} %, variance {series.var():.0f} ms2')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
