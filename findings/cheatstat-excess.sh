#!/usr/bin/env bash
# cheatstat reports normal data as far flatter than normal.
#
# Packages: cheatstat 4.1.2, statsmodels 0.14.4, scipy 1.13.1, pandas 2.2.3, numpy 1.26.4.
# Behaviour: uniV calls the result of pandas' kurtosis() the kurtosis and takes 3 from it for the
#   excess ("Exzess"). pandas returns the excess, so the first is 3 too small and the second as
#   well. The standard error of the variance ("Varianz") is variance / √(2 n), which belongs to the
#   standard deviation.
# Expected: for normal data a kurtosis of 3 and an excess of 0; a standard error of variance · √(2 /
#   n).
# Why it matters here: the shape of a released table, or of the noise in it, is judged by these
#   rows; an excess of -3 is below the least possible one, which is -2.
# Instead: pandas' kurtosis() for the excess, plus 3 for the kurtosis; twice the standard error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'statsmodels==0.14.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'cheatstat==4.1.2'
cat > expected.txt <<'EXPECTED'
normal: kurtosis 0.0, excess -3.0; by their definitions 3.0 and 0.0
Laplace: kurtosis 2.9, excess -0.1; by their definitions 5.9 and 2.9
two values: kurtosis -2.0, excess -5.0; by their definitions 1.0 and -2.0
variance of 200 normal values: standard error 0.050 of it, among 4000 samples 0.098, √(2 / n) 0.100
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from cheatstat import uniV

random = np.random.default_rng(0)
samples = {'normal': random.normal(0, 2, 20000), 'Laplace': random.laplace(0, 2, 20000),
           'two values': random.choice([-1.0, 1.0], 20000)}
for name, values in samples.items():
    rows = uniV(pd.DataFrame({'x': values}), 'x').stat.set_index('Statistik')['Wert'].astype(str)
    moment = ((values - values.mean()) ** 4).mean() / values.var() ** 2
    print(f"{name}: kurtosis {float(rows['Kurtosis']):.1f}, excess {float(rows['Exzess']):.1f}; "
          f'by their definitions {moment:.1f} and {moment - 3:.1f}')
values = random.normal(0, 2, (4000, 200))
rows = uniV(pd.DataFrame({'x': values[0]}), 'x', se=True).stat.set_index('Statistik')
share = float(rows.loc['Varianz', 'SE']) / float(rows.loc['Varianz', 'Wert'])
print(f'variance of 200 normal values: standard error {share:.3f} of it, among 4000 samples '
      f'{values.var(axis=1, ddof=1).std() / 4:.3f}, √(2 / n) {np.sqrt(2 / 200):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
