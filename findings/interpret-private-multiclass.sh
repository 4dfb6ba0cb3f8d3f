#!/usr/bin/env bash
# The private additive model of interpret cannot learn three classes, and its error does not say so.
#
# Packages: interpret-core 0.7.8, numpy 2.4.6.
# Behaviour: DPExplainableBoostingClassifier takes two classes only. With three, fit ends in an
#   Exception about the constructor of an objective; the number of classes and what to do instead
#   are not in it. ExplainableBoostingClassifier takes three.
# Expected: a ValueError that names the limit, or a model of three classes.
# Instead: fit one model for each class against the rest, and divide ε among them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'interpret-core==0.7.8' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
2 classes: fitted
3 classes: Exception Objective constructor exception in DetermineLinkFunction
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from interpret.privacy import DPExplainableBoostingClassifier

features = np.random.default_rng(0).uniform(size=(600, 2))
for classes in (2, 3):
    model = DPExplainableBoostingClassifier(
        epsilon=1.0, delta=1e-5, privacy_bounds={0: (0, 1), 1: (0, 1)}, max_rounds=5
    )
    try:
        model.fit(features, np.arange(600) % classes)
        print(f'{classes} classes: fitted')
    except Exception as error:
        print(f'{classes} classes:', type(error).__name__, error)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
