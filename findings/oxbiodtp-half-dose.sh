#!/usr/bin/env bash
# The bolus of OxBioDTP-7-PK-modelling gives half of its dose, since the half of its pulse that lies before time 0 is lost.
#
# Packages: OxBioDTP-7-PK-modelling 1.0.0, sympy 1.13.3, numpy 2.2.6, scipy 1.15.3.
# Behaviour: an instant dose is a rate of 60 times its mass for the time from 1/120 hour before it to 1/120 hour after it,
#   which is its mass. The first or only dose is at time 0, where the simulation begins, so only the second half is given.
#   A special case for the first minute is in the code and has the same value as the other one.
# Expected: the mass of the dose, in the first minute.
# Why it matters here: each concentration after a single dose is half of the right one, whatever drug and model.
# Instead: twice the mass for a single dose, or the mass as the initial value of the compartment.
# Source: mass = integral of the rate of the dose over time; the docstring: "Mass of the drug to apply (ng)".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'sympy==1.13.3' 'numpy==2.2.6' 'scipy==1.15.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'OxBioDTP-7-PK-modelling==1.0.0'
cat > expected.txt <<'EXPECTED'
dose of 10 ng: 5.0 ng given in the first 72 seconds, 0.0 in the next, 5.0 ng in the blood after an hour
dose of 100 ng: 50.0 ng given in the first 72 seconds, 0.0 in the next, 50.1 ng in the blood after an hour
dose of 2500 ng: 1250.0 ng given in the first 72 seconds, 0.0 in the next, 1253.1 ng in the blood after an hour
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from scipy.integrate import solve_ivp
from pk_model.definitions import Compartment, form_rhs_ib
from pk_model.dosing import InstantDose

for mass in (10.0, 100.0, 2500.0):
    dose = InstantDose(1, 0, mass).construct()
    times = (np.arange(600_000) + 0.5) / 600_000
    given = sum(dose(time) for time in times[:12_000]) / 600_000
    late = sum(dose(time) for time in times[12_000:24_000]) / 600_000
    # no clearance and no other compartment: all that was given stays in the blood
    right_side = form_rhs_ib(Compartment(5.0, 0.0), [], dose, 0.0)
    amount = solve_ivp(right_side, [0, 1], [0.0], max_step=1e-4).y[0, -1]
    print(f'dose of {mass:.0f} ng: {given:.1f} ng given in the first 72 seconds, {late:.1f} in the next, {amount:.1f} ng in the blood after an hour')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
