#!/usr/bin/env bash
# mpedtools merges pedigrees of different people and raises no error, though it documents one: people whom
# the first file lacks are dropped, and people with other parents in the second keep the parents of the first.
#
# Packages: mpedtools 0.1.0.
# Behaviour: merge documents a ValueError for pedigrees with mismatched individuals. It compares nothing: it
#   goes through the people of the first file and looks for each in the others. The order of the files
#   decides who is in the result, and the summary of the one with fewer people says that all is well.
# Expected: the error, or all people of all files.
# Instead: compare the sets of FamID, IndID and parents before merging.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'mpedtools==0.1.0'
cat > expected.txt <<'EXPECTED'
heart, liver: people ['1', '2', '3'], liver affected ['1'], father of 3: 1, Validation: OK
liver, heart: people ['1', '2', '3', '4', '5'], liver affected ['1', '4', '5'], father of 3: 0,   [warning] Individual 3 has only one parent specified
liver affected in its file: ['1', '4', '5']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import mpedtools
from mpedtools import ops

heart = mpedtools.parse('F1\t1\t0\t0\t1\t1\nF1\t2\t0\t0\t2\t2\nF1\t3\t1\t2\t1\t2\n')
liver = mpedtools.parse('F1\t1\t0\t0\t1\t2\nF1\t2\t0\t0\t2\t1\nF1\t3\t0\t2\t1\t1\nF1\t4\t1\t2\t2\t2\nF1\t5\t1\t2\t2\t2\n')
for name, files, columns in (('heart, liver', [heart, liver], ['heart', 'liver']), ('liver, heart', [liver, heart], ['liver', 'heart'])):
    merged = ops.merge(files, columns)
    print(f'{name}: people {[person.ind_id for person in merged.individuals]}, liver affected '
          f'{[person.ind_id for person in merged.get_affected("liver")]}, father of 3: '
          f'{merged.get_individual("F1", "3").father_id}, {ops.summarise(merged).splitlines()[-1]}')
print('liver affected in its file:', [person.ind_id for person in liver.get_affected()])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
