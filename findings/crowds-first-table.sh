#!/usr/bin/env bash
# crowds returns the first table that it anonymised, in place of every later one that needs coarser
# groups.
#
# Packages: crowds 0.0.1, pandas 1.5.3, numpy 1.26.4.
# Behaviour: the search for the best generalization keeps its candidates in a default argument,
#   which Python makes once. The candidates of all earlier calls, their tables with them, compete in
#   the next call, and the one with the least loss is released, cut to groups of the new k. A second
#   ward is thus replaced by the first, whoever asked for it, without a message.
# Expected: each table anonymised by itself, as in a new process.
# Why it matters here: the rows of one client are sent to another, and results of studies that
#   compare values of k in a loop are all about one table.
# Instead: one process for each table; compare the rows that come back with those that went in.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'crowds==0.0.1' 'pandas==1.5.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
one process: north
  north gives ages [30, 30, 30, 40, 40, 40] of ward north
one process: south
  south gives ages [50, 50, 50, 50, 50, 50] of ward south
one process: north south
  north gives ages [30, 30, 30, 40, 40, 40] of ward north
  south gives ages [30, 30, 30, 40, 40, 40] of ward north
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import subprocess
import sys

PROGRAM = '''
import sys
import pandas as pd
from crowds.kanonymity.generalizations import GenRule
from crowds.kanonymity.ola import anonymize

tables = {
    'north': pd.DataFrame({'age': [31, 32, 33, 41, 42, 43], 'ward': 'north'}),
    'south': pd.DataFrame({'age': [61, 72, 83, 64, 75, 86], 'ward': 'south'}),
}
for name in sys.argv[1:]:
    rules = {'age': GenRule([lambda age: age // 10 * 10, lambda age: age // 50 * 50])}
    release, levels = anonymize(tables[name], rules, k=3)
    print(f'  {name} gives ages', release.age.tolist(), 'of ward', *release.ward.unique())
'''
for names in (['north'], ['south'], ['north', 'south']):
    print('one process:', *names, flush=True)
    subprocess.run([sys.executable, '-W', 'ignore', '-c', PROGRAM, *names], check=True)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
