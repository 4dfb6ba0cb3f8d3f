#!/usr/bin/env bash
# gfreader adjusts alleles to a reference genome and not the genotypes.
#
# Packages: gfreader 1.0.5, bed-reader 1.0.5, numpy 2.2.6, pandas 2.3.3.
# Behaviour: with ref_adjust the readers name the allele of the reference genome REF and the other
#   one ALT, and exchange 0 and 2 where the first allele was not the reference. The list of these
#   sites is made after the exchange, by a comparison of REF with itself, so it is empty: names
#   change and genotypes stay. A position that is a multiple of the length of a line is looked up in
#   the next line, where its last base is read, so that sites there are exchanged which are right.
# Expected: 2 for a person without the reference allele.
# Instead: bcftools norm --check-ref s, or exchange by hand where the names differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'bed-reader==1.0.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'gfreader==1.0.5'
cat > expected.txt <<'EXPECTED'
position 5, alleles A G, genome G: REF G, ALT A, genotypes [0, 1, 2], right [2, 1, 0]
position 7, alleles C T, genome C: REF C, ALT T, genotypes [0, 1, 2], right [0, 1, 2]
position 10, alleles A C, genome A: REF C, ALT A, genotypes [0, 1, 2], right [0, 1, 2]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io
from pathlib import Path

from gfreader import vcfreader

genome = 'TTTTGTCTTA' 'CCCCCCCCCC'
Path('genome.fa').write_text(f'>1\n{genome[:10]}\n{genome[10:]}\n')
header = ['#CHROM', 'POS', 'ID', 'REF', 'ALT', 'QUAL', 'FILTER', 'INFO', 'FORMAT', 'ann', 'bob', 'eve']
sites = [(5, 'A', 'G'), (7, 'C', 'T'), (10, 'A', 'C')]
lines = ['##fileformat=VCFv4.2', '\t'.join(header)]
lines += ['\t'.join(['1', str(position), '.', first, second, '.', 'PASS', '.', 'GT', '0/0', '0/1', '1/1'])
          for position, first, second in sites]
Path('people.vcf').write_text('\n'.join(lines) + '\n')
with contextlib.redirect_stdout(io.StringIO()):
    table = vcfreader('people.vcf', ref_adjust='genome.fa')
for position, first, second in sites:
    row = table.loc[(1, position)]
    right = genome[position - 1]
    counted = [sum(allele != right for allele in pair) for pair in (first * 2, first + second, second * 2)]
    print(f'position {position}, alleles {first} {second}, genome {right}: REF {row["REF"]}, ALT {row["ALT"]},',
          f'genotypes {[int(value) for value in row.iloc[2:]]}, right {counted}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
