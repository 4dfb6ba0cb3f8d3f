#!/usr/bin/env bash
# inf-tda adds less noise where people may repeat a tuple than where they may not: it swaps the two cases.
#
# Packages: inf-tda 0.1, opendp 0.12.1, pandas 2.2.3, numpy 2.2.6.
# Behaviour: a person contributes at most m tuples. If they may be equal, replacing one person can
#   move m from one count to another, which changes the counts by m times the square root of 2. The
#   function takes the square root of 2m there, and the larger one for different tuples. With
#   distinct_tuples=False the noise is smaller by the square root of m than what ε needs, and ρ is m
#   times the one that was asked for.
# Expected: the sensitivity of the documentation, the largest l2 distance between the counts of two
#   tables that differ in one person, so that both tables below have the same ρ at most.
# Why it matters here: 50 trips of one commuter, who always takes the same road, are visible.
# Instead: distinct_tuples=True in both cases; it covers the worst one.
# Source: Bun and Steinke, Concentrated Differential Privacy (2016): ρ = Δ² / (2 σ²).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'opendp==0.12.1' 'pandas==2.2.3' 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'inf-tda==0.1'
cat > expected.txt <<'EXPECTED'
1 trips, distinct_tuples=True: standard deviation 11, rho of the lowest level 0.0087, its budget 0.0087
1 trips, distinct_tuples=False: standard deviation 11, rho of the lowest level 0.0087, its budget 0.0087
10 trips, distinct_tuples=True: standard deviation 107, rho of the lowest level 0.0087, its budget 0.0087
10 trips, distinct_tuples=False: standard deviation 34, rho of the lowest level 0.0873, its budget 0.0087
50 trips, distinct_tuples=True: standard deviation 535, rho of the lowest level 0.0087, its budget 0.0087
50 trips, distinct_tuples=False: standard deviation 76, rho of the lowest level 0.4367, its budget 0.0087
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
import InfTDA.mechanism as mechanism
from InfTDA import inf_tda

scales = []
make = mechanism.make_gaussian_noise


def remember(d_in, rho):
    scales.append(d_in / np.sqrt(2 * rho))
    return make(d_in, rho)


mechanism.make_gaussian_noise = remember
index = pd.MultiIndex.from_product([['north', 'south'], ['road', 'rail']])
before = pd.Series([500, 300, 400, 200], index)
for trips in (1, 10, 50):
    after = before + pd.Series([-trips, trips, 0, 0], index)  # one person takes the train now
    for distinct in (True, False):
        inf_tda(before, (1.0, 1e-6), trips, distinct_tuples=distinct)
        budget = mechanism.get_rho_from_budget((1.0, 1e-6))
        spent = ((after - before) ** 2).sum() / (2 * scales[-1] ** 2)
        print(f'{trips} trips, distinct_tuples={distinct}: standard deviation {scales[-1]:.0f},',
              f'rho of the lowest level {spent:.4f}, its budget {budget / 2:.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
