#!/usr/bin/env bash
# pybtexnbib joins the lines of a title or an abstract without the space between two words.
#
# Packages: pybtexnbib 0.2.0, pybtex 0.26.1, pybtexris 0.2.0, setuptools 80.9.0, nbib 0.3.2 (reads the
#   same file, for comparison).
# Behaviour: PubMed breaks lines between words and begins the next line with six spaces. pybtexnbib
#   strips the line and puts it behind the last word: "mild" and "hypertension" become
#   "mildhypertension". There is such a word for each line of a title or an abstract.
# Expected: the text with its spaces, as nbib reads it.
# Instead: join the continued lines of the file with one space before it is read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pybtexnbib==0.2.0' 'pybtexris==0.2.0' 'pybtex==0.26.1' 'setuptools==80.9.0' 'nbib==0.3.2'
cat > expected.txt <<'EXPECTED'
pybtexnbib: A randomised controlled trial of an invented drug in adults with mildhypertension.
nbib:       A randomised controlled trial of an invented drug in adults with mild hypertension.
pybtexnbib: We measured the blood pressure of 200 people who had never beentreated. It fell by 4 mmHg in those who took the drug, and by 3 inthose who took a placebo.
nbib:       We measured the blood pressure of 200 people who had never been treated. It fell by 4 mmHg in those who took the drug, and by 3 in those who took a placebo.
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import nbib
from pybtexnbib import NBIBParser

text = """PMID- 30000001
TI  - A randomised controlled trial of an invented drug in adults with mild
      hypertension.
AB  - We measured the blood pressure of 200 people who had never been
      treated. It fell by 4 mmHg in those who took the drug, and by 3 in
      those who took a placebo.
FAU - Miller, Anna
PT  - Journal Article
DP  - 2021 Mar
"""
(entry,) = NBIBParser().parse_string(text).entries.values()
(other,) = nbib.read(text + '\n')
for name in ('title', 'abstract'):
    print('pybtexnbib:', entry.fields[name])
    print('nbib:      ', other[name])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
