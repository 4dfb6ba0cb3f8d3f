#!/usr/bin/env bash
# anova_utils confuses group sizes with variances in its check of an F-test.
#
# Packages: anova_utils 0.3.3, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, matplotlib 3.10.6.
# Behaviour: check_homoscedacity applies rules of Blanca and others, who found by simulation where
#   unequal variances harm an F-test. Two of the rules depend on the coefficient of variation of the
#   group sizes. The function computes the one of the variances, and prints it as "coefficient of
#   sample size variation". That is large wherever the rules are reached, since the ratio of the
#   variances is above 2 then, so that nearly equal groups are judged like very unequal ones.
# Expected: the standard deviation of the group sizes over their mean, and no objection to nearly
#   equal groups.
# Instead: compute it from value_counts().
# Source: Blanca, Alarcón, Arnau, Bono and Bendayan, Behavior Research Methods 2018.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'matplotlib==3.10.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'anova_utils==0.3.3'
cat > expected.txt <<'EXPECTED'
groups of (30, 31, 32): variation of the sizes 0.03, by the package ['0.87'];
   F-test is too conserative (hurting power)
groups of (10, 30, 90): variation of the sizes 0.96, by the package ['0.87'];
   F-test is too conserative (hurting power)
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
import re

import numpy as np
import pandas as pd
from anova_utils import check_homoscedacity

for sizes in ((30, 31, 32), (10, 30, 90)):
    parts = []
    for group, (size, spread) in enumerate(zip(sizes, (1, 2, 3))):
        values = np.linspace(-1, 1, size)
        parts.append(pd.DataFrame({'ward': f'ward {group}', 'pressure': 120 + spread * values / values.std(ddof=1)}))
    table = pd.concat(parts, ignore_index=True)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        check_homoscedacity('pressure', 'ward', table)
    lines = text.getvalue().splitlines()
    seen = re.findall(r'variation is ([0-9.]+[0-9])', text.getvalue())
    right = np.std(sizes, ddof=1) / np.mean(sizes)
    print(f'groups of {sizes}: variation of the sizes {right:.2f}, by the package {seen};')
    print('  ', re.sub(r'.*(F-test)', r'\1', lines[-1])[:70])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
