#!/usr/bin/env bash
# apple-health reads the stages of sleep that Apple exports since 2022 as lying in bed, and each
# unknown text as 0.
#
# Packages: apple-health 2.0.0, xmltodict 0.13.0, python-dateutil 2.9.0.post0.
# Behaviour: a category of HealthKit becomes a number: in bed 0, asleep 1, awake 2. Since iOS 16
#   sleep has the values AsleepCore, AsleepDeep, AsleepREM and AsleepUnspecified, which the package
#   does not list. What it cannot read it sets to 0, which is "in bed", without a message. The same
#   default makes a missing or unreadable measurement 0: 0 % oxygen, 0 kg.
# Expected: a number of its own for each stage, and a missing value or an error for what is not
#   known.
# Why it matters here: sleep is an outcome of studies with watches; the participants with new
#   watches do not sleep.
# Instead: read value from the XML, and count all values that begin with
#   HKCategoryValueSleepAnalysisAsleep.
# Source: Apple HealthKit, HKCategoryValueSleepAnalysis.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'apple-health==2.0.0' 'xmltodict==0.13.0' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
2021: InBed 0, Asleep 1, Awake 2, Asleep 1
2021: hours asleep 2, in the file 2
2024: InBed 0, AsleepCore 0, AsleepDeep 0, AsleepREM 0, Awake 2, AsleepUnspecified 0
2024: hours asleep 0, in the file 4
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from health.data import HealthData

NIGHTS = {
    2021: ('InBed', 'Asleep', 'Awake', 'Asleep'),
    2024: ('InBed', 'AsleepCore', 'AsleepDeep', 'AsleepREM', 'Awake', 'AsleepUnspecified'),
}
for year, stages in NIGHTS.items():
    records = ''.join(
        f'<Record type="HKCategoryTypeIdentifierSleepAnalysis" sourceName="Watch" '
        f'creationDate="{year}-03-02 08:00:00 +0100" startDate="{year}-03-02 0{hour}:00:00 +0100" '
        f'endDate="{year}-03-02 0{hour + 1}:00:00 +0100" value="HKCategoryValueSleepAnalysis{stage}"/>'
        for hour, stage in enumerate(stages)
    )
    with open('export.xml', 'w') as file:
        file.write(f'<HealthData><Me/>{records}</HealthData>')
    values = [record.value for record in HealthData.read('export.xml', include_me=False).records]
    print(f'{year}:', ', '.join(f'{stage} {value:.0f}' for stage, value in zip(stages, values)))
    print(f'{year}: hours asleep {sum(value == 1 for value in values)},',
          f'in the file {sum(stage.startswith("Asleep") for stage in stages)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
