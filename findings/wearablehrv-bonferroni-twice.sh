#!/usr/bin/env bash
# wearablehrv corrects for multiple tests twice, and counts each regression as five: one single test with a
# p-value of 0.005 is not significant, and of 20 tests one needs a p-value below 0.000005.
#
# Packages: wearablehrv 0.2.1.
# Behaviour: bonferroni_correction_regression multiplies the p-value by the number of tests and compares it with
#   alpha divided by this number, so that the correction is squared. The number of tests is the sum of the
#   lengths of the results, which have five entries each: slope, intercept, r, p and standard error.
#   bonferroni_correction_icc counts tests, and corrects twice as well. The functions use no other package; the
#   script leaves out those for plots.
# Expected: p times the number of tests below alpha, or p below alpha divided by it.
# Instead: statsmodels.stats.multitest.multipletests(p, method='bonferroni').
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'wearablehrv==0.2.1'
cat > expected.txt <<'EXPECTED'
1 tests, p-value 0.04: corrected 0.2, significant False; by hand 0.04, True
1 tests, p-value 0.005: corrected 0.025, significant False; by hand 0.005, True
1 tests, p-value 0.001: corrected 0.005, significant True; by hand 0.001, True
20 tests, p-value 0.002: corrected 0.2, significant False; by hand 0.04, True
20 tests, p-value 0.0001: corrected 0.01, significant False; by hand 0.002, True
20 tests, p-value 6e-06: corrected 0.0006, significant False; by hand 0.00012, True
20 tests, p-value 4e-06: corrected 0.0004, significant True; by hand 8e-05, True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import importlib.util
import contextlib
import io
import sys
import sysconfig
from unittest import mock

path = sysconfig.get_path('purelib') + '/wearablehrv/group.py'
for line in open(path, encoding='utf-8'):
    if line.startswith(('import ', 'from ')) and line.split()[1].split('.')[0] not in sys.stdlib_module_names:
        parts = line.split()[1].split('.')
        for count in range(1, len(parts) + 1):
            sys.modules['.'.join(parts[:count])] = mock.MagicMock()
specification = importlib.util.spec_from_file_location('group', path)
group = importlib.util.module_from_spec(specification)
specification.loader.exec_module(group)

for tests, values in ((1, (0.04, 0.005, 0.001)), (20, (0.002, 0.0001, 0.000006, 0.000004))):
    for value in values:
        conditions = {str(number): {'slope': 1.0, 'intercept': 0.0, 'r_value': 0.5, 'p_value': value, 'std_err': 0.1} for number in range(tests)}
        with contextlib.redirect_stdout(io.StringIO()):
            found = group.bonferroni_correction_regression({'watch': {'rmssd': conditions}})['watch']['rmssd']['0']
        print(f'{tests} tests, p-value {value:g}: corrected {found["corrected_p_value"]:g}, significant {found["is_significant"]}; '
              f'by hand {min(value * tests, 1):g}, {value * tests < 0.05}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
