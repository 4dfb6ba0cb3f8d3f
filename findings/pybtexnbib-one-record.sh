#!/usr/bin/env bash
# pybtexnbib makes one article of all articles of a file from PubMed.
#
# Packages: pybtexnbib 0.2.0, pybtex 0.26.1, pybtexris 0.2.0, setuptools 80.9.0, nbib 0.3.2 (reads the
#   same file, for comparison).
# Behaviour: records of the MEDLINE format end with an empty line. pybtexnbib, "for NBIB/Medline/PubMed
#   citation files", looks for the tag ER, which ends a record of the RIS format and which MEDLINE does
#   not have: three articles become one with the authors, titles and journals of all and the DOI of the
#   last one.
# Expected: three entries.
# Instead: split the file at empty lines and parse each part.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pybtexnbib==0.2.0' 'pybtexris==0.2.0' 'pybtex==0.26.1' 'setuptools==80.9.0' 'nbib==0.3.2'
cat > expected.txt <<'EXPECTED'
nbib: ['Sleep of nurses.', 'Walking and weight.', 'Salt in bread.']
pybtexnbib: 1 entry
Miller2019: Miller, Anna, Schulz, Bernd, Weber, Carla
    title: Sleep of nurses.; Walking and weight.; Salt in bread.
    journal: Night; Steps; Food
    year: 2019
    doi: 10.1000/c3
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import nbib
from pybtexnbib import NBIBParser

articles = [
    ('Miller, Anna', 'Sleep of nurses.', 'Night', '2019', '10.1000/a1'),
    ('Schulz, Bernd', 'Walking and weight.', 'Steps', '2020', '10.1000/b2'),
    ('Weber, Carla', 'Salt in bread.', 'Food', '2021', '10.1000/c3'),
]
text = ''.join(
    f'PMID- {number}\nTI  - {title}\nFAU - {author}\nJT  - {journal}\nDP  - {year}\nAID - {doi} [doi]\n'
    'PT  - Journal Article\n\n'
    for number, (author, title, journal, year, doi) in enumerate(articles, start=1)
)
print('nbib:', [article['title'] for article in nbib.read(text)])
entries = NBIBParser().parse_string(text).entries
print(f'pybtexnbib: {len(entries)} entry')
for key, entry in entries.items():
    print(f"{key}: {', '.join(str(person) for person in entry.persons['author'])}")
    for name in ('title', 'journal', 'year', 'doi'):
        print(f'    {name}: {entry.fields[name]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
