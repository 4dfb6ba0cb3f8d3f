#!/usr/bin/env bash
# gfreader reads the genotypes of a VCF only where nothing stands beside them.
#
# Packages: gfreader 1.0.5, bed-reader 1.0.5, numpy 2.2.6, pandas 2.3.3.
# Behaviour: vcfreader looks the whole field of a sample up in a list of eight texts such as 0/0 and
#   0|1, and takes all others for missing, -9. A VCF states in FORMAT which values stand in the
#   field, and callers write GT:DP or GT:AD:DP:GQ:PL, so that all of their genotypes become -9,
#   without a message. Haploid calls of men on chromosome X, and genotypes with a second alternative
#   allele, are -9 as well.
# Expected: the part before the first colon.
# Instead: bcftools annotate -x FORMAT before, or scikit-allel.
# Source: The Variant Call Format Specification 4.2, section 1.4.2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'bed-reader==1.0.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'gfreader==1.0.5'
cat > expected.txt <<'EXPECTED'
position 100, GT 0/0 0/1 1/1: read as [0, 1, 2]
position 200, GT:DP 0/0:31 0/1:28 1/1:30: read as [-9, -9, -9]
position 300, GT 0/0 1 1/1: read as [0, -9, 2]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from pathlib import Path

from gfreader import vcfreader

lines = ['##fileformat=VCFv4.2', '##FORMAT=<ID=GT,Number=1,Type=String,Description="Genotype">',
         '##FORMAT=<ID=DP,Number=1,Type=Integer,Description="Depth">',
         '\t'.join(['#CHROM', 'POS', 'ID', 'REF', 'ALT', 'QUAL', 'FILTER', 'INFO', 'FORMAT', 'ann', 'bob', 'eve'])]
for position, kind, fields in [(100, 'GT', ('0/0', '0/1', '1/1')), (200, 'GT:DP', ('0/0:31', '0/1:28', '1/1:30')),
                               (300, 'GT', ('0/0', '1', '1/1'))]:
    lines.append('\t'.join(['1', str(position), '.', 'A', 'G', '.', 'PASS', '.', kind, *fields]))
Path('people.vcf').write_text('\n'.join(lines) + '\n')
table = vcfreader('people.vcf')
for (_, position), row in table.iterrows():
    field = [line for line in lines if f'\t{position}\t' in line][0].split('\t')[8:]
    print(f'position {position}, {" ".join(field)}: read as {list(row.iloc[2:])}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
