#!/usr/bin/env bash
# mendelbrot takes the parents out of the pedigree that it was read from when it is asked for a subset of it, which it
# documents as a new object.
#
# Packages: mendelbrot 0.0.3, cloudpathlib 0.21.1, loguru 0.7.3.
# Behaviour: strip_pedigree_to_samples returns a new dictionary of the same participants and sets the parents who are not
#   in the subset to 0 in them. The whole pedigree then has lost these parents as well, so that a later subset or a file
#   that is written from it has families without them. as_singletons beside it makes copies.
# Expected: an unchanged pedigree, which set_participants can replace "if required".
# Why it matters here: whether a variant is new in a child or inherited is decided by the parents. Which trios are left
#   depends on the subsets that were looked at before.
# Instead: copy.deepcopy(pedigree).strip_pedigree_to_samples(...).
# Source: the docstring: "Returns this as a new object. If required this can overwrite the main data using
#   self.set_participants()".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cloudpathlib==0.21.1' 'loguru==0.7.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'mendelbrot==0.0.3'
cat > expected.txt <<'EXPECTED'
trios before: ['child of father and mother', 'son of dad and mum']
subset: [('child', '0', '0'), ('mum', '0', '0'), ('son', '0', 'mum')]
trios of the whole pedigree after: []
written: [['father', '0', '0'], ['mother', '0', '0'], ['child', '0', '0'], ['dad', '0', '0'], ['mum', '0', '0'], ['son', '0', 'mum']]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import sys
from pathlib import Path
from loguru import logger
logger.remove()
from mendelbrot.pedigree_parser import PedigreeParser

rows = [('f1', 'father', '0', '0', 1, 1), ('f1', 'mother', '0', '0', 2, 1), ('f1', 'child', 'father', 'mother', 2, 2),
        ('f2', 'dad', '0', '0', 1, 1), ('f2', 'mum', '0', '0', 2, 1), ('f2', 'son', 'dad', 'mum', 1, 2)]
Path('family.ped').write_text(''.join('\t'.join(map(str, row)) + '\n' for row in rows))
pedigree = PedigreeParser('family.ped')

def trios():
    return [f'{person.sample_id} of {person.father_id} and {person.mother_id}' for person in pedigree.participants.values()
            if person.father_id != '0' and person.mother_id != '0']

print('trios before:', trios())
subset = pedigree.strip_pedigree_to_samples({'child', 'son', 'mum'})
print('subset:', [(person.sample_id, person.father_id, person.mother_id) for person in subset.values()])
print('trios of the whole pedigree after:', trios())
pedigree.write_pedigree('written.ped')
print('written:', [line.split('\t')[1:4] for line in Path('written.ped').read_text().splitlines()])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
