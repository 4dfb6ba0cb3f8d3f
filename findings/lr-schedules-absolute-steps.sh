#!/usr/bin/env bash
# The warm-up of lr_schedules never ends where its times are steps and the number of all steps is given:
# the rate is 0.5 % of the right one after half of the training.
#
# Packages: lr-schedules 0.0.2.
# Behaviour: LinearScheduler documents that times between 0 and 1 are fractions of total_training_steps
#   and that others are absolute steps, such as [0, 100, 200]. It divides each step by
#   total_training_steps in both cases. With absolute times the fraction, which ends at 1, is looked up
#   among steps, so the schedule stays in its first step. Nothing is said.
# Expected: absolute times whether the number of steps is given or not.
# Instead: leave total_training_steps out where the times are steps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lr-schedules==0.0.2'
cat > expected.txt <<'EXPECTED'
step 0: by steps 0.000, by fractions 0.000, by steps and with their number 0.00000
step 50: by steps 0.500, by fractions 0.500, by steps and with their number 0.00050
step 100: by steps 1.000, by fractions 1.000, by steps and with their number 0.00100
step 500: by steps 0.556, by fractions 0.556, by steps and with their number 0.00500
step 1000: by steps 0.000, by fractions 0.000, by steps and with their number 0.01000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from lr_schedules import LinearScheduler

values = [0, 1, 0]
steps = LinearScheduler([0, 100, 1000], values)
fractions = LinearScheduler([0, 0.1, 1], values, total_training_steps=1000)
both = LinearScheduler([0, 100, 1000], values, total_training_steps=1000)
for step in (0, 50, 100, 500, 1000):
    print(f'step {step}: by steps {steps(step):.3f}, by fractions {fractions(step):.3f}, '
          f'by steps and with their number {both(step):.5f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
