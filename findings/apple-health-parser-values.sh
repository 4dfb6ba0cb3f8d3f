#!/usr/bin/env bash
# apple-health-parser rounds the mean of a day to a whole number, and reads a heart rate that was typed
# in as one measured at rest.
#
# Packages: apple-health-parser 2.0.5, pandas 3.1.1, numpy 2.4.6.
# Behaviour: get_dataframe rounds each daily result to no decimals, whatever the unit, so that blood
#   glucose of 5.4 mmol/L becomes 5 and a temperature of 37.6 °C becomes 38. For heart rates, the
#   first metadata entry of a record is the motion context, whatever its key: HKWasUserEntered = 1
#   is read as Sedentary.
# Expected: decimals as in the export; a motion context only from HKMetadataKeyHeartRateMotionContext.
# Instead: take the records without an operation, and compute the mean and the context from them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'apple-health-parser==2.0.5' 'pandas==3.1.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
BloodGlucose: records [5.2, 5.6], mean of the day [5.0]
BodyTemperature: records [37.6], mean of the day [38.0]
active; typed in; typed in, active: ['Active', 'Sedentary', 'Sedentary']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from zipfile import ZipFile

from apple_health_parser.utils.parser import Parser
from apple_health_parser.utils.preprocessor import Preprocessor


def record(kind, unit, hour, value, metadata=''):
    times = ''.join(
        f'{name}="2026-01-15 {hour:02}:00:00 +0100" '
        for name in ('creationDate', 'startDate', 'endDate')
    )
    kind = f'HKQuantityTypeIdentifier{kind}'
    return (
        f'<Record type="{kind}" sourceName="Watch" unit="{unit}" {times} '
        f'device="Watch" value="{value}">{metadata}</Record>'
    )


typed = '<MetadataEntry key="HKWasUserEntered" value="1"/>'
moving = '<MetadataEntry key="HKMetadataKeyHeartRateMotionContext" value="2"/>'
records = [
    record('BloodGlucose', 'mmol&lt;180.1558800000541&gt;/L', 8, 5.2),
    record('BloodGlucose', 'mmol&lt;180.1558800000541&gt;/L', 20, 5.6),
    record('BodyTemperature', 'degC', 8, 37.6),
    record('HeartRate', 'count/min', 8, 140, moving),
    record('HeartRate', 'count/min', 9, 140, typed),
    record('HeartRate', 'count/min', 10, 140, typed + moving),
]
with ZipFile('export.zip', 'w') as file:
    content = '<HealthData locale="en_NL">' + ''.join(records) + '</HealthData>'
    file.writestr('apple_health_export/export.xml', content)
parser = Parser('export.zip', overwrite=True)
for kind in ('BloodGlucose', 'BodyTemperature'):
    data = parser.get_flag_records(f'HKQuantityTypeIdentifier{kind}')
    values = data.records['value'].tolist()
    means = Preprocessor(data=data, year=2026, operation='mean').get_dataframe()
    print(f'{kind}: records {values}, mean of the day {means["value"].tolist()}')
rates = parser.get_flag_records('HKQuantityTypeIdentifierHeartRate').records
print('active; typed in; typed in, active:', rates['motion_context'].tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
