#!/usr/bin/env bash
# The word error rate of devwer counts a run of wrong words as one error: a transcript of ten words that are
# all wrong has a rate of 0.1 in place of 1.
#
# Packages: devwer 0.0.3, python-Levenshtein 0.27.1, numpy 2.4.6.
# Behaviour: wer counts the blocks that difflib finds, not the words in them. The error falls as wrong words
#   stand together, and twenty words that were not said after the right ones are one error, too.
# Expected: the least number of inserted, deleted and exchanged words, divided by the words of the reference,
#   as wer_legacy beside it counts them.
# Instead: wer_legacy, for texts of up to 255 words.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'devwer==0.0.3'
cat > expected.txt <<'EXPECTED'
all words right: wer 0.00, wer_legacy 0.00, by hand 0.00
all ten words wrong: wer 0.10, wer_legacy 1.00, by hand 1.00
every second word wrong: wer 0.50, wer_legacy 0.50, by hand 0.50
the last five wrong: wer 0.10, wer_legacy 0.50, by hand 0.50
ten more words: wer 0.10, wer_legacy 1.00, by hand 1.00
the last nine missing: wer 0.10, wer_legacy 0.90, by hand 0.90
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from devwer import Metrics

WORDS = ['कमल', 'घर', 'जल', 'फल', 'वन', 'रथ', 'दल', 'मन', 'तप', 'गज', 'बस', 'शर', 'हल', 'पद', 'सर', 'यश', 'लय', 'खर', 'चर', 'टन']


def by_hand(a, b):
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        row, before = [i], row
        for j, other in enumerate(b, 1):
            row.append(min(row[-1] + 1, before[j] + 1, before[j - 1] + (word != other)))
    return row[-1] / len(a)


right, wrong = WORDS[:10], WORDS[10:]
every_second = [word for pair in zip(right[::2], wrong[1::2]) for word in pair]
metrics = Metrics()
for name, output in (('all words right', right), ('all ten words wrong', wrong), ('every second word wrong', every_second),
                     ('the last five wrong', right[:5] + wrong[:5]), ('ten more words', right + wrong),
                     ('the last nine missing', right[:1])):
    reference, text = ' '.join(right), ' '.join(output)
    print(f'{name}: wer {metrics.wer(reference, text):.2f}, wer_legacy {metrics.wer_legacy(reference, text):.2f}, '
          f'by hand {by_hand(right, output):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
