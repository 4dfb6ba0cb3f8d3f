#!/usr/bin/env bash
# pandas.read_sas turns the number 0 of a SAS transport file into 5.4e-79.
#
# Packages: pandas 3.1.1, pyreadstat 1.3.7 (writes the file, and reads it for comparison).
# Behaviour: IBM floating point has an all-zero pattern for 0; pandas converts it like any other
#   exponent, so a test such as x == 0 or x > 0 gives the wrong answer for each true zero.
# Expected: 0.0, as pyreadstat reads it.
# Instead: read transport files with pyreadstat.read_xport.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'pyreadstat==1.3.7' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
pandas [5.397605346934028e-79, 1.0, 20.0] smokers 3
pyreadstat [0.0, 1.0, 20.0] smokers 2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
import pyreadstat

frame = pd.DataFrame({'cigs': [0.0, 1.0, 20.0]})
pyreadstat.write_xport(frame, 'smoking.xpt', file_format_version=5)
by_pandas = pd.read_sas('smoking.xpt', format='xport')['cigs']
by_pyreadstat = pyreadstat.read_xport('smoking.xpt')[0]['cigs']
print('pandas', by_pandas.tolist(), 'smokers', int((by_pandas > 0).sum()))
print('pyreadstat', by_pyreadstat.tolist(), 'smokers', int((by_pyreadstat > 0).sum()))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
