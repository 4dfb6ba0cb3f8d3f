#!/usr/bin/env bash
# The upper levels of credibility's hierarchical model weigh regions by their exposure and not by
# their towns, so one large town makes a region fully credible.
#
# Packages: credibility 0.2.0, numpy 2.4.6, polars 2.1.0.
# Behaviour: HierarchicalBuhlmannStraub says that the variance v of a level is the variance a of
#   the level below, as Jewell's model and actuar have it. It fits each level by itself with the
#   exposures as weights, and the lower a, which is passed to the function, is not used. Towns
#   that differ within a region stay different however much is known about each, so a region with
#   two towns tells little about itself. Here it has a credibility of 0.93 with two towns of much
#   exposure, and of 0.20 with twenty small ones, where 0.47 and 0.89 are right.
# Expected: the sum of the towns' credibilities divided by itself plus a(town)/a(region).
# Instead: Bühlmann and Gisler's formulas from the levels' a, of which a of the lowest level is
#   right.
# Source: Bühlmann and Gisler, A Course in Credibility Theory, 2005, chapter 6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'polars==2.1.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'credibility==0.2.0'
cat > expected.txt <<'EXPECTED'
a of the towns 0.025, v of the regions 726, documented to be the same
region with 2 large towns: credibility 0.93; by Jewell with the true variances 0.47
region with 20 small towns: credibility 0.20; by Jewell with the true variances 0.89
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import polars as pl
from credibility import HierarchicalBuhlmannStraub

random = np.random.default_rng(1)
rows = []
for region in range(20):
    level = random.normal(0, 0.10)
    large = region < 10
    for town in range(2 if large else 20):
        own = level + random.normal(0, 0.15)
        exposure = 100000.0 if large else 200.0
        for year in range(5):
            loss = 2 + own + random.normal(0, 1.5 / np.sqrt(exposure))
            rows.append((f'{region:02d}', f'{region:02d}-{town:02d}', year, loss, exposure))
table = pl.DataFrame(rows, schema=['region', 'town', 'year', 'loss', 'weight'], orient='row')
model = HierarchicalBuhlmannStraub(['region', 'town']).fit(table, 'year', 'loss', 'weight')
town, region = model.level_results_['town'], model.level_results_['region']
print(f'a of the towns {town.a_hat:.3f}, v of the regions {region.v_hat:.0f}, documented to be the same')
seen = dict(zip(region.premiums['group'], region.premiums['Z']))
each = dict(zip(town.premiums['group'], town.premiums['Z']))
for name, key in (('2 large towns', '00'), ('20 small towns', '10')):
    total = sum(z for group, z in each.items() if group.startswith(key))
    print(f'region with {name}: credibility {seen[key]:.2f}; by Jewell with the true variances {total / (total + 0.15 ** 2 / 0.10 ** 2):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
