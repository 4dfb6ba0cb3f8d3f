#!/usr/bin/env bash
# PythonMeta leaves studies out of a meta-analysis that are named by a year or a number.
#
# Packages: PythonMeta 1.26, numpy 2.4.6, scipy 1.17.1, statsmodels 0.15.0, matplotlib 3.11.2.
# Behaviour: a line is a name and the counts; the name is the entry that is not a number. A study named
#   2014 or 101 has no name then, and its line is skipped without a message, as is a line of
#   fewer than ten characters, whatever it says. The pooled odds ratio is the one of the other studies, with
#   their number of patients.
# Expected: the first or last entry is the name, or an error that names the line.
# Instead: compare the number of studies with the number of lines; write "study 2014".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'PythonMeta==1.26' 'numpy==2.4.6' 'scipy==1.17.1' 'statsmodels==0.15.0' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
as they are named: 2 of 5 studies, 385 patients, odds ratio 0.51 (0.31 to 0.83)
with longer names: 5 of 5 studies, 1403 patients, odds ratio 1.08 (0.85 to 1.37)
Mantel-Haenszel by hand: 1.08
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from PythonMeta import Data, Meta

rows = [
    ('Basel', 15, 100, 30, 100), ('Lyon', 18, 90, 27, 95), ('2014', 90, 300, 70, 300),
    ('101', 60, 200, 45, 200), ('B', 1, 9, 3, 9),
]

def pool(rows, names):
    data = Data()
    data.datatype = 'CATE'
    studies = data.getdata([', '.join(map(str, (name, *row[1:]))) for name, row in zip(names, rows)])
    meta = Meta()
    meta.datatype, meta.models, meta.algorithm, meta.effect = 'CATE', 'Fixed', 'MH', 'OR'
    total = meta.meta(studies)[0]
    interval = f'{total[3]:.2f} to {total[4]:.2f}'
    return f'{len(studies)} of {len(rows)} studies, {total[5]} patients, odds ratio {total[1]:.2f} ({interval})'

print('as they are named:', pool(rows, [row[0] for row in rows]))
print('with longer names:', pool(rows, ['study ' + row[0] for row in rows]))
tables = [(a, n - a, c, m - c) for _, a, n, c, m in rows]
weights = [(a * d / (a + b + c + d), b * c / (a + b + c + d)) for a, b, c, d in tables]
print(f'Mantel-Haenszel by hand: {sum(up for up, _ in weights) / sum(down for _, down in weights):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
