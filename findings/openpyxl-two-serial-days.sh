#!/usr/bin/env bash
# openpyxl reads two serial days of a workbook as one date, 28 February 1900.
#
# Packages: openpyxl 3.1.5.
# Behaviour: spreadsheets of the 1900 system count a day 60, 29 February 1900, that never was.
#   Cells with 59 and 60 in a date format are both read as 1900-02-28, so dates of two cells that
#   differ become equal. Day 61 is 1 March, as in a spreadsheet. No warning.
# Expected: 60 told apart from 59, for example as the number that it is, or an error.
# Instead: where dates of 1900 can occur, read the number behind the format before it is a date.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'openpyxl==3.1.5'
cat > expected.txt <<'EXPECTED'
58 -> 1900-02-27
59 -> 1900-02-28
60 -> 1900-02-28
61 -> 1900-03-01
EXPECTED
env/bin/python - > seen.txt <<'PYTHON'
import openpyxl

book = openpyxl.Workbook()
days = (58, 59, 60, 61)
for row, day in enumerate(days, start=1):
    book.active.cell(row, 1, day).number_format = 'yyyy-mm-dd'
book.save('days.xlsx')
rows = openpyxl.load_workbook('days.xlsx').active.iter_rows(values_only=True)
for day, (date,) in zip(days, rows):
    print(day, '->', date.date())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
