#!/usr/bin/env bash
# The test for chance performance of biased-memory-toolbox leaves the answers of its caller in a random
# order.
#
# Packages: biased-memory-toolbox 1.3.0, numpy 2.4.6, scipy 1.17.1.
# Behaviour: test_chance_performance shuffles responses[:], which is a copy of a list and a view of an
#   array. Arrays are what its distance needs. The answers of the caller are thus in another order
#   afterwards, beside memoranda in the old one. The result of the first call is right; whatever is
#   computed after it is about chance.
# Expected: the arguments as they were.
# Instead: pass responses.copy().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps \
  'biased-memory-toolbox==1.3.0'
cat > expected.txt <<'EXPECTED'
at first: answers in their place 100%, guess rate 0%
test: p-value 0.000
after the test: answers in their place 0%, guess rate 97%
the same test again: p-value 0.961
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import random

import numpy as np
from biased_memory_toolbox import fit_mixture_model, response_bias, test_chance_performance

random.seed(0)
generator = np.random.default_rng(0)
shown = generator.uniform(0, 360, 200)
answers = (shown + np.degrees(generator.vonmises(0, 8, 200))) % 360
before = answers.copy()


def show(name):
    precision, guesses = fit_mixture_model(response_bias(shown, answers), include_bias=False)
    print(f'{name}: answers in their place {np.mean(answers == before):.0%}, guess rate {guesses:.0%}')


show('at first')
print(f'test: p-value {test_chance_performance(shown, answers)[1]:.3f}')
show('after the test')
print(f'the same test again: p-value {test_chance_performance(shown, answers)[1]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
