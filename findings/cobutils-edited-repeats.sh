#!/usr/bin/env bash
# cobutils counts the characters of an edited picture and not the places that it stands for.
#
# Packages: cobutils 0.2.8.
# Behaviour: Z(5)9 stands for ZZZZZ9 and takes six places. cobutils takes five, the length of the text
#   "Z(5)9", and Z(6)9.99 eight in place of ten, so that the last digits are lost and all later fields
#   begin too early. Pictures without a sign for editing, such as 9(6), have the right length.
# Expected: the same for two ways of writing one picture.
# Instead: write the repetitions out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cobutils==0.2.8'
cat > expected.txt <<'EXPECTED'
ZZZZZ9, ZZZZZZ9.99: 23 of 23 characters, ['ANNA', '   125', '    980.50', 'A12']
Z(5)9, Z(6)9.99: 20 of 23 characters, ['ANNA', '   12', '5    980', '.50']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import cobutils

line = 'ANNA' + '   125' + '    980.50' + 'A12'
for count, amount in (('ZZZZZ9', 'ZZZZZZ9.99'), ('Z(5)9', 'Z(6)9.99')):
    definition = cobutils.load_definition_from_text(f"""       01  PATIENT.
           05  NAME        PIC X(4).
           05  STEPS       PIC {count}.
           05  COSTS       PIC {amount}.
           05  WARD        PIC X(3).
""")
    record = cobutils.Record(definition, line.encode('ascii'))
    fields = [value.decode() for value in record.values()]
    print(f'{count}, {amount}: {definition.size()} of {len(line)} characters, {fields}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
