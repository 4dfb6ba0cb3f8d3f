#!/usr/bin/env bash
# Flower's central privacy adds noise for an unweighted mean to a mean that is weighted by the number
# of examples.
#
# Packages: flwr 1.42.0, numpy 2.4.6.
# Behaviour: DifferentialPrivacyServerSideFixedClipping clips each client's update to clipping_norm,
#   lets FedAvg weight the updates by num-examples, and adds noise of noise_multiplier ×
#   clipping_norm / num_sampled_clients. One hospital with 9,000 of 9,900 records moves the mean by
#   0.91 where the noise is made for 0.1: with a noise multiplier of 1 the true one is 0.11. Unequal
#   weights are refused where an accountant is given; by default none is.
# Expected: noise for the largest weight, or a refusal of unequal weights, as with the accountant.
# Instead: report the same num-examples from each client, or pass an accountant.
# Source: McMahan and others (2018), "Learning differentially private recurrent language models",
#   section 3, on weights and the sensitivity of an estimator of the mean.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'flwr==1.42.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
10 clients of equal size: one moves the mean by 0.100, noise 0.100, noise multiplier 1.00
one client with 9,000 of 9,900: one moves the mean by 0.909, noise 0.100, noise multiplier 0.11
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger('flwr').setLevel(logging.ERROR)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a running app sets them
SIZE = 4000


def aggregate(examples, updates, noise_multiplier):
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), noise_multiplier, clipping_norm=1.0, num_sampled_clients=len(examples)
    )
    strategy.current_arrays = ArrayRecord([np.zeros(SIZE)])
    replies = []
    for client, (count, update) in enumerate(zip(examples, updates), 1):
        content = RecordDict({
            'arrays': ArrayRecord([np.full(SIZE, update / SIZE**0.5)]),
            'metrics': MetricRecord({'num-examples': count}),
        })
        request = Message(RecordDict(), dst_node_id=client, message_type='train')
        replies.append(Message(content, reply_to=request))
    return strategy.aggregate_train(1, replies)[0].to_numpy_ndarrays()[0]


np.random.seed(0)
small = 1e-9
for name, examples in (
    ('10 clients of equal size', [990] * 10),
    ('one client with 9,000 of 9,900', [9000] + [100] * 9),
):
    without = aggregate(examples, [small] * 10, 0)
    moved = np.linalg.norm(aggregate(examples, [5.0] + [small] * 9, 0) - without)
    noise = 1.0 * 1.0 / 10
    assert abs((aggregate(examples, [small] * 10, 1.0) - without).std() / noise - 1) < 0.05
    print(f'{name}: one moves the mean by {moved:.3f}, noise {noise:.3f}, '
          f'noise multiplier {noise / moved:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
