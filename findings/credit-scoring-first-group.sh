#!/usr/bin/env bash
# The table of credit-scoring for the Kolmogorov-Smirnov statistic shows that the riskiest group of customers has
# none of the defaults, since the first line of its cumulative rates is set to 0.
#
# Packages: credit-scoring 0.2.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, scikit-learn 1.9.1, plotly 6.3.0.
#   credit-scoring asks for sklearn, which cannot be installed, so it is installed without its dependencies.
# Behaviour: the cumulative rates of events and others start with the first of its groups, 200 by default. After the statistic is
#   computed, both are overwritten by 0 in that line, which then contradicts the number of events beside it and
#   the statistic of the line. The chart draws the same numbers.
# Expected: the share of all defaults that the first group has, or a line before it for the origin.
# Why it matters here: what the riskiest customers contain is what such a table is read for.
# Instead: compute the cumulative shares from the column events.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'plotly==6.3.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'credit-scoring==0.2.0'
cat > expected.txt <<'EXPECTED'
200 groups
group 1: 37 events, cumulative 0.0% of the events and 0.0% of the others, KS 2.5; by hand 2.6%, 0.2%, 2.5
group 2: 25 events, cumulative 4.4% of the events and 0.4% of the others, KS 4.0; by hand 4.4%, 0.4%, 4.0
group 3: 25 events, cumulative 6.2% of the events and 0.7% of the others, KS 5.5; by hand 6.2%, 0.7%, 5.5
group 4: 25 events, cumulative 8.0% of the events and 1.0% of the others, KS 6.9; by hand 8.0%, 1.0%, 6.9
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from credit_scoring.metrics import ks

random = np.random.default_rng(0)
predicted = random.beta(1, 6, size=10000)
defaulted = (random.random(10000) < predicted).astype(int)
table, _, _ = ks(predicted, defaulted)
order = np.argsort(-predicted)
size = len(predicted) // len(table)
print(len(table), 'groups')
for line in range(4):
    group = order[:size * (line + 1)]
    events = defaulted[group].sum() / defaulted.sum()
    others = (1 - defaulted[group]).sum() / (1 - defaulted).sum()
    row = table.iloc[line]
    print(f'group {line + 1}: {row.events:.0f} events, cumulative {row.cum_eventrate:.1%} of the events and '
          f'{row.cum_noneventrate:.1%} of the others, KS {row.KS:.1f}; by hand {events:.1%}, {others:.1%}, '
          f'{100 * (events - others):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
