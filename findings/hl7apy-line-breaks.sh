#!/usr/bin/env bash
# hl7apy escapes the line breaks and hexadecimal characters of an HL7 text a second time.
#
# Packages: hl7apy 1.3.5.
# Behaviour: a message that is parsed and written again keeps \S\ and \T\ as they were, but \.br\ (a
#   line break) and \X0D0A\ become \E\.br\E\ and \E\X0D0A\E\. To the next receiver those are a
#   backslash and letters: a report that has passed through shows codes where its lines ended.
# Expected: the field as it was sent.
# Instead: replace \E\.br\E\ by \.br\ and \E\X by \X in what to_er7 returns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7apy==1.3.5'
cat > expected.txt <<'EXPECTED'
sent: Leucocytes 5\.br\0 blasts seen\X0D0A\O\S\Hara \T\ Co
after 1: Leucocytes 5\E\.br\E\0 blasts seen\E\X0D0A\E\O\S\Hara \T\ Co
after 2: Leucocytes 5\E\.br\E\0 blasts seen\E\X0D0A\E\O\S\Hara \T\ Co
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hl7apy.parser import parse_message

text = r'Leucocytes 5\.br\0 blasts seen\X0D0A\O\S\Hara \T\ Co'
message = '\r'.join((
    r'MSH|^~\&|LAB|A|B|C|20260315||ORU^R01^ORU_R01|1|P|2.5',
    'PID|1||123',
    'OBR|1|||X',
    f'OBX|1|TX|N||{text}',
))
print('sent:', text)
for passes in (1, 2):
    read = parse_message(message, find_groups=False)
    message = read.to_er7()
    print(f'after {passes}:', message.split('|')[-1].strip())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
