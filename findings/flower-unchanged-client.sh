#!/usr/bin/env bash
# A Flower client that returns the model unchanged ends the private round for all clients.
#
# Packages: flwr 1.42.0, numpy 2.4.6.
# Behaviour: the clipping of DifferentialPrivacyServerSideFixedClipping divides by the norm of each
#   update. A client whose model did not move, for instance because it has no records of the wanted
#   kind, gives a ZeroDivisionError on the server, and the round of all others is lost. What one
#   client's private data hold decides whether training goes on.
# Expected: an update of zero, which needs no clipping.
# Instead: let such a client return a change of about 1e-12, or report an error for it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'flwr==1.42.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
update 0.001 : aggregated
update 0.0 : ZeroDivisionError float division by zero
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger('flwr').setLevel(logging.ERROR)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a running app sets them

for update in (0.001, 0.0):
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), noise_multiplier=1.0, clipping_norm=1.0, num_sampled_clients=2
    )
    strategy.current_arrays = ArrayRecord([np.zeros(4)])
    replies = []
    for client, change in enumerate((0.5, update), 1):
        content = RecordDict({
            'arrays': ArrayRecord([np.full(4, change)]),
            'metrics': MetricRecord({'num-examples': 10}),
        })
        request = Message(RecordDict(), dst_node_id=client, message_type='train')
        replies.append(Message(content, reply_to=request))
    try:
        strategy.aggregate_train(1, replies)
        print('update', update, ': aggregated')
    except ZeroDivisionError as error:
        print('update', update, ':', type(error).__name__, error)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
