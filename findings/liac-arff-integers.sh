#!/usr/bin/env bash
# liac-arff cuts the decimals off a weight of 2.7 kg whose column is called integer, and reads two patient
# numbers of 17 digits as one.
#
# Packages: liac-arff 2.5.0, scipy 1.17.1, numpy 2.4.6.
# Behaviour: ARFF has one type of numbers with three names, numeric, real and integer. liac-arff
#   converts a column called integer through a float to a whole number: decimals go, towards 0, and
#   numbers above 2**53 become the next even one. The same column called numeric keeps its decimals.
#   scipy reads the decimals; it too has floats for the numbers.
# Expected: 2.7, or an error; whole numbers as Python reads them.
# Why it matters here: two patients with one number become one group of records, and one clipped gradient.
# Instead: replace integer by numeric in the header, and declare identifiers as string.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'liac-arff==2.5.0' 'scipy==1.17.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
integer: 90071992547409936 2 0; 90071992547409936 3 -1 - 1 patients
integer, weights by scipy: 2.7 3.9
numeric: 9.007199254740994e+16 2.7 -0.9; 9.007199254740994e+16 3.9 -1.2 - 1 patients
numeric, weights by scipy: 2.7 3.9
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import io

import arff
from scipy.io.arff import loadarff

TEXT = """@relation newborns
@attribute patient {kind}
@attribute weight {kind}
@attribute change {kind}
@data
90071992547409931,2.7,-0.9
90071992547409932,3.9,-1.2
"""
for kind in ('integer', 'numeric'):
    text = TEXT.format(kind=kind)
    rows = arff.loads(text)['data']
    print(f'{kind}:', '; '.join(' '.join(map(str, row)) for row in rows),
          f'- {len({row[0] for row in rows})} patients')
    weights = loadarff(io.StringIO(text))[0]['weight'].tolist()
    print(f'{kind}, weights by scipy:', *weights)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
