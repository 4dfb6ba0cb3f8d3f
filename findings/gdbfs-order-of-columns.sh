#!/usr/bin/env bash
# The criterion of gdbfs has another value for each order of the same columns.
#
# Packages: gdbfs 0.2, numpy 2.4.6, pandas 2.3.3.
# Behaviour: The geometric distance uses the first principal direction of each class and its variance.
#   numpy's eig returns the eigenvectors as columns and in no order. gdbfs takes the first row of them,
#   which is no direction in the data, and the first eigenvalue, which need not be the largest. Both
#   change with the order of the columns, so the forward selection, which names the columns in the order
#   of their choice, compares values that depend on it.
# Expected: one value for one set of columns, as below with the largest eigenvalue and its column.
# Instead: the formula below.
# Source: Lee and Oh, Feature selection based on geometric distance for high-dimensional data, Electronics
#   Letters 52 (2016).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'gdbfs==0.2'
cat > expected.txt <<'EXPECTED'
a, b, c: gdbfs 1.96, by hand 0.87
a, c, b: gdbfs 4.36, by hand 0.87
b, a, c: gdbfs 0.90, by hand 0.87
b, c, a: gdbfs 0.91, by hand 0.87
c, a, b: gdbfs 2.35, by hand 0.87
c, b, a: gdbfs 0.14, by hand 0.87
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from itertools import permutations

import numpy as np
import pandas as pd
from gdbfs.sfs import gdbfs


def right(table, columns):
    groups = [table.loc[table.ill == k, columns].to_numpy() for k in (0, 1)]
    between, spread = groups[1].mean(axis=0) - groups[0].mean(axis=0), 0
    for group in groups:
        values, vectors = np.linalg.eigh(np.atleast_2d(np.cov(group.T)))
        spread += 0.5 * np.sqrt(values[-1]) * abs(vectors[:, -1] @ between) / np.linalg.norm(between)
    return 2 * (np.linalg.norm(between) - spread)


random = np.random.default_rng(0)
ill = np.repeat([0, 1], 150)
table = pd.DataFrame({'a': random.normal(size=300) + 2 * ill, 'b': 3 * random.normal(size=300) + 2 * ill,
                      'c': random.normal(size=300), 'ill': ill})
for order in permutations('abc'):
    print(f"{', '.join(order)}: gdbfs {gdbfs(table, list(order), 'ill'):.2f}, by hand {right(table, list(order)):.2f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
