#!/usr/bin/env bash
# The wer_legacy of devwer counts words with 8 bits: a transcript with 300 wrong words of 300 has a word error
# rate of 0.15 in place of 1, and one that ends after ten of them has 0.11.
#
# Packages: devwer 0.0.3, python-Levenshtein 0.27.1, numpy 1.26.4.
# Behaviour: the table of the edit distance is of uint8, so that 256 becomes 0 and each longer distance starts
#   again. With NumPy 2 the same text raises an OverflowError.
# Expected: the least number of inserted, deleted and exchanged words, divided by the words of the reference.
# Instead: texts of up to 255 words, or jiwer.wer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'devwer==0.0.3'
cat > expected.txt <<'EXPECTED'
100 words, all wrong: wer_legacy 1.000, by hand 1.000
100 words, ten wrong: wer_legacy 0.100, by hand 0.100
100 words, ten words alone: wer_legacy 0.900, by hand 0.900
250 words, all wrong: wer_legacy 1.000, by hand 1.000
250 words, ten wrong: wer_legacy 0.040, by hand 0.040
250 words, ten words alone: wer_legacy 0.960, by hand 0.960
300 words, all wrong: wer_legacy 0.147, by hand 1.000
300 words, ten wrong: wer_legacy 0.033, by hand 0.033
300 words, ten words alone: wer_legacy 0.113, by hand 0.967
500 words, all wrong: wer_legacy 0.488, by hand 1.000
500 words, ten wrong: wer_legacy 0.020, by hand 0.020
500 words, ten words alone: wer_legacy 0.468, by hand 0.980
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from devwer import Metrics


def by_hand(a, b):
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        row, before = [i], row
        for j, other in enumerate(b, 1):
            row.append(min(row[-1] + 1, before[j] + 1, before[j - 1] + (word != other)))
    return row[-1] / len(a)


metrics = Metrics()
for count in (100, 250, 300, 500):
    reference = ['घर'] * count
    for name, output in (('all wrong', ['जल'] * count), ('ten wrong', ['घर'] * (count - 10) + ['जल'] * 10),
                         ('ten words alone', ['घर'] * 10)):
        print(f'{count} words, {name}: wer_legacy {metrics.wer_legacy(" ".join(reference), " ".join(output)):.3f}, '
              f'by hand {by_hand(reference, output):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
