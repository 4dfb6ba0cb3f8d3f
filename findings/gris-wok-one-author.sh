#!/usr/bin/env bash
# gris makes one author of all authors of an article in the format of Web of Knowledge.
#
# Packages: gris 0.9.0.
# Behaviour: an export of Web of Knowledge has one author a line behind one tag. gris documents that "in
#   the case of multiline or multiple key ocurrences, the content is returned as a list of strings", and
#   returns one string with line breaks: get_authors finds one author, and parse_author takes the second
#   one's family name for a part of the first one's given name. In the RIS format, with a tag for each,
#   there are three.
# Expected: three authors, and three addresses.
# Instead: split the text at its line breaks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'gris==0.9.0'
cat > expected.txt <<'EXPECTED'
article.ris: 3 authors, the first ('Miller', 'A', None)
article.txt: 1 authors, the first ('Miller', 'A\nSchulz', None)
article.txt: 1 address
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pathlib

from gris import read_ris, ris

pathlib.Path('article.txt').write_text("""FN Export of invented articles
VR 1.0
PT J
AU Miller, A
   Schulz, B
   Weber, C
TI Age at diagnosis
C1 [Miller, A] Univ Berlin, Berlin, Germany.
   [Schulz, B] Univ Paris, Paris, France.
   [Weber, C] Univ Rome, Rome, Italy.
PY 2021
ER

EF
""")
pathlib.Path('article.ris').write_text("""TY  - JOUR
AU  - Miller, A
AU  - Schulz, B
AU  - Weber, C
TI  - Age at diagnosis
PY  - 2021
ER  -
""")
for name, wok in (('article.ris', False), ('article.txt', True)):
    (article,) = read_ris(name, wok=wok)
    authors = ris.get_authors(article)
    print(f'{name}: {len(authors)} authors, the first {ris.parse_author(authors[0])}')
    if 'C1' in article:
        print(f"{name}: {len(ris.tag2list(article, 'C1'))} address")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
