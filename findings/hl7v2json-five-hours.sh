#!/usr/bin/env bash
# hl7v2json writes -05:00 behind each time of a message, wherever it was sent: an admission at 8 o'clock in Berlin is at 14.
#
# Packages: hl7v2json 1.0.2, hl7 0.4.5, setuptools 75.8.0.
# Behaviour: a time of HL7 v2 without an offset is one of the sender's zone. The JSON states it with the offset of New York
#   in winter, in summer and elsewhere too. Nothing in the package names this offset.
# Expected: a time without an offset, or an argument for the zone.
# Why it matters here: other systems convert the time, and an evening becomes the next day.
# Instead: remove the last six characters of each time.
# Source: HL7 v2.7, chapter 2A, data type DTM: without an offset the time is local to the sender.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7v2json==1.0.2' 'hl7==0.4.5' 'setuptools==75.8.0'
cat > expected.txt <<'EXPECTED'
20261130200000 in Europe/Berlin: 2026-11-30T20:00:00-05:00, +6 hours from the moment, which is 2026-11-30T20:00:00+01:00
20260715080000 in America/New_York: 2026-07-15T08:00:00-05:00, +1 hours from the moment, which is 2026-07-15T08:00:00-04:00
20261130080000 in America/New_York: 2026-11-30T08:00:00-05:00, +0 hours from the moment, which is 2026-11-30T08:00:00-05:00
20261130080000 in Asia/Tokyo: 2026-11-30T08:00:00-05:00, +14 hours from the moment, which is 2026-11-30T08:00:00+09:00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime
from zoneinfo import ZoneInfo

from hl7v2json.parser import parse

for zone, local in (('Europe/Berlin', '20261130200000'), ('America/New_York', '20260715080000'),
                    ('America/New_York', '20261130080000'), ('Asia/Tokyo', '20261130080000')):
    text = '\r'.join([rf'MSH|^~\&|ADT|HOSPITAL|EMR|CLINIC|{local}||ADT^A01^ADT_A01|1|P|2.7', f'EVN||{local}',
                      'PID|1||123^^^HOSPITAL^MR||DOE^JANE||19800101|F', 'PV1|1|I', ''])
    seen = parse(text)['segments']['eventType']['recordedDate/time']
    right = datetime.strptime(local, '%Y%m%d%H%M%S').replace(tzinfo=ZoneInfo(zone))
    hours = (datetime.fromisoformat(seen) - right).total_seconds() / 3600
    print(f'{local} in {zone}: {seen}, {hours:+.0f} hours from the moment, which is {right.isoformat()}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
