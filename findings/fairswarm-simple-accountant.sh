#!/usr/bin/env bash
# The ε that fairswarm reports with its simple accountant depends on the unit of the fitness.
#
# Packages: fairswarm 0.6.2, dp-accounting 0.6.0, numpy 2.4.6, scipy 1.17.1, pydantic 2.12.5.
# Behaviour: with accountant_type other than "rdp" each query is recorded as an ε of sensitivity / noise
#   multiplier. The multiplier is the deviation of the noise divided by the sensitivity, so that the noise
#   of a fitness in per cent has the same multiplier as one in shares, and the same privacy, and an ε a
#   hundred times as large. It is then compared with the budget. Gaussian noise has no ε without a δ at
#   all, so the sum is no ε either where the sensitivity is 1.
# Expected: the same ε in each unit, and one that the noise has: by the exact formula of Gaussian noise
#   for the number of queries that were made.
# Instead: accountant_type="rdp", the default.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dp-accounting==0.6.0' 'numpy==2.4.6' \
  'scipy==1.17.1' 'pydantic==2.12.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fairswarm==0.6.2'
cat > expected.txt <<'EXPECTED'
fitness in thousandths: 60 queries with a noise of 10 sensitivities, true epsilon 3.26, fairswarm 6e+02
fitness in per cent: 60 queries with a noise of 10 sensitivities, true epsilon 3.26, fairswarm 60
fitness in shares: 60 queries with a noise of 10 sensitivities, true epsilon 3.26, fairswarm 0.6
fitness in thousands: 60 queries with a noise of 10 sensitivities, true epsilon 3.26, fairswarm 0.0006
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant
from fairswarm import Client
from fairswarm.algorithms.fairswarm_dp import DPConfig, FairSwarmDP
from fairswarm.fitness.base import FitnessFunction, FitnessResult


class Mean(FitnessFunction):
    """Take the mean of the quality, in shares or in another unit."""

    def __init__(self, unit):
        self.unit = unit

    def evaluate(self, coalition, clients):
        value = self.unit * float(np.mean([clients[i].data_quality for i in coalition]))
        return FitnessResult(value=value, components={}, coalition=coalition)

    def compute_gradient(self, position, clients, coalition_size):
        return np.zeros(len(clients))

    def sensitivity(self, coalition_size=None, n_clients=None):
        return self.unit / 10


hospitals = [Client(id=f'hospital {i}', demographics=np.array([0.5, 0.5]), data_quality=0.8) for i in range(10)]
for name, unit in (('thousandths', 1000), ('per cent', 100), ('shares', 1), ('thousands', 0.001)):
    config = DPConfig(epsilon=1e9, noise_multiplier=10, auto_calibrate=False, accountant_type='simple')
    search = FairSwarmDP(hospitals, 10, dp_config=config, seed=0)
    state = search.optimize(Mean(unit), n_iterations=2).metadata['dp_result']
    queries = state['n_queries']
    right = PLDAccountant().compose(dp_accounting.GaussianDpEvent(10), queries).get_epsilon(1e-5)
    print(f'fitness in {name}: {queries} queries with a noise of 10 sensitivities, true epsilon {right:.2f},',
          f'fairswarm {state["epsilon_spent"]:.2g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
