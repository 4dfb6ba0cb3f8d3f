#!/usr/bin/env bash
# Flower's LocalDpMod adds too little noise for the δ that it is given where ε is large.
#
# Packages: flwr 1.42.0, scipy 1.17.1, numpy 2.4.6.
# Behaviour: the noise is sensitivity × √(2 ln(1.25 / δ)) / ε. The theorem behind this formula asks
#   for ε below 1. Local privacy of models is run with ε of 10 and more: with δ = 1e-5 the noise has
#   the true δ 2.3e-5 at ε = 10, 1.5e-3 at ε = 20 and 0.59 at ε = 50. Nothing refuses such an ε.
#   The sensitivity is a parameter of its own and is not compared with the clipping norm C; updates
#   of two clients can differ by 2C.
# Expected: noise with the true δ at most the given one, or an error from ε = 1 on.
# Instead: choose the sensitivity so that the noise is what the analytic Gaussian mechanism asks for.
# Source: Dwork and Roth (2014), theorem A.1 (ε below 1); Balle and Wang (2018), theorem 8 (exact δ).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'flwr==1.42.0' 'scipy==1.17.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
epsilon 1: noise 4.845, given delta 1e-05, true delta 4.1e-08
epsilon 10: noise 0.484, given delta 1e-05, true delta 2.3e-05
epsilon 20: noise 0.242, given delta 1e-05, true delta 1.5e-03
epsilon 50: noise 0.097, given delta 1e-05, true delta 5.9e-01
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging
import math

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.supercore.task_identity import TaskIdentity
from scipy.stats import norm

logging.getLogger('flwr').setLevel(logging.ERROR)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a running app sets them
DELTA, SIZE = 1e-5, 400_000


def send(noise_of):
    def run_client(message, context):
        content = RecordDict({'arrays': ArrayRecord([np.full(SIZE, 1e-9)])})
        return Message(content, reply_to=message)

    content = RecordDict({'arrays': ArrayRecord([np.zeros(SIZE)])})
    message = Message(content, dst_node_id=1, message_type='train')
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    reply = noise_of(message, context, run_client)
    return reply.content['arrays'].to_numpy_ndarrays()[0]


np.random.seed(0)
for epsilon in (1, 10, 20, 50):
    noise = math.sqrt(2 * math.log(1.25 / DELTA)) / epsilon  # for a sensitivity of 1
    seen = send(LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=epsilon, delta=DELTA))
    assert abs(seen.std() / noise - 1) < 0.01
    above = norm.cdf(0.5 / noise - epsilon * noise)
    true = above - math.exp(epsilon) * norm.cdf(-0.5 / noise - epsilon * noise)
    print(f'epsilon {epsilon}: noise {noise:.3f}, given delta {DELTA}, true delta {true:.1e}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
