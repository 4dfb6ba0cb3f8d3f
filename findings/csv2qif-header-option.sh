#!/usr/bin/env bash
# The option of csv2qif that removes the header keeps it, and without it the first payment is lost.
#
# Packages: csv2qif 0.6.0.
# Behaviour: -s is documented as "Assume first row of input has headers, and remove it", with the
#   default True. Giving it switches the removal off. A file without a header therefore loses its
#   first payment in the QIF file, without a message, and a file with a header is refused where -s is
#   given, since "Date" is not a date.
# Expected: a header that is removed with -s and kept without.
# Instead: give -s for files without a header, and not for files with one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'csv2qif==0.6.0'
cat > expected.txt <<'EXPECTED'
without a header, no option: 2 of 3 payments ['GAS', 'SALARY']
without a header, -s: 3 of 3 payments ['RENT', 'GAS', 'SALARY']
with a header, no option: 3 of 3 payments ['RENT', 'GAS', 'SALARY']
with a header, -s: 0 of 3 payments [] ValueError: time data 'Date' does not match format '%m/%d/%Y'
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import subprocess
from pathlib import Path

payments = ['01/05/2026,RENT,-500.00', '01/07/2026,GAS,-80.00', '01/09/2026,SALARY,2000.00']
command = ['env/bin/csv2qif', '-a', 'Assets:Bank', '-t', 'Bank', '-i', 'bank.csv', '-c', '{"date": 0, "name": 1, "amount": 2}']
for name, header in (('without a header', []), ('with a header', ['Date,Name,Amount'])):
    Path('bank.csv').write_text('\n'.join(header + payments) + '\n')
    for option in ([], ['-s']):
        run = subprocess.run(command + option, capture_output=True, text=True)
        written = [line[1:] for line in run.stdout.splitlines() if line.startswith('P')]
        reason = run.stderr.strip().splitlines()[-1] if run.returncode else ''
        print(f'{name}, {"-s" if option else "no option"}: {len(written)} of 3 payments {written} {reason}'.rstrip())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
