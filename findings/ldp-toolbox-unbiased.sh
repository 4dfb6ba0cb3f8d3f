#!/usr/bin/env bash
# The frequency estimates of ldp-toolbox are said to be unbiased, and are then cut at 0 and scaled
# to a sum of 1.
#
# Packages: ldp-toolbox 0.1.3, numpy 2.4.6, numba 0.68.1, scipy 1.17.1.
# Behaviour: estimate of the unary encoding corrects the counts of the noisy reports, sets the
#   negative ones to 0 and divides all by their sum, without an option. In a domain of 1000
#   diagnoses half of the noise is cut, the other half is kept, and its sum is many times 1. What
#   half of the people have becomes rare, and each rare diagnosis gets its share; more people help
#   slowly.
# Expected: the corrected counts, whose mean is the truth, as described; the projection to
#   frequencies apart.
# Why it matters here: a study of the error of local privacy measures the scaling, not the
#   mechanism.
# Instead: correct the sum of the reports by its p and q, as below.
# Source: Wang et al., Locally differentially private protocols for frequency estimation (2017).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'numba==0.68.1' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'ldp-toolbox==0.1.3'
cat > expected.txt <<'EXPECTED'
unbiased in the documents: True
10 diagnoses, half have the first: ldp-toolbox 49%, corrected 50%
100 diagnoses, half have the first: ldp-toolbox 19%, corrected 48%
1000 diagnoses, half have the first: ldp-toolbox 3%, corrected 51%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from ldp_toolbox.protocols.frequency.ue import UnaryEncoding
from numba import njit


@njit
def seed(value):
    np.random.seed(value)


print('unbiased in the documents:', 'unbiased estimation' in UnaryEncoding.estimate.__doc__)
for size in (10, 100, 1000):
    protocol = UnaryEncoding(k=size, epsilon=1.0)
    people = [0 if person % 2 else 1 + person % (size - 1) for person in range(2000)]
    estimates = []
    for run in range(10):
        seed(run)
        reports = [protocol.obfuscate(value) for value in people]
        corrected = (np.mean(reports, axis=0)[0] - protocol.q) / (protocol.p - protocol.q)
        estimates.append((protocol.estimate(reports)[0], corrected))
    mean = np.mean(estimates, axis=0)
    print(f'{size} diagnoses, half have the first: ldp-toolbox {mean[0]:.0%}, corrected {mean[1]:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
