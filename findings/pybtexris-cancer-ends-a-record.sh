#!/usr/bin/env bash
# pybtexris ends an article at "CANCER - " in its title, or at "ER -" in its abstract.
#
# Packages: pybtexris 0.2.0, pybtex 0.26.1, setuptools 80.9.0, gris 0.9.0 (reads the same file, for
#   comparison).
# Behaviour: a record of the RIS format ends with a line that begins with "ER  -". pybtexris splits the
#   file wherever there are the letters ER, a space and a dash: in a title in capitals such as "BREAST
#   CANCER - A COHORT", or where a tumour has no oestrogen receptors, "ER - in 20 women". What comes
#   behind is another article, without authors and of the type Generic.
# Expected: two articles, with whole titles and abstracts.
# Instead: gris, or replace the dash in these texts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pybtexris==0.2.0' 'pybtex==0.26.1' 'setuptools==80.9.0' 'gris==0.9.0'
cat > expected.txt <<'EXPECTED'
gris: Miller, Anna 2021 AGE AT DIAGNOSIS OF BREAST CANCER - A COHORT OF 2000 WOMEN
gris: Schulz, Bernd 2019 Receptors of tumours The receptors were measured: ER - in 20 women, ER + in 80.
pybtexris: Miller ['Miller, Anna'] {'type': 'Journal Article', 'title': 'AGE AT DIAGNOSIS OF BREAST CANC'}
pybtexris: Unknown2021 [] {'type': 'Generic', 'journal': 'Invented journal', 'year': '2021'}
pybtexris: Schulz ['Schulz, Bernd'] {'type': 'Journal Article', 'title': 'Receptors of tumours', 'abstract': 'The receptors were measured:'}
pybtexris: Unknown2019 [] {'type': 'Generic', 'journal': 'Invented journal', 'year': '2019'}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pathlib

from gris import read_ris
from pybtexris import RISParser

text = """TY  - JOUR
AU  - Miller, Anna
TI  - AGE AT DIAGNOSIS OF BREAST CANCER - A COHORT OF 2000 WOMEN
JO  - Invented journal
PY  - 2021
ER  -

TY  - JOUR
AU  - Schulz, Bernd
TI  - Receptors of tumours
AB  - The receptors were measured: ER - in 20 women, ER + in 80.
JO  - Invented journal
PY  - 2019
ER  -
"""
pathlib.Path('articles.ris').write_text(text)
for article in read_ris('articles.ris'):
    print('gris:', *[article[tag] for tag in ('AU', 'PY', 'TI', 'AB') if tag in article])
for key, entry in RISParser().parse_string(text).entries.items():
    authors = [str(person) for person in entry.persons.get('author', [])]
    print('pybtexris:', key, authors, dict(entry.fields))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
