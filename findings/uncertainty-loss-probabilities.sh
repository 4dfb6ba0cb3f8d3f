#!/usr/bin/env bash
# The probabilities of uncertainty-loss add up to 2, or 1.1, or are infinite, by how much evidence there is.
#
# Packages: uncertainty-loss 0.1.2, torch 2.13.0, numpy 2.4.6.
# Behaviour: evidence_to_proba, documented to convert outputs to probabilities, is to be the mode of a
#   Dirichlet distribution, (alpha - 1) / (sum - classes), and is alpha / (sum - classes). The sum of the
#   probabilities is 1 + classes / evidence: 2 where there is as much evidence as there are classes.
# Expected: a sum of 1; with alpha = evidence + 1 the mode is the share of the evidence.
# Instead: (evidence + 1) / (evidence + 1).sum(1, keepdim=True), the mean, which uncertainty() uses.
# Source: Sensoy, Kaplan and Kandemir, Evidential Deep Learning to Quantify Classification Uncertainty, 2018.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'uncertainty-loss==0.1.2'
cat > expected.txt <<'EXPECTED'
evidence [2.0, 1.0, 0.0]: evidence_to_proba 1.00 0.67 0.33, their sum 2.00; mode 0.67 0.33 0.00, mean 0.50 0.33 0.17
evidence [20.0, 10.0, 0.0]: evidence_to_proba 0.70 0.37 0.03, their sum 1.10; mode 0.67 0.33 0.00, mean 0.64 0.33 0.03
evidence [200.0, 100.0, 0.0]: evidence_to_proba 0.67 0.34 0.00, their sum 1.01; mode 0.67 0.33 0.00, mean 0.66 0.33 0.00
evidence [0.0, 0.0, 0.0]: evidence_to_proba inf inf inf, their sum inf; mode nan nan nan, mean 0.33 0.33 0.33
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from uncertainty_loss import evidence_to_proba

for evidence in ([2.0, 1.0, 0.0], [20.0, 10.0, 0.0], [200.0, 100.0, 0.0], [0.0, 0.0, 0.0]):
    values = torch.tensor([evidence])
    line = [' '.join(f'{value:.2f}' for value in row[0].tolist())
            for row in (evidence_to_proba(values), values / values.sum(), (values + 1) / (values + 1).sum())]
    print(f'evidence {evidence}: evidence_to_proba {line[0]}, their sum {evidence_to_proba(values).sum().item():.2f}; '
          f'mode {line[1]}, mean {line[2]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
