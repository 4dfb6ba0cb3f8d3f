#!/usr/bin/env bash
# pandas cannot read an OpenDocument sheet that holds a duration of 24 hours or more.
#
# Packages: pandas 3.1.1, odfpy 1.4.1, numpy 2.4.6.
# Behaviour: OpenDocument stores durations (PT25H00M00S, shown as 25:00:00). pandas takes the shown
#   text for a time of day: a stay of 22 hours becomes the time 22:00, and one cell of 25 hours ends
#   the reading of the whole file, whatever columns are asked for.
# Expected: a duration.
# Instead: save the sheet as CSV with durations as numbers, or read the cells with odfpy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'odfpy==1.4.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
22 hours: [datetime.time(22, 0)]
25 hours: DateParseError
25 hours, only the column ward: DateParseError
EXPECTED
env/bin/python - > seen.txt <<'PYTHON'
import pandas as pd
from odf.opendocument import OpenDocumentSpreadsheet
from odf.table import Table, TableCell, TableRow
from odf.text import P


def write(hours):
    file = OpenDocumentSpreadsheet()
    table = Table(name='stays')
    stay = ({'valuetype': 'time', 'timevalue': f'PT{hours}H00M00S'}, f'{hours}:00:00')
    for cells in (
        (({'valuetype': 'string'}, 'stay'), ({'valuetype': 'string'}, 'ward')),
        (stay, ({'valuetype': 'string'}, 'north')),
    ):
        row = TableRow()
        for kind, text in cells:
            cell = TableCell(**kind)
            cell.addElement(P(text=text))
            row.addElement(cell)
        table.addElement(row)
    file.spreadsheet.addElement(table)
    file.save('stays.ods')


for hours, columns in ((22, None), (25, None), (25, ['ward'])):
    write(hours)
    what = f'{hours} hours' + (', only the column ward' if columns else '')
    try:
        print(f'{what}:', pd.read_excel('stays.ods', engine='odf', usecols=columns).stay.tolist())
    except Exception as error:
        print(f'{what}:', type(error).__name__)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
