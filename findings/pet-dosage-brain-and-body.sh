#!/usr/bin/env bash
# PET_Dosage takes the brain for the body and the body for the brain: the dose for a scan of the whole body is
# the one for a brain, whatever the weight, and the dose for the brain of somebody of 100 kg is 80 times too high.
#
# Packages: PET_Dosage 0.0.3, numpy 1.26.4, pandas 2.2.3.
# Behaviour: main asks to "enter 0 if full body or 1 if brain". finding_volume takes mass / density for 1, and the
#   volume of a brain, by sex, for 0. The amount of tracer is proportional to the volume. The script loads the
#   module alone, since the package imports itself under another name.
# Expected: the volume of the body for 0 and of the brain for 1.
# Instead: nothing to be used for patients; as an exercise, exchange the two.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'PET_Dosage==0.0.3'
cat > expected.txt <<'EXPECTED'
50 kg, answer 0 for full body: 0.07 pmol, by hand 3.12 pmol
50 kg, answer 1 for brain: 3.12 pmol, by hand 0.07 pmol
100 kg, answer 0 for full body: 0.08 pmol, by hand 6.24 pmol
100 kg, answer 1 for brain: 6.24 pmol, by hand 0.08 pmol
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import importlib.util
import io
import sysconfig
from unittest import mock

path = sysconfig.get_path('purelib') + '/PET_Dosage/PET_Dosage.py'
specification = importlib.util.spec_from_file_location('dosage', path)
dosage = importlib.util.module_from_spec(specification)
specification.loader.exec_module(dosage)

for mass, sex in ((50, 1), (100, 0)):
    for location, name in ((0, 'full body'), (1, 'brain')):
        output = io.StringIO()
        with mock.patch('builtins.input', side_effect=['1', str(mass), '1.75', str(location), str(sex)]), contextlib.redirect_stdout(output):
            dosage.main()
        found = float(output.getvalue().splitlines()[0].split()[-1])
        volume = mass / 985 if location == 0 else (0.001273, 0.001131)[sex]
        print(f'{mass} kg, answer {location} for {name}: {found * 1e12:.2f} pmol, by hand {volume * 3.7e13 / 6.022e23 * 1e12:.2f} pmol')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
