#!/usr/bin/env bash
# fcsy replaces all values by the largest one where it is asked to trim the outliers of fewer than 20 cells, or
# of a part that is less than one cell.
#
# Packages: fcsy 0.10.0, numpy 1.26.4, pandas 2.2.3.
# Behaviour: rm_outliers moves the n lowest values to the next one and the n highest, order[-n:], with n =
#   int(cells * threshold). n is 0 for 19 cells and the default of 0.05, and order[-0:] is all of them: each
#   cell gets the value of the brightest one, which is the outlier itself. There is no warning, and a threshold
#   of 0, which should change nothing, does it to any table.
# Expected: nothing changed for n = 0.
# Instead: table.clip(table.quantile(0.05), table.quantile(0.95), axis=1).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'fcsy==0.10.0' 'numpy==1.26.4' 'pandas==2.2.3'
cat > expected.txt <<'EXPECTED'
19 cells from 1 to 18 and one of 500: [500, 500, 500, 500, 500, 500, 500, 500, 500, 500, 500, 500, 500, 500, 500, 500, 500, 500, 500]
20 cells from 1 to 19 and one of 500: [2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 19]
800 cells, threshold 0.002: means before 400.5 and 1200.5, after 400.5 and 1200.5, different values of CD4: 798
800 cells, threshold 0.001: means before 400.5 and 1200.5, after 800.0 and 1600.0, different values of CD4: 1
800 cells, threshold 0: means before 400.5 and 1200.5, after 800.0 and 1600.0, different values of CD4: 1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas
from fcsy.preprocessing import rm_outliers

for cells in (19, 20):
    table = pandas.DataFrame({'CD4': [float(value) for value in range(1, cells)] + [500.0]})
    print(f'{cells} cells from 1 to {cells - 1} and one of 500: {[int(value) for value in rm_outliers(table)["CD4"]]}')
table = pandas.DataFrame({'CD4': [float(value) for value in range(1, 801)], 'CD8': [float(value) for value in range(801, 1601)]})
for threshold in (0.002, 0.001, 0):
    trimmed = rm_outliers(table, threshold)
    print(f'800 cells, threshold {threshold}: means before {table["CD4"].mean():.1f} and {table["CD8"].mean():.1f}, after '
          f'{trimmed["CD4"].mean():.1f} and {trimmed["CD8"].mean():.1f}, different values of CD4: {trimmed["CD4"].nunique()}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
