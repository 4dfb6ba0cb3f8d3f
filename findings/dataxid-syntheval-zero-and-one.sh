#!/usr/bin/env bash
# dataxid-syntheval finds a column of zeros and ones 100 % right, whatever is in it.
#
# Packages: dataxid-syntheval 0.3.0, dataxid-profiling 0.4.0, polars 2.1.0, scikit-learn 1.9.1,
#   numpy 2.4.6.
# Behaviour: the fidelity of a number compares how many values fall between its quantiles. The quantiles
#   of zeros and ones are 0 and 1, between which there is one bin for all of them: a disease of 5 % that is
#   one of 100 % in the synthetic table is 100 % right, and the combinations with other columns with it. A
#   column of 0, 1 and 2 has two bins, 0 and 1 together. The same values as text are compared.
# Expected: 5 % where all are ill in place of 5 %, as for text.
# Instead: turn numbers with few values into text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dataxid-syntheval==0.3.0' 'polars==2.1.0' 'scikit-learn==1.9.1' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check 'dataxid-profiling==0.4.0'
cat > expected.txt <<'EXPECTED'
5 % ill, Int64: fidelity 100.0, {'ill': 100.0, 'smokes': 100.0}
5 % ill, String: fidelity 100.0, {'ill': 100.0, 'smokes': 100.0}
50 % ill, Int64: fidelity 100.0, {'ill': 100.0, 'smokes': 100.0}
50 % ill, String: fidelity 66.25, {'ill': 55.0, 'smokes': 100.0}
all ill, Int64: fidelity 100.0, {'ill': 100.0, 'smokes': 100.0}
all ill, String: fidelity 28.75, {'ill': 5.0, 'smokes': 100.0}
70 % smoke a little, Int64: fidelity 100.0, {'ill': 100.0, 'smokes': 100.0}
70 % smoke a little, String: fidelity 47.5, {'ill': 100.0, 'smokes': 30.0}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import polars as pl
from dataxid_syntheval import SynthEval


def people(ill, ever):
    return pl.DataFrame({
        'ill': [int(person < ill) for person in range(1000)],
        'smokes': [1 if person % 10 < ever else 2 if person % 10 > 6 else 0 for person in range(1000)],
    })


real = people(50, 0)
for name, synthetic in (('5 % ill', people(50, 0)), ('50 % ill', people(500, 0)),
                        ('all ill', people(1000, 0)), ('70 % smoke a little', people(50, 7))):
    for kind in (pl.Int64, pl.Utf8):
        scores = SynthEval(original=real.cast(kind), synthetic=synthetic.cast(kind)).scores
        print(f'{name}, {kind}: fidelity {scores.fidelity}, {scores.fidelity_detail.per_column}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
