#!/usr/bin/env bash
# hl7-tea deletes all other numbers of a patient where it is asked to remove a part of one of them, and takes the next one:
# with index 1 only the second is left.
#
# Packages: hl7-tea 2.0.1, names 0.3.0.
# Behaviour: remove_field with a subfield and field_repetition_index replaces the list of the repetitions by the one at this
#   place and writes that back as the whole field. The index must be at least 1 and is then used as one that counts from 0,
#   so that the first cannot be reached and the last raises an error.
# Expected: three identifiers, of which the first has lost its second part. set_field, with the same kind of index, counts
#   from 1 and keeps the others.
# Why it matters here: PID-3 has the number of the hospital, of the insurance and of the country. Two of them are lost.
# Instead: set_field(path, "", repetition_index=...).
# Source: the message that was put in, and set_field.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'names==0.3.0' 'hl7-tea==2.0.1'
cat > expected.txt <<'EXPECTED'
second part of repetition None removed: ['4711^M10', '9872^M11', '1234^M12']
second part of repetition 1 removed: ['9872^M11']
second part of repetition 2 removed: ['1234^M12']
second part of repetition 3: Invalid repetition_index=3
set_field, repetition 1: ['4711^^M10', '9872^6^M11', '1234^7^M12']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hl7_tea import Message

START = 'MSH|^~\\&|LAB|NORTH|EHR|SOUTH|20240101||ADT^A08|42|P|2.5\rPID|1||4711^5^M10~9872^6^M11~1234^7^M12||DOE^JANE'
for index in (None, 1, 2, 3):
    message = Message(START)
    try:
        message.remove_field('PID-3.2', field_repetition_index=index)
        print(f'second part of repetition {index} removed: {message.get_field_all("PID-3")}')
    except ValueError as error:
        print(f'second part of repetition {index}: {error}')
message = Message(START)
message.set_field('PID-3.2', '', repetition_index=1)
print('set_field, repetition 1:', message.get_field_all('PID-3'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
