#!/usr/bin/env bash
# The PrivBayes of dpart takes bounds and drops them.
#
# Packages: dpart 0.1.2, diffprivlib 0.6.0, scikit-learn 1.1.3, scipy 1.10.1, pandas 1.5.3, numpy
#   1.23.5.
# Behaviour: the constructor has an argument bounds and does not hand it on, so that the bounds are
#   taken from the data. For text columns a PrivacyLeakWarning is issued in such a case. For
#   numbers the warning is constructed and not issued, so that nobody hears of it.
# Expected: the given bounds, as in the class Independent beside it, or a warning.
# Why it matters here: whoever sets bounds to be private gets the limits of the data in the model
#   and in each synthetic table.
# Instead: PrivBayes(epsilon=...), and then set its attribute bounds; and see
#   dpart-bounds-are-the-data.
# Source: Zhang et al., PrivBayes, Private Data Release via Bayesian Networks, SIGMOD 2014.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scikit-learn==1.1.3' 'scipy==1.10.1' 'pandas==1.5.3' 'numpy==1.23.5' 'joblib==1.4.2' 'setuptools==68.2.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'diffprivlib==0.6.0' 'dpart==0.1.2'
cat > expected.txt <<'EXPECTED'
Independent, bounds given: bounds used {'weight': (30.0, 250.0), 'age': (0.0, 120.0)}; privacy warnings []
Independent, no bounds: bounds used {'weight': (36.0, 187.3), 'age': (20.0, 89.0)}; privacy warnings ["List of categories not sepecified for column 'sex'"]
PrivBayes, bounds given: bounds used {'weight': (36.0, 187.3), 'age': (20.0, 89.0)}; privacy warnings ["List of categories not sepecified for column 'sex'"]
PrivBayes, no bounds: bounds used {'weight': (36.0, 187.3), 'age': (20.0, 89.0)}; privacy warnings ["List of categories not sepecified for column 'sex'"]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import warnings

import numpy as np
import pandas as pd
from diffprivlib.utils import PrivacyLeakWarning
from dpart.engines import Independent, PrivBayes

random = np.random.default_rng(0)
people = pd.DataFrame({'weight': np.append(random.normal(75, 10, 999).round(1), 187.3), 'age': random.integers(20, 90, 1000).astype(float),
                       'sex': random.choice(['f', 'm'], 1000)})
given = {'weight': {'min': 30, 'max': 250}, 'age': {'min': 0, 'max': 120}, 'sex': {'categories': ['f', 'm']}}
for kind in (Independent, PrivBayes):
    for label, bounds in (('bounds given', given), ('no bounds', None)):
        np.random.seed(0)
        maker = kind(epsilon=1.0, bounds=bounds and dict(bounds))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            maker.fit(people)
        leaks = sorted(str(warning.message) for warning in seen if issubclass(warning.category, PrivacyLeakWarning))
        used = {name: tuple(float(value) for value in maker.bounds[name].values()) for name in ('weight', 'age')}
        print(f'{kind.__name__}, {label}: bounds used {used}; privacy warnings {leaks}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
