#!/usr/bin/env bash
# negex negates a finding that is stated, since it marks the letters of the finding within other words.
#
# Packages: negex 0.0.0.3.
# Behaviour: negTagger looks for each phrase with word boundaries on both sides. It then replaces its text
#   wherever it stands in the sentence, within other words too, so that "painkillers" becomes a phrase
#   followed by "killers". The word after the negation is thus marked as negated, and so is the whole
#   sentence.
# Expected: affirmed for each sentence: the pain is behind the word that ends the negation.
# Instead: replace with the pattern that found the phrase (re.sub), or another implementation.
# Source: Chapman and others, A simple algorithm for identifying negated findings, J Biomed Inform 34
#   (2001).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'negex==0.0.0.3'
cat > expected.txt <<'EXPECTED'
He takes no medicine but has pain. pain is affirmed
    He takes [PREN]no[PREN] medicine [CONJ]but[CONJ] has [PHRASE]pain[PHRASE].
He takes no painkillers but has pain. pain is negated
    He takes [PREN]no[PREN] [NEGATED]pain[NEGATED]killers [CONJ]but[CONJ] has [PHRASE]pain[PHRASE].
She denies coldness of her feet but has a cold. cold is negated
    She [PREN]denies[PREN] [NEGATED]cold[NEGATED]ness of her feet [CONJ]but[CONJ] has a [PHRASE]cold[PHRASE].
He denies pain. pain is negated
    He [PREN]denies[PREN] [NEGATED]pain[NEGATED].
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from negex.negex import negTagger, sortRules

rules = sortRules(['no\t\t[PREN]', 'denies\t\t[PREN]', 'but\t\t[CONJ]'])
for finding, sentence in (
    ('pain', 'He takes no medicine but has pain.'),
    ('pain', 'He takes no painkillers but has pain.'),
    ('cold', 'She denies coldness of her feet but has a cold.'),
    ('pain', 'He denies pain.'),
):
    tagger = negTagger(sentence=sentence, phrases=[finding], rules=rules, negP=False)
    print(f'{sentence} {finding} is {tagger.getNegationFlag()}')
    print('   ', tagger.getNegTaggedSentence())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
