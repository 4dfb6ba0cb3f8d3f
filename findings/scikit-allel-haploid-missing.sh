#!/usr/bin/env bash
# scikit-allel counts the haploid calls of men on chromosome X as missing.
#
# Packages: scikit-allel 1.3.13, numpy 2.4.6; pysam 0.24.1 reads the same file.
# Behaviour: VCF states one allele for a man on X (genotype "1"). read_vcf fills the second place with
#   -1, the code of a missing allele, and is_called, is_hom_ref and is_hom_alt are then False. A
#   filter for missing calls drops X in a cohort with men, and ".", missing, looks the same.
# Expected: called, as in pysam; or a code of its own for an allele that cannot exist.
# Instead: read X with numbers={'GT': 1} for men, or count alleles, not genotypes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scikit-allel==1.3.13' 'pysam==0.24.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
genotypes 0/1 1/1 0 1 .
pysam, called: True True True True False
scikit-allel, called: True True False False False
scikit-allel, only the alternative allele: False True False False False
scikit-allel, alleles counted: 2 4
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import allel
import pysam

with open('x.vcf', 'w') as file:
    file.write('##fileformat=VCFv4.2\n##contig=<ID=X,length=155270560>\n')
    file.write('##FORMAT=<ID=GT,Number=1,Type=String,Description="Genotype">\n')
    columns = 'CHROM POS ID REF ALT QUAL FILTER INFO FORMAT woman1 woman2 man1 man2 man3'
    file.write('#' + '\t'.join(columns.split()) + '\n')
    file.write('\t'.join('X 5000000 . A C 50 PASS . GT 0/1 1/1 0 1 .'.split()) + '\n')
calls = allel.GenotypeArray(allel.read_vcf('x.vcf')['calldata/GT'])
record = next(iter(pysam.VariantFile('x.vcf')))
print('genotypes 0/1 1/1 0 1 .')
print('pysam, called:', *[None not in call['GT'] for call in record.samples.values()])
print('scikit-allel, called:', *calls.is_called()[0].tolist())
print('scikit-allel, only the alternative allele:', *calls.is_hom_alt()[0].tolist())
print('scikit-allel, alleles counted:', *calls.count_alleles()[0].tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
