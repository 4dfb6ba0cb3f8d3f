#!/usr/bin/env bash
# chronoeeg calls a lively EEG flat wherever its mean is below zero, and a dead channel of zeros perfect: the
# quality is 0 for one that swings around -5 µV, 50 around 0 and 100 around 5.
#
# Packages: chronoeeg 0.1.0, numpy 1.26.4, pandas 2.2.3, scipy 1.10.1.
# Behaviour: calculate_flatline_quality divides the standard deviation of five seconds by their mean, with its
#   sign, and calls up to 0.01 flat. A negative mean makes it negative, and EEG has means around zero. A mean of
#   exactly 0 is left out, so that a channel without any signal is not flat. The script loads the module alone.
# Expected: a quality of 100 for the three of them and of 0 for the dead channel.
# Instead: compare the standard deviation with one of the amplifier.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.10.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'chronoeeg==0.1.0'
cat > expected.txt <<'EXPECTED'
lively, around -5 µV: quality 0, standard deviation 24.5 µV
lively, around 0 µV: quality 50, standard deviation 24.5 µV
lively, around 5 µV: quality 100, standard deviation 24.5 µV
dead, all 0: quality 100, standard deviation 0.0 µV
dead, all 5 µV: quality 0, standard deviation 0.0 µV
dead, all -5 µV: quality 0, standard deviation 0.0 µV
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import importlib.util
import sysconfig

import numpy
import pandas

path = sysconfig.get_path('purelib') + '/chronoeeg/quality/metrics.py'
specification = importlib.util.spec_from_file_location('metrics', path)
metrics = importlib.util.module_from_spec(specification)
specification.loader.exec_module(metrics)

generator = numpy.random.default_rng(0)
lively = generator.normal(0, 20, (128 * 60, 4)) + 20 * numpy.sin(2 * numpy.pi * 10 * numpy.arange(128 * 60) / 128)[:, None]
lively -= lively.mean(axis=0)
for name, signal in (('lively, around -5 µV', lively - 5), ('lively, around 0 µV', lively), ('lively, around 5 µV', lively + 5),
                     ('dead, all 0', 0 * lively), ('dead, all 5 µV', 0 * lively + 5), ('dead, all -5 µV', 0 * lively - 5)):
    quality = metrics.calculate_flatline_quality(pandas.DataFrame(signal), 128)
    print(f'{name}: quality {quality:.0f}, standard deviation {signal.std():.1f} µV')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
