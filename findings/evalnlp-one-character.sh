#!/usr/bin/env bash
# The word error rate of EvalNLP does not see an exchanged word of one character: "take 9 tablets" for "take 1
# tablets" has an error of 0.
#
# Packages: EvalNLP 0.1.2, textdistance 4.6.3, jiwer 4.0.0.
# Behaviour: uwer takes the share of common pairs of letters for the cost of an exchanged word, by default. A
#   word of one letter or digit has no pair, and two words without pairs are called equal.
# Expected: a cost of 0 for equal words alone, as in any edit distance.
# Why it matters here: doses are digits, in letters and in transcripts of speech.
# Instead: cost_func='moyenne', in the last column, or jiwer.wer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'textdistance==4.6.3' 'jiwer==4.0.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'EvalNLP==0.1.2'
cat > expected.txt <<'EXPECTED'
"take 1 tablets" and "take 1 tablets": EvalNLP 0.00, words that differ 0.00, EvalNLP with the mean 0.00
"take 1 tablets" and "take 9 tablets": EvalNLP 0.00, words that differ 0.33, EvalNLP with the mean 0.33
"take 10 tablets" and "take 90 tablets": EvalNLP 0.33, words that differ 0.33, EvalNLP with the mean 0.18
"vitamin B and vitamin C" and "vitamin K and vitamin D": EvalNLP 0.00, words that differ 0.40, EvalNLP with the mean 0.40
"1 2 3 4 5 6" and "9 8 7 6 5 4": EvalNLP 0.00, words that differ 0.83, EvalNLP with the mean 0.83
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from evalnlp.uwer import uwer


def by_hand(reference, output):
    a, b = reference.split(), output.split()
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        row, before = [i], row
        for j, other in enumerate(b, 1):
            row.append(min(row[-1] + 1, before[j] + 1, before[j - 1] + (word != other)))
    return row[-1] / len(a)


for reference, output in (('take 1 tablets', 'take 1 tablets'), ('take 1 tablets', 'take 9 tablets'),
                          ('take 10 tablets', 'take 90 tablets'), ('vitamin B and vitamin C', 'vitamin K and vitamin D'),
                          ('1 2 3 4 5 6', '9 8 7 6 5 4')):
    print(f'"{reference}" and "{output}": EvalNLP {uwer(reference, output):.2f}, words that differ '
          f'{by_hand(reference, output):.2f}, EvalNLP with the mean {uwer(reference, output, cost_func="moyenne"):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
