#!/usr/bin/env bash
# The Ellison-Glaeser index of concentrationMetrics looks at the first areas in place of those that an industry is in: an
# industry of a single area has 0.83 in the first of four areas and 0.09 in the others, where it is 1.
#
# Packages: concentrationMetrics 0.6.0, numpy 1.26.4, pandas 1.5.3 (with pandas 2 the index raises a TypeError).
# Behaviour: the squares of the differences between the shares of the industry and of all are summed over as many areas as
#   the industry is in, counted from the first one: an industry in one area is compared in area 0 alone. The index of
#   equation (5) that is cited subtracts the Herfindahl index of the plants, and the package does not.
# Expected: the sum over all areas, and 1 for an industry whose plants are all in one place.
# Why it matters here: the result depends on how the areas are numbered.
# Instead: the formula, as it is computed here.
# Source: Ellison and Glaeser, Geographic concentration in U.S. manufacturing industries, 1997.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==1.5.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'concentrationMetrics==0.6.0'
cat > expected.txt <<'EXPECTED'
industry in all areas: 0.00, by the formula -0.03
industry in area 0 alone: 0.83, by the formula 1.00
industry in area 1 alone: 0.09, by the formula 1.00
industry in area 2 alone: 0.09, by the formula 1.00
industry in area 3 alone: 0.09, by the formula 1.00
industry in areas 0 and 1: 0.19, by the formula 0.26
industry in areas 2 and 3: 0.19, by the formula 0.26
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import concentrationMetrics
import numpy as np
import pandas as pd

AREAS = 4
index = concentrationMetrics.Index()


def compute(table, industries):
    shares = pd.crosstab(table.Industry, table.Area, table.Exposure, aggfunc='sum').reindex(columns=range(AREAS)).fillna(0)
    everywhere = (shares.sum() / shares.to_numpy().sum()).to_numpy()
    result = []
    for industry in range(industries):
        own = shares.loc[industry].to_numpy() / shares.loc[industry].sum()
        plants = table.Exposure[table.Industry == industry].to_numpy()
        herfindahl = np.sum((plants / plants.sum()) ** 2)
        raw = np.sum((own - everywhere) ** 2) / (1 - np.sum(everywhere**2))
        result.append((raw - herfindahl) / (1 - herfindahl))
    return result


plants = [(10.0, area, 0) for area in range(AREAS) for plant in range(10)]
names = ['in all areas']
for area in range(AREAS):
    plants += [(10.0, area, area + 1)] * 10
    names.append(f'in area {area} alone')
for number, pair in enumerate(((0, 1), (2, 3)), AREAS + 1):
    plants += [(10.0, area, number) for area in pair for plant in range(5)]
    names.append(f'in areas {pair[0]} and {pair[1]}')
table = pd.DataFrame(plants, columns=['Exposure', 'Area', 'Industry'])
for name, found, right in zip(names, index.ellison_glaeser(table, AREAS, len(names)), compute(table, len(names))):
    print(f'industry {name}: {found:.2f}, by the formula {right:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
