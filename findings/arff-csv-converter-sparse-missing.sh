#!/usr/bin/env bash
# arff-csv-converter reads the zeros of a sparse ARFF file as missing values.
#
# Packages: arff-csv-converter 1.1.0, pandas 2.3.3, numpy 2.3.3, liac-arff 2.5.0 (for comparison).
# Behaviour: what a sparse row leaves out becomes missing. Of four people with 0, 2, 0 and 1 stays
#   in hospital the mean is 1.5, of those alone who had any.
# Expected: 0, and the first value of a nominal attribute. Weka's description of the format: "the
#   omitted values in a sparse instance are 0, they are not missing values! If a value is unknown,
#   you must explicitly represent it with a question mark".
# Instead: liac-arff, or fill the missing values with zeros where no question mark is in the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'liac-arff==2.5.0' 'arff-csv-converter==1.1.0'
cat > expected.txt <<'EXPECTED'
stays [nan, 2.0, nan, 1.0] mean 1.5 smokers [nan, 'yes', nan, nan]
liac-arff [0.0, 2.0, 0.0, 1.0] mean 0.75 smokers ['no', 'yes', 'no', 'no']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import arff
from arff_csv.parser import ArffParser

text = """@RELATION people
@ATTRIBUTE age NUMERIC
@ATTRIBUTE stays NUMERIC
@ATTRIBUTE smoker {no,yes}
@DATA
{0 61}
{0 34, 1 2, 2 yes}
{0 52}
{0 45, 1 1}
"""
table = ArffParser().parse_string(text).data
right = [list(row) for row in arff.loads(text)['data']]
print('stays', table['stays'].tolist(), 'mean', table['stays'].mean(), 'smokers', table['smoker'].tolist())
stays = [row[1] for row in right]
print('liac-arff', stays, 'mean', sum(stays) / 4, 'smokers', [row[2] for row in right])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
