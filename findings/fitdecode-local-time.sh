#!/usr/bin/env bash
# fitdecode labels the local time of a FIT file as UTC.
#
# Packages: fitdecode 0.11.0, garmin-fit-sdk 21.218.0 (writes the file).
# Behaviour: the activity message states one moment twice, as timestamp in UTC and as local_timestamp
#   on the clock of the wearer; their difference is the offset. fitdecode gives both the time zone
#   UTC, so that they are two moments, and astimezone shifts the local one once more.
# Expected: a local_timestamp without a time zone.
# Instead: local.replace(tzinfo=None).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fitdecode==0.11.0' 'garmin-fit-sdk==21.218.0'
cat > expected.txt <<'EXPECTED'
written: 22:00 UTC, which is 06:00 of the next day in Singapore
timestamp: 2024-01-15T22:00:00+00:00
local_timestamp: 2024-01-16T06:00:00+00:00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import UTC, datetime

import fitdecode
from garmin_fit_sdk import Encoder, Profile

time, local = datetime(2024, 1, 15, 22, tzinfo=UTC), datetime(2024, 1, 16, 6)
numbers = Profile['mesg_num']
encoder = Encoder()
encoder.on_mesg(numbers['FILE_ID'], {'type': 'activity', 'time_created': time})
seconds = int((local - datetime(1989, 12, 31)).total_seconds())
encoder.on_mesg(numbers['ACTIVITY'], {'timestamp': time, 'local_timestamp': seconds})
with open('walk.fit', 'wb') as file:
    file.write(encoder.close())
print('written: 22:00 UTC, which is 06:00 of the next day in Singapore')
with fitdecode.FitReader('walk.fit') as reader:
    for message in reader:
        if isinstance(message, fitdecode.FitDataMessage) and message.name == 'activity':
            for name in ('timestamp', 'local_timestamp'):
                print(f'{name}:', message.get_value(name).isoformat())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
