#!/usr/bin/env bash
# gris says that theses and reports are not of the RIS standard, and that a typing error is.
#
# Packages: gris 0.9.0.
# Behaviour: check_conforms, "check if a given reference conforms to the RIS standard", has a list of
#   types of publications. It lacks THES, for theses, and has RPTR and UNBIL in place of RPRT, for
#   reports, and UNBILL: a report conforms with the wrong type only. gris has another list, for BibTeX, in
#   which THES and RPRT are.
# Expected: True for each type of the standard, False for RPTR.
# Instead: check the type against a list of one's own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'gris==0.9.0'
cat > expected.txt <<'EXPECTED'
JOUR: conforms True, in the list for BibTeX True
BOOK: conforms True, in the list for BibTeX True
CHAP: conforms True, in the list for BibTeX True
CONF: conforms True, in the list for BibTeX True
THES: conforms False, in the list for BibTeX True
RPRT: conforms False, in the list for BibTeX True
RPTR: conforms True, in the list for BibTeX False
UNBILL: conforms False, in the list for BibTeX False
UNBIL: conforms True, in the list for BibTeX False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from gris import ris

for kind in ('JOUR', 'BOOK', 'CHAP', 'CONF', 'THES', 'RPRT', 'RPTR', 'UNBILL', 'UNBIL'):
    article = {'TY': kind, 'AU': 'Miller, Anna', 'TI': 'Sleep of nurses', 'PY': '2021'}
    listed = kind in ris._bibtext_ris_types
    print(f'{kind}: conforms {ris.check_conforms(article)}, in the list for BibTeX {listed}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
