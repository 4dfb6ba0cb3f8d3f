#!/usr/bin/env bash
# ornl-presto's randomized response keeps most true answers of a question with many answers.
#
# Packages: ornl-presto 0.1.29, torch 2.13.0, numpy 1.26.4.
# Behaviour: hadamard_response returns the true value with the probability e^ε / (e^ε + 1), and
#   otherwise one of the d values at random, of which one is the true one. The ratio of two people's
#   probabilities is then 1 + d e^ε. The number of values d is read from the data, as the largest
#   one plus 1, so the answers also show the largest value.
# Expected: a ratio of at most e^ε: the true value with (e^ε - 1) / (e^ε - 1 + d), and otherwise one
#   at random.
# Why it matters here: a diagnosis of 100 is kept in 73 % of the answers in place of 2.7 % for ε =
#   1.
# Instead: another library's k-ary randomized response.
# Source: Kairouz, Bonawitz and Ramage, Discrete Distribution Estimation under Local Privacy, 2016.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==1.26.4' 'scipy==1.13.1' 'scikit-learn==1.5.2' 'matplotlib==3.11.2' 'pandas==2.2.3' 'seaborn==0.13.2' 'opacus==1.6.0' 'gpytorch==1.15.2' 'bayesian-optimization==3.4.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'ornl-presto==0.1.29'
cat > expected.txt <<'EXPECTED'
2 answers, ε asked for 1: the true one comes in 87%, for ε in 73.1%; ε of the ratio 1.9, by its formula 1.9
10 answers, ε asked for 1: the true one comes in 76%, for ε in 23.2%; ε of the ratio 3.4, by its formula 3.3
100 answers, ε asked for 1: the true one comes in 73%, for ε in 2.7%; ε of the ratio 5.6, by its formula 5.6
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import exp, log

import torch
from ornl_presto import hadamard_response

torch.manual_seed(0)
EPSILON, PEOPLE = 1.0, 400000
for values in (2, 10, 100):
    answers = torch.zeros(PEOPLE, dtype=torch.long)
    answers[0] = values - 1
    seen = hadamard_response(answers, EPSILON)[1:]
    kept, other = (seen == 0).float().mean().item(), (seen == 1).float().mean().item()
    right = exp(EPSILON) / (exp(EPSILON) - 1 + values)
    print(f'{values} answers, ε asked for {EPSILON:.0f}: the true one comes in {kept:.0%}, for ε in {right:.1%}; '
          f'ε of the ratio {log(kept / other):.1f}, by its formula {log(1 + values * exp(EPSILON)):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
