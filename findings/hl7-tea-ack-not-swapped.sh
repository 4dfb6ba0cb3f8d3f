#!/usr/bin/env bash
# The acknowledgement of hl7-tea says that it comes from the sender of the message that it answers and goes to its receiver,
# which is itself.
#
# Packages: hl7-tea 2.0.1, names 0.3.0.
# Behaviour: create_acknowledgement copies MSH-3 to MSH-6 and the time MSH-7 from the message. Sending and receiving
#   application and facility are not exchanged, and the time is the one of the message.
# Expected: MSH-3 and MSH-4 are the application that answers, MSH-5 and MSH-6 the one that asked, and MSH-7 is the time at
#   which the acknowledgement was made.
# Why it matters here: engines route by these fields. An answer with the own address as its sender is sent back, or
#   refused, and the message is sent again.
# Instead: build the first segment of the answer in a subclass.
# Source: HL7 version 2, chapter 2, message header, fields 3 to 7.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'names==0.3.0' 'hl7-tea==2.0.1'
cat > expected.txt <<'EXPECTED'
MSH-3, sending application: LAB, expected EHR
MSH-4, sending facility: NORTH, expected SOUTH
MSH-5, receiving application: EHR, expected LAB
MSH-6, receiving facility: SOUTH, expected NORTH
MSH-7, time of this message: 20240101120000, expected now
MSH-9, type: ACK, expected ACK
time is the one of the message that is answered: True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hl7_tea.mllp.listener import MllpListener

message = 'MSH|^~\\&|LAB|NORTH|EHR|SOUTH|20240101120000||ORU^R01|42|P|2.5\rPID|1||4711'
seen = MllpListener().create_acknowledgement(message).strip('\x0b\x1c\r').split('\r')[0].split('|')
for place, name, expected in ((2, 'sending application', 'EHR'), (3, 'sending facility', 'SOUTH'), (4, 'receiving application', 'LAB'),
                              (5, 'receiving facility', 'NORTH'), (6, 'time of this message', 'now'), (8, 'type', 'ACK')):
    print(f'MSH-{place + 1}, {name}: {seen[place]}, expected {expected}')
print('time is the one of the message that is answered:', seen[6] == '20240101120000')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
