#!/usr/bin/env bash
# The hierarchical credibility of actuarcredibility does not use its upper levels: all towns of a region that
# costs 95 are rated above it, at 109 to 133, since another region costs 210.
#
# Packages: actuarcredibility 0.1.1, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: JewellHierarchical estimates the credibility of a town within its region and sets the one of each
#   region to 0. The premium of each region is the mean of all, and a town is drawn to this mean. Where the
#   towns of a region do not differ, they have a credibility of 0, and all of it cost what the country costs.
# Expected: the premium of a town lies between its mean and the premium of its region, which lies near
#   the mean of the region where there is much experience of it, as in the formula of its documentation.
#   Here 24 values of a region around 100, and 24 around 200, have a spread of about 30.
# Why it matters here: levels are given so that a small town borrows from its region; the result is worse
#   than BuhlmannStraubModel for each region.
# Instead: BuhlmannStraubModel, once for the regions, and for the towns within each region.
# Source: Buehlmann and Gisler, A Course in Credibility Theory, chapter 6. With two levels the factor of a
#   region is its tau2 over tau2 + the variance of its estimate.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'actuarcredibility==0.1.1' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
mean of all 152
north: mean 95; with two levels: credibility of the region 0.00, towns with means from 66 to 113 have premiums from 109 to 133; the regions alone: credibility 1.00, premium 95
south: mean 210; with two levels: credibility of the region 0.00, towns with means from 190 to 246 have premiums from 178 to 215; the regions alone: credibility 1.00, premium 209
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from actuarcredibility import BuhlmannStraubModel, JewellHierarchical

random = np.random.default_rng(0)
rows = []
for region, cost in (('north', 100), ('south', 200)):
    for town in range(6):
        level = cost + random.normal(0, 10)
        rows += [(region, f'{region} {town}', level + random.normal(0, 30), 1.0) for year in range(4)]
data = pd.DataFrame(rows, columns=['region', 'town', 'cost', 'weight'])
model = JewellHierarchical().fit(data, ['region', 'town'], 'cost', 'weight')
regions = BuhlmannStraubModel().fit(data, 'region', 'cost', 'weight')
print('mean of all', round(model.grand_mean))
for region in ('north', 'south'):
    towns = data[data.region == region].groupby('town').cost.mean()
    premiums = model.credibility_premium()[region]
    print(f'{region}: mean {towns.mean():.0f}; with two levels: credibility of the region '
          f'{model.credibility_factor("region")[region]:.2f}, towns with means from {towns.min():.0f} to '
          f'{towns.max():.0f} have premiums from {premiums.min():.0f} to {premiums.max():.0f}; '
          f'the regions alone: credibility {regions.credibility_factor()[region]:.2f}, premium '
          f'{regions.credibility_premium()[region]:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
