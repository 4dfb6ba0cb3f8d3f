#!/usr/bin/env bash
# statadict leaves out the variables of a Stata dictionary whose lines are not indented.
#
# Packages: statadict 1.1.0, pandas 2.3.3, numpy 2.3.3.
# Behaviour: a line is read only where a space or tab comes before "_column". Lines without one are
#   skipped without a message, so that the table has fewer variables; the widths, which are
#   documented for pandas.read_fwf too, then begin at the left for those that remain, and give a
#   variable the digits of another one.
# Expected: each _column of the file. Stata's manual does not ask for an indentation.
# Instead: indent the lines first, count the variables, and use colspecs and not widths.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'statadict==1.1.0'
cat > expected.txt <<'EXPECTED'
indented: variables ['id', 'age', 'pulse']
  colspecs {'id': ['P001', 'P002'], 'age': [61, 34], 'pulse': [72, 88]}
  widths {'id': ['P001', 'P002'], 'age': [61, 34], 'pulse': [72, 88]}
one not: variables ['id', 'pulse']
  colspecs {'id': ['P001', 'P002'], 'pulse': [72, 88]}
  widths {'id': ['P001', 'P002'], 'pulse': [61, 34]}
none: variables []
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import io

import pandas as pd
from statadict import parse_stata_dict

lines = ['_column(1) str4 id %4s "patient"', '_column(5) int age %3f "age"', '_column(8) int pulse %3f "pulse"']
for label, indent in (('indented', ('    ', '    ', '    ')), ('one not', ('    ', '', '    ')), ('none', ('', '', ''))):
    with open('people.dct', 'w') as file:
        file.write('infile dictionary {\n' + '\n'.join(space + line for space, line in zip(indent, lines)) + '\n}\n')
    found = parse_stata_dict('people.dct')
    print(f'{label}: variables {found.names}')
    for way in ('colspecs', 'widths'):
        if found.names:
            table = pd.read_fwf(io.StringIO('P001061072\nP002034088\n'), names=found.names, **{way: getattr(found, way)})
            print(f'  {way}', table.to_dict('list'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
