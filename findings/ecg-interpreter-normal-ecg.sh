#!/usr/bin/env bash
# ecg-interpreter ends its report with "Normal ECG" for a heart with a first degree block and for one that beats 45 times a
# minute, both of which it has found and marked a few lines above.
#
# Packages: ecg-interpreter 0.1.0, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: the overall interpretation is collected from a list of findings that leaves some out: a first degree
#   atrioventricular block, bradycardia from 40 to 60, tachycardia from 100 to 150, a short PR interval, an irregular rhythm
#   that is not called fibrillation, atrial flutter, and a short QT. If nothing else is found, it is a normal ECG.
# Expected: "Abnormal ECG" with what was found, as the docstring says: "Consolidate all findings into an overall
#   interpretation and urgency level".
# Why it matters here: the last two lines are what a program or a reader in a hurry takes from the report.
# Instead: compare each field of the result with its normal text, or count the fields without a check mark.
# Source: the report itself; a PR interval above 200 ms is a first degree block, which is not a normal ECG.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ecg-interpreter==0.1.0' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
normal: nothing found
  overall: Normal ECG, urgency routine
PR of 320 ms: 1st Degree AV Block (PR = 320 ms)
  overall: Normal ECG, urgency routine
rate of 45: Moderate Bradycardia (45 bpm)
  overall: Normal ECG, urgency urgent
rate of 145: Moderate Tachycardia (145 bpm); Regular rhythm at ~150 bpm  consider Atrial Flutter with 2:1 block
  overall: Normal ECG, urgency routine
QTc of 300 ms: Short QTc (300 ms)  consider Short QT Syndrome
  overall: Normal ECG, urgency routine
irregular: Irregularly irregular rhythm  consider AF, frequent PACs/PVCs
  overall: Normal ECG, urgency routine
QRS of 130 ms: nothing found
  overall: Abnormal ECG: Bundle Branch Block, urgency urgent
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from ecg_interpreter import ECGInterpreter, ECGParameters

def text(value):
    return value.encode('ascii', 'ignore').decode().replace('  ', ' ').strip()

normal = dict(heart_rate=70, rr_intervals_ms=[857, 857], rr_mean_ms=857, rr_std_ms=20, pr_interval_ms=160, qrs_duration_ms=90,
              qtc_ms=410, st_level_mv=0.0, st_levels_per_beat=[0.0])
changes = {
    'normal': {}, 'PR of 320 ms': {'pr_interval_ms': 320}, 'rate of 45': {'heart_rate': 45}, 'rate of 145': {'heart_rate': 145},
    'QTc of 300 ms': {'qtc_ms': 300}, 'irregular': {'rr_std_ms': 200}, 'QRS of 130 ms': {'qrs_duration_ms': 130},
}
for name, change in changes.items():
    result = ECGInterpreter().interpret(ECGParameters(**{**normal, **change}), 'male')
    fields = {'rate': result.rate_interpretation, 'rhythm': result.rhythm_interpretation, 'QTc': result.qtc_interpretation, 'AV': result.av_block}
    found = [text(value) for value in fields.values() if '\u2713' not in value]
    print(f'{name}: {"; ".join(found) or "nothing found"}\n  overall: {text(result.overall_interpretation)}, urgency {result.urgency}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
