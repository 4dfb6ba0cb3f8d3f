#!/usr/bin/env bash
# hl7parser writes a time in a zone with half an hour west of Greenwich an hour wrong: -0330, Newfoundland, becomes
# -0430.
#
# Packages: hl7parser 0.7.5.
# Behaviour: the offset is divided into hours and minutes by a division that rounds down, so that -3.5 hours are -4
#   hours and 30 minutes, and these are written one behind the other. Whole hours and zones in the east are right.
# Expected: the text that was read, since nothing has changed it.
# Why it matters here: a message that is read and passed on has each time of an order, a result and a death one hour
#   later than it was.
# Instead: keep the text of the field, or format the offset from its absolute value.
# Source: HL7 v2.5, chapter 2.A, DTM: "+/-ZZZZ", hours and minutes of the offset with one sign for both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7parser==0.7.5'
cat > expected.txt <<'EXPECTED'
20260301120000+0530: written as 20260301120000+0530, which is +0 hours from it
20260301120000-0500: written as 20260301120000-0500, which is +0 hours from it
20260301120000-0330: written as 20260301120000-0430, which is +1 hours from it
20260301120000-0930: written as 20260301120000-1030, which is +1 hours from it
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime

from hl7parser.hl7 import HL7Message

for time in ('20260301120000+0530', '20260301120000-0500', '20260301120000-0330', '20260301120000-0930'):
    text = f'MSH|^~\\&|LAB|H|EHR|H|{time}||ADT^A01|1|P|2.5\rPID|1||123^^^H^MR||Example^Ada||19800101|F'
    message = HL7Message(text)
    written = str(message).splitlines()[0].split('|')[6]
    before, after = (datetime.strptime(value, '%Y%m%d%H%M%S%z') for value in (time, written))
    print(f'{time}: written as {written}, which is {(after - before).total_seconds() / 3600:+.0f} hours from it')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
