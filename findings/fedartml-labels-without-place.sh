#!/usr/bin/env bash
# fedartml's earth mover's distance is 0 for clients that have no label in common.
#
# Packages: fedartml 0.1.34, scipy 1.15.3, pandas 2.2.3, numpy 2.2.6.
# Behaviour: earth_movers_distance gives the shares of the labels to SciPy's wasserstein_distance as
#   if they were values that were observed, without saying at which labels they are. Which label has
#   which share is lost: a client with patients of one disease and a client with patients of another
#   have the same sorted shares, and a distance of 0. The Jensen-Shannon and Hellinger distances of
#   the same clients are 1.
# Expected: 1 for clients without a common label, where each label is as far from each other one; the
#   distance is half the sum of the absolute differences then.
# Why it matters here: it is reported as the degree to which federated data are not identically
#   distributed.
# Instead: jensen_shannon_distance or hellinger_distance of the same package.
# Source: Zhao et al., Federated Learning with Non-IID Data (2018): the distance of label shares.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scipy==1.15.3' 'pandas==2.2.3' 'numpy==2.2.6' 'scikit-learn==1.6.1' 'matplotlib==3.10.3' 'ipywidgets==8.1.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fedartml==0.1.34'
cat > expected.txt <<'EXPECTED'
equal shares: earth mover 0.00, by its definition 0.00; Jensen-Shannon 0.00, Hellinger 0.00
one label each: earth mover 0.00, by its definition 1.00; Jensen-Shannon 1.00, Hellinger 1.00
three clients, one label each: earth mover 0.00, by its definition 1.00; Jensen-Shannon 1.00, Hellinger 1.00
exchanged labels: earth mover 0.00, by its definition 0.90; Jensen-Shannon 0.95, Hellinger 0.95
a third of each, and one label: earth mover 0.67, by its definition 0.67; Jensen-Shannon 0.68, Hellinger 0.65
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from fedartml.function_base import earth_movers_distance, hellinger_distance, jensen_shannon_distance

for title, shares in (('equal shares', [[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]),
                      ('one label each', [[1, 0, 0], [0, 1, 0]]),
                      ('three clients, one label each', [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
                      ('exchanged labels', [[0.9, 0.1, 0.0], [0.0, 0.1, 0.9]]),
                      ('a third of each, and one label', [[1 / 3] * 3, [1, 0, 0]])):
    pairs = [(a, b) for i, a in enumerate(shares) for b in shares[i + 1:]]
    right = np.mean([np.abs(np.subtract(a, b)).sum() / 2 for a, b in pairs])
    print(f'{title}: earth mover {earth_movers_distance(shares):.2f}, by its definition {right:.2f};',
          f'Jensen-Shannon {jensen_shannon_distance(shares):.2f}, Hellinger {hellinger_distance(np.array(shares)):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
