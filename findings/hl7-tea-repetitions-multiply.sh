#!/usr/bin/env bash
# hl7-tea writes a new value of a field once for each value that the field had: a patient with three numbers who is given
# two has six.
#
# Packages: hl7-tea 2.0.1, names 0.3.0.
# Behaviour: set_field without repetition_index replaces each repetition by the whole new value. A list is joined
#   with ~ first, so that its repetitions are multiplied too.
# Expected: the value that is set, "sets a field value given its path", as get_field_all reads it from another message.
# Why it matters here: identifiers, telephone numbers and names repeat. Copying such a field between two messages makes
#   duplicates, which merge or block records in the system that receives them.
# Instead: write segment.fields[n - 1] by hand.
# Source: the list that was put in.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'names==0.3.0' 'hl7-tea==2.0.1'
cat > expected.txt <<'EXPECTED'
1 before, 'NEW' written: ['NEW']
1 before, ['NEW', 'OTHER'] written: ['NEW', 'OTHER']
2 before, 'NEW' written: ['NEW', 'NEW']
2 before, ['NEW', 'OTHER'] written: ['NEW', 'OTHER', 'NEW', 'OTHER']
3 before, 'NEW' written: ['NEW', 'NEW', 'NEW']
3 before, ['NEW', 'OTHER'] written: ['NEW', 'OTHER', 'NEW', 'OTHER', 'NEW', 'OTHER']
copied from another message: ['A', 'B', 'A', 'B', 'A', 'B'] in place of ['A', 'B']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hl7_tea import Message

for count in (1, 2, 3):
    numbers = '~'.join(f'{number}^^^HOSP' for number in range(1, count + 1))
    for value in ('NEW', ['NEW', 'OTHER']):
        message = Message(f'MSH|^~\\&|LAB|NORTH|EHR|SOUTH|20240101||ADT^A08|42|P|2.5\rPID|1||{numbers}||DOE^JANE')
        message.set_field('PID-3', value)
        print(f'{count} before, {value!r} written: {message.get_field_all("PID-3")}')
source = Message('PID|1||A~B')
target = Message('PID|1||1~2~3')
target.set_field('PID-3', source.get_field_all('PID-3'))
print('copied from another message:', target.get_field_all('PID-3'), 'in place of', source.get_field_all('PID-3'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
