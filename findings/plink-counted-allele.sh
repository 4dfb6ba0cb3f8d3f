#!/usr/bin/env bash
# Two readers of PLINK files count opposite alleles, so that 0 and 2 of each genotype are exchanged.
#
# Packages: bed-reader 1.1.0 (writes the file too), pandas-plink 2.3.2, numpy 1.26.4.
# Behaviour: a .bed file holds for each person and variant 0, 1 or 2 copies of an allele. bed-reader
#   counts the first allele of the .bim file, pandas-plink the second; both have an option, and both
#   are right by their documents. A model that was trained on the values of one and is given those
#   of the other has each effect reversed, without an error: a missing value stays missing, and
#   frequencies look plausible.
# Expected: one convention, or the counted allele in the name of a column.
# Instead: open_bed(..., count_A1=False), or read_plink1_bin(..., ref='a0'); compare one variant.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bed-reader==1.1.0' 'pandas-plink==2.3.2' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
bed-reader [[0.0, 1.0, 2.0], [2.0, nan, 0.0]]
pandas-plink [[2.0, 1.0, 0.0], [0.0, nan, 2.0]]
bed-reader, count_A1=False [[2.0, 1.0, 0.0], [0.0, nan, 2.0]]
pandas-plink, ref='a0' [[0.0, 1.0, 2.0], [2.0, nan, 0.0]]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from bed_reader import open_bed, to_bed
from pandas_plink import read_plink1_bin

to_bed('cohort.bed', np.array([[0, 1, 2], [2, np.nan, 0]]), properties={
    'fid': ['f', 'g'], 'iid': ['1', '2'], 'sid': ['s1', 's2', 's3'], 'chromosome': ['1'] * 3,
    'allele_1': ['A'] * 3, 'allele_2': ['G'] * 3, 'bp_position': [1, 2, 3],
})
files = ('cohort.bed', 'cohort.bim', 'cohort.fam')
print('bed-reader', open_bed('cohort.bed').read().tolist())
print('pandas-plink', read_plink1_bin(*files, verbose=False).values.tolist())
print('bed-reader, count_A1=False', open_bed('cohort.bed', count_A1=False).read().tolist())
print("pandas-plink, ref='a0'", read_plink1_bin(*files, verbose=False, ref='a0').values.tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
