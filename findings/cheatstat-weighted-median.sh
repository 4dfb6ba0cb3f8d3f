#!/usr/bin/env bash
# cheatstat's weighted table has an unweighted median.
#
# Packages: cheatstat 4.1.2, statsmodels 0.14.4, scipy 1.13.1, pandas 2.2.3, numpy 1.26.4.
# Behaviour: uniV(weight=...) uses the weights for the mean, the variance and the number of cases,
#   and names the effective number of cases. Mode, median, quartiles, skewness and kurtosis of the
#   same table are counted without weights, and nothing says so. The weighted variance divides by
#   the sum of weights, the unweighted one by n - 1, so weights of 1 change it.
# Expected: the value below which half of the weight lies.
# Why it matters here: a sample of a survey, or a table of weighted synthetic rows, is reported with
#   a mean and a median of different populations.
# Instead: repeat the rows where the weights are whole numbers, or a weighted quantile of
#   statsmodels' DescrStatsW.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'statsmodels==0.14.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'cheatstat==4.1.2'
cat > expected.txt <<'EXPECTED'
Mittelwert: with weights 46, rows repeated 46, statsmodels 46
50%-Quantil (Median): with weights 25, rows repeated 60, statsmodels 60
75%-Quantil: with weights 25, rows repeated 60, statsmodels 60
Modus: with weights 25, rows repeated 60
Varianz: without weights 198.0, with weights of 1 196.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from cheatstat import uniV
from statsmodels.stats.weightstats import DescrStatsW

# eighty young people who each stand for one person, and twenty old ones who each stand for six
people = pd.DataFrame({'age': [25] * 80 + [60] * 20, 'weight': [1.0] * 80 + [6.0] * 20, 'one': 1.0})


def table(rows, **given):
    """Return the statistics of the ages."""
    with contextlib.redirect_stdout(io.StringIO()):
        return uniV(rows, 'age', **given).stat.set_index('Statistik')['Wert'].astype(str)


weighted = table(people, weight='weight')
repeated = table(people.loc[people.index.repeat(people['weight'].astype(int))].reset_index(drop=True))
exact = DescrStatsW(people['age'], weights=people['weight'])
for name, value in (('Mittelwert', exact.mean), ('50%-Quantil (Median)', exact.quantile(0.5, return_pandas=False)[0]),
                    ('75%-Quantil', exact.quantile(0.75, return_pandas=False)[0])):
    print(f'{name}: with weights {float(weighted[name]):.0f}, rows repeated {float(repeated[name]):.0f}, '
          f'statsmodels {value:.0f}')
print(f"Modus: with weights {float(weighted['Modus']):.0f}, rows repeated {float(repeated['Modus']):.0f}")
print(f"Varianz: without weights {float(table(people)['Varianz']):.1f}, with weights of 1 "
      f"{float(table(people, weight='one')['Varianz']):.1f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
