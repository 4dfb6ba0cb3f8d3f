#!/usr/bin/env bash
# df-compress, which is to save memory as Stata's lossless compress does, turns small numbers into
# zeros.
#
# Packages: df-compress 0.7.0, pandas 2.3.3, numpy 2.3.3, dask 2025.9.1, distributed 2025.9.1.
# Behaviour: a column of decimals is made whole where each value is close to a whole number by
#   numpy.isclose, with a tolerance of 1e-8 around zero. Concentrations in mol/l, of 1 to 9 nmol/l,
#   are 0 afterwards, and so are small p-values; those of 100 nmol/l are not.
# Expected: the values of the table. The code says "if no information is lost", and the description
#   "akin to Stata's compress command", which never loses precision.
# Instead: give small numbers in another unit, or compress with pandas column by column and
#   compare.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'dask==2025.9.1' 'distributed==2025.9.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'df-compress==0.7.0'
cat > expected.txt <<'EXPECTED'
estradiol in mol/l: [1.2e-09, 4.5e-09, 9.1e-09] becomes [0.0, 0.0, 0.0] of type int8
in nmol/l: [1.2, 4.5, 9.1] becomes [1.2, 4.5, 9.1] of type float32
p-value: [3e-09, 1e-12, 8e-10] becomes [0.0, 0.0, 0.0] of type int8
cortisol in mol/l: [1.2e-07, 4.5e-07, 3.1e-07] becomes [1.2e-07, 4.5e-07, 3.1e-07] of type float32
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import pandas as pd
from df_compress import compress

table = pd.DataFrame({'estradiol in mol/l': [1.2e-9, 4.5e-9, 9.1e-9], 'in nmol/l': [1.2, 4.5, 9.1],
                      'p-value': [3e-9, 1e-12, 8e-10], 'cortisol in mol/l': [1.2e-7, 4.5e-7, 3.1e-7]})
small = table.copy()
with contextlib.redirect_stdout(io.StringIO()):
    small = compress(small)
for name in table:
    print(f'{name}: {table[name].tolist()} becomes {[float(f"{value:.4g}") for value in small[name]]} of type {small[name].dtype}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
