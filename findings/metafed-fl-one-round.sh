#!/usr/bin/env bash
# The federated privacy of metafed-fl announces 10 rounds and stops in the second one.
#
# Packages: metafed-fl 1.0.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: FederatedDifferentialPrivacy divides ε by the sampling of clients and spends ε q in each
#   round, and the whole δ in each round, of a budget of one δ. The second round is over the budget and
#   raises "Privacy budget exhausted", with 90 % of ε left. estimate_max_rounds looks at ε alone. Half of
#   the rate makes it twenty rounds in the estimate, and one in fact.
# Expected: the estimated number of rounds, "Estimate maximum number of rounds with current privacy
#   budget": either δ is divided as ε is, or the estimate is 1.
# Instead: an accountant for all rounds, such as dp_accounting.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'metafed-fl==1.0.0'
cat > expected.txt <<'EXPECTED'
5 of 100 clients: 20 rounds estimated, 1 done, then "Privacy budget exhausted"; left epsilon 0.95, delta 0e+00
10 of 100 clients: 10 rounds estimated, 1 done, then "Privacy budget exhausted"; left epsilon 0.90, delta 0e+00
50 of 100 clients: 2 rounds estimated, 1 done, then "Privacy budget exhausted"; left epsilon 0.50, delta 0e+00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import os
import sys
import types

# the package imports models and data sets at once, which are not needed here
package = types.ModuleType('metafed')
package.__path__ = [next(f'{folder}/metafed' for folder in sys.path if os.path.isdir(f'{folder}/metafed'))]
sys.modules['metafed'] = package
import torch
from metafed.privacy.differential_privacy import create_dp_federated_experiment

for clients in (5, 10, 50):
    privacy = create_dp_federated_experiment(epsilon=1.0, delta=1e-5, num_clients=100, clients_per_round=clients)
    estimated = privacy.estimate_max_rounds()
    rounds, message = 0, ''
    while not message:
        try:
            privacy.privatize_aggregation([{'weight': torch.ones(3)} for _ in range(clients)], rounds)
            rounds += 1
        except ValueError as error:
            message = str(error)
    left = privacy.accountant
    print(f'{clients} of 100 clients: {estimated} rounds estimated, {rounds} done, then "{message}";',
          f'left epsilon {left.get_remaining_epsilon():.2f}, delta {left.get_remaining_delta():.0e}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
