#!/usr/bin/env bash
# Garmin's FIT encoder stores a value that does not fit its field as another value.
#
# Packages: garmin-fit-sdk 21.218.0.
# Behaviour: a heart rate of 300, a speed of 70 m/s or an altitude of 13000 m is taken modulo the size
#   of the field and read back as 44, 4.464 m/s and -107.2 m. There is no error, and the file's
#   checksum is right.
# Expected: an error, as the decoder gives for a broken file, or the invalid value.
# Instead: compare values with the range of the field before writing; for speed and altitude use the
#   fields enhanced_speed and enhanced_altitude.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'garmin-fit-sdk==21.218.0'
cat > expected.txt <<'EXPECTED'
heart_rate: written 60, read 60, errors []
heart_rate: written 300, read 44, errors []
speed: written 3.5, read 3.5, errors []
speed: written 70.0, read 4.464, errors []
enhanced_speed: written 70.0, read 70.0, errors []
altitude: written 13000.0, read -107.2, errors []
enhanced_altitude: written 13000.0, read 13000.0, errors []
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import UTC, datetime

from garmin_fit_sdk import Decoder, Encoder, Profile, Stream

time = datetime(2024, 1, 15, 10, tzinfo=UTC)
for field, value in (
    ('heart_rate', 60),
    ('heart_rate', 300),
    ('speed', 3.5),
    ('speed', 70.0),
    ('enhanced_speed', 70.0),
    ('altitude', 13000.0),
    ('enhanced_altitude', 13000.0),
):
    encoder = Encoder()
    encoder.on_mesg(Profile['mesg_num']['FILE_ID'], {'type': 'activity', 'time_created': time})
    encoder.on_mesg(Profile['mesg_num']['RECORD'], {'timestamp': time, field: value})
    messages, errors = Decoder(Stream.from_byte_array(bytearray(encoder.close()))).read()
    read = messages['record_mesgs'][0][field]
    print(f'{field}: written {value}, read {round(read, 3)}, errors {errors}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
