#!/usr/bin/env bash
# nprr gives all people who answer at random the same answer.
#
# Packages: numpy 1.26.4, scipy 1.13.1, nprr 0.1.4.
# Behaviour: multinomial_rr(x, K, r) lets each person answer with the truth with probability r and
#   at random otherwise. The random answer is drawn once for the whole array. All answers but the
#   most frequent one are true, so that a person with another answer has told their category and no
#   ε bounds it. The number is drawn from 0 to K, both included, where the categories are 0 to K -
#   1: in one of K + 1 calls it is no category at all. With two categories, warner_rr of the same
#   package draws for each person.
# Expected: a random category for each person.
# Instead: numpy.random.randint(0, K, len(x)) for the random answers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.13.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'nprr==0.1.4'
cat > expected.txt <<'EXPECTED'
answers 0 to 5 of five equal categories, r = 0.2: 4%, 4%, 4%, 4%, 84%, 0%
answers other than 4 that are true: 100%, by hand 56%
false answers that differ within a call: 1; calls of 200 with an answer that is no category: 39
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import sys
from unittest.mock import MagicMock

# confseq has to be compiled and is used for confidence sequences alone, not for the mechanisms
for name in ('confseq', 'confseq.betting_strategies', 'confseq.boundaries', 'confseq.betting', 'confseq.conjmix_bounded'):
    sys.modules[name] = MagicMock()
import numpy as np
from nprr.mechanisms import multinomial_rr

truth = np.repeat(np.arange(5), 2000)
counts = []
outside = 0
for seed in range(200):
    np.random.seed(seed)
    answers = multinomial_rr(truth, K=5, r=0.2)
    counts.append(len(np.unique(answers[answers != truth])))
    outside += (answers == 5).any()
    if seed == 0:
        shares = [f'{np.mean(answers == category):.0%}' for category in range(6)]
        print('answers 0 to 5 of five equal categories, r = 0.2:', ', '.join(shares))
        common = np.bincount(answers).argmax()
        print(f'answers other than {common} that are true: {np.mean(answers[answers != common] == truth[answers != common]):.0%},',
              f'by hand {0.2 / (0.2 + 0.8 / 5):.0%}')
print(f'false answers that differ within a call: {max(counts)}; calls of 200 with an answer that is no category: {outside}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
