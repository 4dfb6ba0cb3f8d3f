#!/usr/bin/env bash
# mendelbrot writes a stop codon at the first changed amino acid, wherever it is: a change of Trp128 to Cys with a stop at
# 129 becomes p.Trp128Ter.
#
# Packages: mendelbrot 0.0.3, cloudpathlib 0.21.1, loguru 0.7.3.
# Behaviour: classify_change turns consequences of BCFtools into HGVS. For a stop gained it takes the first letter and the
#   first number and adds Ter, without a look at where the stop is in the new sequence. Where the stop is first it is right.
# Expected: the place of the stop, or the text as it was, as for a frameshift that it cannot read.
# Why it matters here: p.Trp128Ter is another variant, with other entries in databases, and the change before the stop is
#   lost. Variants of several bases, which change neighbouring codons, are written this way by BCFtools.
# Instead: keep the text of BCFtools unless it has one letter before the stop.
# Source: HGVS nomenclature, recommendations for proteins: Ter stands at the position of the stop codon, and changes of
#   neighbouring amino acids are described as delins.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cloudpathlib==0.21.1' 'loguru==0.7.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'mendelbrot==0.0.3'
cat > expected.txt <<'EXPECTED'
128W>128*: mendelbrot p.Trp128Ter, the stop is at Trp128
128WK>128C*: mendelbrot p.Trp128Ter, the stop is at Lys129
57RQL>57RQ*: mendelbrot p.Arg57Ter, the stop is at Leu59
900GAK>900VC*: mendelbrot p.Gly900Ter, the stop is at Lys902
41SR>41*: mendelbrot p.Ser41Ter, the stop is at Ser41
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from mendelbrot.bcftools_interpreter import IUPAC_LOOKUP, classify_change

def first_stop(alteration):
    before, after = (part.lstrip('0123456789') for part in alteration.split('>'))
    place = after.index('*')
    return int(alteration.split('>')[0].rstrip('ABCDEFGHIKLMNPQRSTVWY*')) + place, before[place:place + 1]

for alteration in ('128W>128*', '128WK>128C*', '57RQL>57RQ*', '900GAK>900VC*', '41SR>41*'):
    place, letter = first_stop(alteration)
    print(f'{alteration}: mendelbrot {classify_change(alteration, "stop_gained")}, the stop is at {IUPAC_LOOKUP[letter]}{place}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
