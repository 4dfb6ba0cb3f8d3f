#!/usr/bin/env bash
# Flower's adaptive strategies move the running variance of a BatchNorm below 0.
#
# Packages: flwr 1.42.0, numpy 2.4.6.
# Behaviour: FedAdam and FedAdagrad apply their step to every array that clients send. A step has
#   about the size eta, whatever the size of the array, and momentum carries it on. A running
#   variance that falls from 0.05 towards 0.01 at the clients becomes negative at the server, whose
#   square root is not a number; and the count of batches becomes a fraction.
# Expected: buffers are averaged, as by FedAvg, and only trained weights are stepped.
# Instead: send only parameters, or average the buffers beside the strategy; or GroupNorm.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'flwr==1.42.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
FedAvg variance [0.046, 0.042, 0.039, 0.036, 0.034, 0.031, 0.029] batches 70.00
FedAdam variance [0.029, 0.005, -0.013, -0.019, -0.014, -0.003, 0.011] batches 0.63
FedAdagrad variance [-0.03, 0.03, 0.001, 0.014, 0.009, 0.011, 0.01] batches 0.40
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.disable(logging.CRITICAL)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a running app sets them


def reply(arrays):
    content = {
        'arrays': ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()}),
        'metrics': MetricRecord({'num-examples': 100}),
    }
    return Message(RecordDict(content), dst_node_id=1, message_type='train')


for kind in (FedAvg, FedAdam, FedAdagrad):
    strategy, variances = kind(), []
    arrays = {'bn.running_var': np.array([0.05]), 'bn.num_batches_tracked': np.array(0)}
    for round_number in range(1, 8):
        strategy.current_arrays = dict(arrays)
        sent = {
            'bn.running_var': 0.9 * arrays['bn.running_var'] + 0.1 * 0.01,
            'bn.num_batches_tracked': arrays['bn.num_batches_tracked'] + 10,
        }
        record, _ = strategy.aggregate_train(round_number, [reply(sent), reply(sent)])
        arrays = {name: array.numpy() for name, array in record.items()}
        variances.append(round(arrays['bn.running_var'].item(), 3))
    count = arrays['bn.num_batches_tracked']
    print(kind.__name__, 'variance', variances, f'batches {count:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
