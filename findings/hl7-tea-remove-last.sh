#!/usr/bin/env bash
# hl7-tea removes the segments from the end where it is given an index from the start: index 0 of three allergies deletes
# the last one.
#
# Packages: hl7-tea 2.0.1, names 0.3.0.
# Behaviour: remove_segment goes through the message backwards and counts the segments of this name on the way, from 0. The
#   index of the segment in remove_field, the method beside it, counts from the front.
# Expected: the first, as in "del_ind is an optional zero-based index parameter. It can be used to delete a specific
#   repetition of the segment".
# Why it matters here: an allergy that was ruled out stays in the message, and one that the patient has is gone.
# Instead: delete from message.segments by hand.
# Source: the docstring, and remove_field of the same class.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'names==0.3.0' 'hl7-tea==2.0.1'
cat > expected.txt <<'EXPECTED'
remove_segment("AL1", 0): gone ['LATEX'], expected ['PENICILLIN']
remove_segment("AL1", 1): gone ['PEANUT'], expected ['PEANUT']
remove_segment("AL1", 2): gone ['PENICILLIN'], expected ['LATEX']
remove_field("AL1-3", segment_repetition_index=0): left ['PEANUT', 'LATEX']
remove_field("AL1-3", segment_repetition_index=1): left ['PENICILLIN', 'LATEX']
remove_field("AL1-3", segment_repetition_index=2): left ['PENICILLIN', 'PEANUT']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hl7_tea import Message


def message():
    return Message('\r'.join(['MSH|^~\\&|LAB|NORTH|EHR|SOUTH|20240101||ORU^R01|42|P|2.5', 'AL1|1|DA|PENICILLIN',
                              'AL1|2|FA|PEANUT', 'AL1|3|DA|LATEX']))


for index in (0, 1, 2):
    changed = message()
    before = changed.get_field_all('AL1-3')
    changed.remove_segment('AL1', index)
    after = changed.get_field_all('AL1-3')
    print(f'remove_segment("AL1", {index}): gone {[name for name in before if name not in after]}, expected {[before[index]]}')
for index in (0, 1, 2):
    changed = message()
    changed.remove_field('AL1-3', segment_repetition_index=index)
    print(f'remove_field("AL1-3", segment_repetition_index={index}): left {changed.get_field_all("AL1-3")}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
