#!/usr/bin/env bash
# The outlier detection of chorus-fl can find no outlier among ten clients or fewer, however large it is: no number
# of ten is three standard deviations from their mean.
#
# Packages: chorus-fl 0.1.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: detect_outlier_deltas compares the norm of each client's update with the mean and the standard
#   deviation of all norms, the outlier's included, and reports those beyond three (the default). With n numbers
#   none is further away than (n - 1) / sqrt(n) standard deviations: 2.85 for ten, 1.79 for five.
# Expected: an update a million times as large as the others is found among five.
# Why it matters here: federations of hospitals have five to ten clients.
# Instead: norm_bound_deltas, which clips each update, or a threshold from the median of the norms.
# Source: Shiffler (1988), "Maximum z scores and outliers", The American Statistician 42.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'chorus-fl==0.1.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
3 clients: found with an update 100 times as large [], a million times []; largest possible distance 1.15 standard deviations
5 clients: found with an update 100 times as large [], a million times []; largest possible distance 1.79 standard deviations
10 clients: found with an update 100 times as large [], a million times []; largest possible distance 2.85 standard deviations
11 clients: found with an update 100 times as large [0], a million times [0]; largest possible distance 3.02 standard deviations
20 clients: found with an update 100 times as large [0], a million times [0]; largest possible distance 4.25 standard deviations
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

import torch
from chorus.server.aggregation import detect_outlier_deltas

for clients in (3, 5, 10, 11, 20):
    found = []
    for factor in (100, 1e6):
        random = torch.Generator().manual_seed(0)
        deltas = [{'layer.lora_A': torch.randn(4, 16, generator=random)} for _ in range(clients)]
        deltas[0] = {name: factor * value for name, value in deltas[0].items()}
        found.append(detect_outlier_deltas(deltas))
    print(f'{clients} clients: found with an update 100 times as large {found[0]}, a million times {found[1]}; '
          f'largest possible distance {(clients - 1) / math.sqrt(clients):.2f} standard deviations')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
