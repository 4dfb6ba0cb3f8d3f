#!/usr/bin/env bash
# The ROUGE-W recall of easy-rouge is 0.63 for a summary that is equal to its reference of 10 words, and
# 0.40 for 100 words: it weighs the length of the reference twice.
#
# Packages: easy-rouge 0.2.2.
# Behaviour: with the weight function f(k) = k^1.2, ROUGE-W divides the weighted length of what two texts
#   have in common by f(length of the reference) and takes the inverse of f. rouge_w_sentence_level and
#   rouge_w_summary_level divide by f(f(length)), so that the recall, and the F-measure with it, falls
#   with the length of the reference. The precision is divided by f(length), and right.
# Expected: 1 for equal texts, as ROUGE-N and ROUGE-L of the package give.
# Instead: multiply the recall by the length of the reference to the power of 0.2.
# Source: Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004, section 4, equation 13.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'easy-rouge==0.2.2'
cat > expected.txt <<'EXPECTED'
2 words, the same: recall, precision and F-measure of ROUGE-W 0.871 1.000 0.931, by its definition 1.000 1.000 1.000; recall of ROUGE-L 1.000
2 words, its first half: recall, precision and F-measure of ROUGE-W 0.435 1.000 0.607, by its definition 0.500 1.000 0.667; recall of ROUGE-L 0.500
10 words, the same: recall, precision and F-measure of ROUGE-W 0.631 1.000 0.774, by its definition 1.000 1.000 1.000; recall of ROUGE-L 1.000
10 words, its first half: recall, precision and F-measure of ROUGE-W 0.315 1.000 0.480, by its definition 0.500 1.000 0.667; recall of ROUGE-L 0.500
100 words, the same: recall, precision and F-measure of ROUGE-W 0.398 1.000 0.569, by its definition 1.000 1.000 1.000; recall of ROUGE-L 1.000
100 words, its first half: recall, precision and F-measure of ROUGE-W 0.199 1.000 0.332, by its definition 0.500 1.000 0.667; recall of ROUGE-L 0.500
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from rouge import rouge_l_sentence_level, rouge_w_sentence_level


def right(same, summary, reference):
    """Compute recall, precision and F-measure where the texts have one run of words in common."""
    recall, precision = ((same**1.2 / length**1.2) ** (1 / 1.2) for length in (reference, summary))
    return recall, precision, 2 * recall * precision / (recall + precision)


for words in (2, 10, 100):
    reference = [f'word {place}' for place in range(words)]
    for name, summary in (('the same', reference), ('its first half', reference[:words // 2])):
        seen = ' '.join(f'{value:.3f}' for value in rouge_w_sentence_level(summary, reference))
        expected = ' '.join(f'{value:.3f}' for value in right(len(summary), len(summary), words))
        long = rouge_l_sentence_level(summary, reference)[0]
        print(f'{words} words, {name}: recall, precision and F-measure of ROUGE-W {seen}, by its definition {expected}; '
              f'recall of ROUGE-L {long:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
