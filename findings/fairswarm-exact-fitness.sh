#!/usr/bin/env bash
# The result of the differentially private search of fairswarm holds the exact fitness.
#
# Packages: fairswarm 0.6.2, numpy 2.4.6, scipy 1.17.1, pydantic 2.12.5.
# Behaviour: FairSwarmDP adds noise to the fitness of each particle, and at the end evaluates the
#   coalition that it has found once more, without noise. This value and its components are the fitness of
#   the OptimizationResult, beside "epsilon_spent" and "privacy_satisfied". The same value goes to a
#   callback in each iteration. The mean of ten hospitals shows one patient of 5,000.
# Expected: "Run FairSwarm-DP optimization with privacy guarantees"; "Noisy fitness evaluations";
#   components are "redacted to prevent information leakage".
# Instead: publish the coalition alone, or the last entry of result.convergence.fitness_history.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' \
  'pydantic==2.12.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fairswarm==0.6.2'
cat > expected.txt <<'EXPECTED'
epsilon 2.0, recovered in the first hospital 4000: fitness 0.800000, 0.800000, 0.800000; epsilon spent 2.00
epsilon 2.0, recovered in the first hospital 4001: fitness 0.800020, 0.800020, 0.800020; epsilon spent 2.00
epsilon 4.0, recovered in the first hospital 4000: fitness 0.800000, 0.800000, 0.800000; epsilon spent 4.00
epsilon 4.0, recovered in the first hospital 4001: fitness 0.800020, 0.800020, 0.800020; epsilon spent 4.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from fairswarm import Client
from fairswarm.algorithms.fairswarm_dp import DPConfig, run_fairswarm_dp
from fairswarm.fitness.base import FitnessFunction, FitnessResult


class MeanRecovery(FitnessFunction):
    """Take the share of recovered patients, in which one of 50,000 is 0.00002."""

    def evaluate(self, coalition, clients):
        share = float(np.mean([clients[i].data_quality for i in coalition]))
        return FitnessResult(value=share, components={'recovered': share}, coalition=coalition)

    def compute_gradient(self, position, clients, coalition_size):
        return np.zeros(len(clients))

    def sensitivity(self, coalition_size=None, n_clients=None):
        return 1 / 50000


for epsilon in (2.0, 4.0):
    for recovered in (4000, 4001):
        hospitals = [Client(id=f'hospital {i}', demographics=np.array([0.5, 0.5]), dataset_size=5000,
                            data_quality=(recovered if i == 0 else 4000) / 5000) for i in range(10)]
        seen = []
        for seed in range(3):
            result = run_fairswarm_dp(hospitals, 10, MeanRecovery(), dp_config=DPConfig(epsilon=epsilon),
                                      n_iterations=5, seed=seed)
            seen.append(f'{result.fitness:.6f}')
        state = result.metadata['dp_result']
        print(f'epsilon {epsilon}, recovered in the first hospital {recovered}: fitness {", ".join(seen)};',
              f'epsilon spent {state["epsilon_spent"]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
