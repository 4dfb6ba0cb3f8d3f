#!/usr/bin/env bash
# The length penalty of lepor is a bonus: a translation of twice the length has a factor of 1.65 in place of
# 0.37, and one with padding has a higher score than the same without.
#
# Packages: lepor 0.1.0.
# Behaviour: length_penalty returns exp(1 - shorter / longer), which is 1 or more. The paper, and the name,
#   have exp(1 - longer / shorter), which is 1 or less. It cancels what the missing or superfluous words cost:
#   a sentence with as many words of padding again has a score of 0.96 in place of 0.21.
# Expected: a factor of at most 1 that falls as the lengths differ.
# Instead: the formula of the paper, as in the last column.
# Source: Han, Wong and Chao, LEPOR: A Robust Evaluation Metric for Machine Translation, COLING 2012, eq. 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lepor==0.1.0'
cat > expected.txt <<'EXPECTED'
reference of 10 words, output of 10: penalty 1.00, by the paper 1.00
reference of 10 words, output of 11: penalty 1.10, by the paper 0.90
reference of 10 words, output of 15: penalty 1.40, by the paper 0.61
reference of 10 words, output of 20: penalty 1.65, by the paper 0.37
reference of 10 words, output of 7: penalty 1.35, by the paper 0.65
reference of 10 words, output of 5: penalty 1.65, by the paper 0.37
13 words for 13: score 1.00, with the penalty of the paper 1.00
15 words for 13: score 1.00, with the penalty of the paper 0.75
26 words for 13: score 0.96, with the penalty of the paper 0.21
5 words for 13: score 0.71, with the penalty of the paper 0.08
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math
from lepor.sentence_level import length_penalty, sentence_lepor

for output in (10, 11, 15, 20, 7, 5):
    shorter, longer = sorted((10, output))
    print(f'reference of 10 words, output of {output}: penalty {length_penalty([0] * 10, [0] * output):.2f}, '
          f'by the paper {math.exp(1 - longer / shorter):.2f}')
reference = 'the patient takes the tablet in the morning with a glass of water'
for output in (reference, reference + ' well well', reference + ' well' * 13, 'the patient takes the tablet'):
    length, of_reference = len(output.split()), len(reference.split())
    score = sentence_lepor(reference, output)
    ratio = max(length, of_reference) / min(length, of_reference)
    print(f'{length} words for {of_reference}: score {score:.2f}, with the penalty of the paper '
          f'{score / math.exp(1 - 1 / ratio) * math.exp(1 - ratio):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
