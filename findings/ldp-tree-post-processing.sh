#!/usr/bin/env bash
# The post-processing of hierarchical-mechanism-LDP counts 20 million of 10000 people, and all its
# quantiles are 0.
#
# Packages: ldp-hierarchical-mechanism 0.1.3 (hierarchical_mechanism_LDP), numpy 1.26.4, scipy 1.13.1,
#   pandas 2.2.3, statsmodels 0.14.4, tqdm 4.67.1.
# Behaviour: by default each person reports to all levels of the tree. compute_attributes then stores
#   numbers of people for all levels and 1 for the root, which post_process makes consistent with each
#   other: the leaves are lowered towards a sum of 1. The queries take the sums for shares: a range is
#   multiplied by the number of people again, and a quantile is the first value with a sum above it.
# Expected: what the tree answers before the post-processing, with less noise, which the documentation
#   says it has. With on_all_levels=False it does.
# Why it matters here: the documented steps end in it, and the quantiles look like a table of zeros.
# Instead: on_all_levels=False, or no post-processing.
# Source: the package's documentation; Hay et al. (2010), section 4, whose step keeps the counts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ldp-hierarchical-mechanism==0.1.3' 'numpy==1.26.4' 'scipy==1.13.1' 'pandas==2.2.3' 'statsmodels==0.14.4' 'tqdm==4.67.1'
cat > expected.txt <<'EXPECTED'
quantiles of the people: [0, 1, 5]
people of the range 0 to 3, before: 4100
on_all_levels=True: people of the range 0 to 3, after: 20292300; quantiles after [0, 0, 0]
on_all_levels=False: people of the range 0 to 3, after: 4000; quantiles after [0, 1, 5]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
import random

import numpy as np
from hierarchical_mechanism_LDP import Private_TreeBary

shares = (0.25, 0.5, 0.9)
days = np.repeat(np.arange(8), [4000, 1500, 1500, 1000, 800, 600, 400, 200])
print('quantiles of the people:', [int(np.quantile(days, share)) for share in shares])
for all_levels in (True, False):
    random.seed(0)
    np.random.seed(0)
    tree = Private_TreeBary(8, 2, 6.0, on_all_levels=all_levels)
    tree.update_tree(days)
    if all_levels:
        print(f'people of the range 0 to 3, before: {round(tree.get_range_query(0, 3), -2):.0f}')
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        tree.compute_attributes()
        tree.post_process()
    print(f'on_all_levels={all_levels}: people of the range 0 to 3, after:',
          f'{round(tree.get_range_query(0, 3), -2):.0f};',
          f'quantiles after {[int(tree.get_quantile(share)) for share in shares]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
