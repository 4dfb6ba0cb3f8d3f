#!/usr/bin/env bash
# Flower's SecAgg+ clips weights silently, at a limit that depends on the number of a client's
# examples.
#
# Packages: flwr 1.42.0, numpy 2.4.6.
# Behaviour: a client multiplies its weights by num_examples / max_weight and clips the products to
#   ±clipping_range (8) before it masks them. A weight is thus bounded by 8 × 1000 / num_examples:
#   by 80 with 100 examples, by 8 with 1,000, by 4 with 2,000. Running variances and step counters
#   of BatchNorm and the weights of a regression on unscaled columns lie beyond. All clients below
#   agree on the same weights, and the secure average is another. The documentation says that each
#   parameter is bounded by clipping_range; only more than max_weight examples cause a warning,
#   about an overflow.
# Expected: the average without SecAgg+, or an error where a weight does not fit.
# Instead: set max_weight to the largest number of examples and clipping_range to the largest
#   weight, and leave counters out of what is sent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'flwr==1.42.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
three clients with the weights [1.0, 12.0, 100.0] and 50 examples each: [1.0, 12.0, 100.0]
three clients with the weights [1.0, 12.0, 100.0] and 100 examples each: [1.0, 12.0, 80.0]
three clients with the weights [1.0, 12.0, 100.0] and 500 examples each: [1.0, 12.0, 16.0]
three clients with the weights [1.0, 12.0, 100.0] and 1000 examples each: [1.0, 8.0, 8.0]
three clients with the weights [1.0, 12.0, 100.0] and 2000 examples each: [1.0, 4.0, 4.0]
1000 examples, clipping_range 200: [1.0, 12.0, 100.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import copy
import logging

import numpy as np
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ConfigRecord, Context, RecordDict
from flwr.common import ndarrays_to_parameters as pack
from flwr.common import parameters_to_ndarrays as unpack
from flwr.compat.common.recorddict_compat import arrayrecord_to_parameters, parameters_to_arrayrecord
from flwr.server import ServerConfig, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger('flwr').setLevel(logging.CRITICAL)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a running app sets them
WEIGHTS = np.array([1.0, 12.0, 100.0], dtype=np.float32)


def start_context(node):
    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})


class Client(NumPyClient):
    def __init__(self, examples):
        self.examples = examples

    def fit(self, parameters, config):
        return [WEIGHTS], self.examples, {}


class Grid:
    """Hand each message to its client in this process, as the network of Flower would."""

    def __init__(self, examples):
        self.nodes = range(1, 4)
        self.contexts = {node: start_context(node) for node in self.nodes}
        self.app = ClientApp(lambda context: Client(examples).to_client(), mods=[secaggplus_mod])

    def send_and_receive(self, messages, timeout=None):
        return [self.app(copy.deepcopy(message), self.contexts[message.metadata.dst_node_id])
                for message in messages]


def average(examples, **settings):
    grid, clients = Grid(examples), SimpleClientManager()
    for node in grid.nodes:
        clients.register(GridClientProxy(node_id=node, grid=grid, run_id=1))
    start = pack([np.zeros_like(WEIGHTS)])
    strategy = FedAvg(min_fit_clients=3, min_available_clients=3, initial_parameters=start)
    context = LegacyContext(start_context(0), ServerConfig(1), strategy, clients)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(start, True)
    SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, **settings)(grid, context)
    record = context.state.array_records[MAIN_PARAMS_RECORD]
    return unpack(arrayrecord_to_parameters(record, True))[0]


for examples in (50, 100, 500, 1000, 2000):
    print(f'three clients with the weights {WEIGHTS.tolist()} and {examples} examples each:',
          average(examples).round(1).tolist())
print('1000 examples, clipping_range 200:', average(1000, clipping_range=200.0).round(1).tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
