#!/usr/bin/env bash
# The listener of hl7-tea reads 1,024 bytes of a message and acknowledges it: of 20 results of a laboratory 15 arrive, the
# last of them cut off, and the sender is told that all is well.
#
# Packages: hl7-tea 2.0.1, names 0.3.0.
# Behaviour: the listener calls recv(1024) once for each connection and does not look for the end, 1C 0D, before
#   it answers AA, "application accept", and hands the message on. A second message on the connection is not read either.
# Expected: the whole message, or AE or AR, so that the sender keeps it and tries again.
# Why it matters here: a message with an address, insurance and one order is longer than this. What is lost is lost without
#   a trace on both sides.
# Instead: subclass and read until the end block before the message is parsed.
# Source: the message that was sent; the transport of HL7 (MLLP), in which the end block ends the message.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'names==0.3.0' 'hl7-tea==2.0.1'
cat > expected.txt <<'EXPECTED'
1 results, 164 bytes: 1 results received, the last one ends '9|H|||F|||20240101080000', answer MSA|AA|42
5 results, 408 bytes: 5 results received, the last one ends '9|H|||F|||20240101080000', answer MSA|AA|42
10 results, 714 bytes: 10 results received, the last one ends '9|H|||F|||20240101080000', answer MSA|AA|42
20 results, 1334 bytes: 15 results received, the last one ends '99|H|||F|||2024010108000', answer MSA|AA|42
100 results, 6295 bytes: 15 results received, the last one ends '99|H|||F|||2024010108000', answer MSA|AA|42
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging
import socket
import threading
from hl7_tea.mllp.listener import END_BLOCK, START_BLOCK, MllpListener

logging.disable(logging.CRITICAL)


class Listener(MllpListener):
    def handle_data(self, data):
        self.message = data


for results in (1, 5, 10, 20, 100):
    lines = ['MSH|^~\\&|LAB|HOSP|EHR|HOSP|20240101120000||ORU^R01|42|P|2.5', 'PID|1||4711^^^HOSP^MR||DOE^JANE||19800101|F']
    lines += [f'OBX|{number}|NM|GLU^Glucose||{100 + number}|mg/dL|70-99|H|||F|||20240101080000' for number in range(1, results + 1)]
    text = '\r'.join(lines)
    ours, theirs = socket.socketpair()
    listener = Listener()
    thread = threading.Thread(target=listener._MllpListener__handle_client, args=(theirs,))
    ours.sendall(f'{START_BLOCK}{text}{END_BLOCK}'.encode())
    thread.start()
    thread.join()
    answer = ours.recv(4096).decode().split('\r')[1].strip('\x1c')
    print(f'{results} results, {len(text)} bytes: {len(listener.message.get_segments("OBX"))} results received, '
          f'the last one ends {str(listener.message.segments[-1])[-24:]!r}, answer {answer}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
