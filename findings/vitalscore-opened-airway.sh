#!/usr/bin/env bash
# The triage of vitalscore delays a casualty who breathes only since the airway was opened, and counts
# one whose respiratory rate was not recorded as dead.
#
# Packages: vitalscore 0.1.1.
# Behaviour: score_start has an argument for an airway that was opened and does not use it. In
#   batch_triage a person whose rate is missing is Deceased and comes last, with a pulse and following
#   commands; other missing fields are put into errors.
# Expected: immediate, the highest priority, for breathing that returns when the airway is opened, and
#   an error for a missing rate.
# Why it matters here: the casualties who need help first are treated after others.
# Instead: give these two groups their priority before the call.
# Source: the START algorithm (Hoag Hospital and Newport Beach Fire Department, 1983), step of
#   respirations: not breathing, open the airway; breathing then: immediate; still not: deceased.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'vitalscore==0.1.1'
cat > expected.txt <<'EXPECTED'
breathing at 18 a minute, airway opened False: Delayed
breathing at 18 a minute, airway opened True: Delayed
C: Delayed, errors []
A: Minor, errors []
B: Deceased, errors []
D: None, errors ["START: 'can_walk' is required"]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from vitalscore.batch import TriagePatient, batch_triage
from vitalscore.scores import score_start

for opened in (False, True):
    result = score_start(
        can_walk=False, respiratory_rate=18, has_radial_pulse=True, follows_commands=True,
        airway_repositioned=opened,
    )
    print(f'breathing at 18 a minute, airway opened {opened}: {result.priority.value}')
casualties = [
    TriagePatient('A', can_walk=True, respiratory_rate=18),
    TriagePatient('B', can_walk=False, has_radial_pulse=True, follows_commands=True),
    TriagePatient('C', can_walk=False, respiratory_rate=14, has_radial_pulse=True, follows_commands=True),
    TriagePatient('D', respiratory_rate=14),
]
for person in batch_triage(casualties):
    print(f'{person.patient_id}: {person.start_priority and person.start_priority.value},',
          f'errors {person.errors}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
