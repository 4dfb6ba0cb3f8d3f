#!/usr/bin/env bash
# The bootstrap test of boostsa draws samples of a tenth of the data, and half at most, so that chance is
# three times as large in them: a difference of three standard errors has a p-value of 0.16.
#
# Packages: boostsa 0.2.13, scikit-learn 1.6.1, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, tqdm 4.67.1.
# Behaviour: Bootstrap counts the samples in which the difference of two models is more than twice the one
#   in the data. The paper draws samples of the size of the data, since the difference varies by its
#   size. sample_size is 0.1 by default and must be between 0.05 and 0.5, so that the standard error is
#   3.2, 4.5 or 1.4 times the right one, and the p-value of a better model cannot be small.
# Expected: samples of as many examples as there are.
# Instead: a paired test such as McNemar's for accuracies.
# Source: Berg-Kirkpatrick, Burkett and Klein, An Empirical Investigation of Statistical Significance in
#   NLP, EMNLP 2012, figure 1, which boostsa refers to.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scikit-learn==1.6.1' 'numpy==2.2.6' \
  'pandas==2.3.3' 'scipy==1.15.3' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'boostsa==0.2.13'
cat > expected.txt <<'EXPECTED'
accuracies 0.9350 and 0.9575, a difference of 3.1 standard errors; one-sided McNemar test 0.001
samples of 5% of the data: by hand 0.23, p-value of boostsa for the accuracy 0.25
samples of 10% of the data: by hand 0.14, p-value of boostsa for the accuracy 0.16
samples of 50% of the data: by hand 0.02, p-value of boostsa for the accuracy 0.02
samples of 100% of the data: by hand 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt 2> /dev/null <<'PYTHON'
import contextlib
import io
import re

import numpy
from boostsa import Bootstrap
from scipy.stats import binomtest

people, better, worse = 2000, 130, 85  # examples that only the second, and only the first model has right
truth = numpy.arange(people) % 2
first, second = truth.copy(), truth.copy()
first[:better] ^= 1
second[better:better + worse] ^= 1
gain = (second == truth).astype(int) - (first == truth).astype(int)
error = gain.std() / people**0.5
print(f'accuracies {(first == truth).mean():.4f} and {(second == truth).mean():.4f}, a difference of '
      f'{gain.mean() / error:.1f} standard errors; one-sided McNemar test {binomtest(better, better + worse, alternative="greater").pvalue:.3f}')
generator = numpy.random.default_rng(0)
for size in (0.05, 0.1, 0.5, 1.0):
    drawn = gain[generator.integers(0, people, (2000, int(people * size)))].mean(1)
    line = f'samples of {size:.0%} of the data: by hand {(drawn > 2 * gain.mean()).mean():.2f}'
    if size < 1:
        numpy.random.seed(0)
        with contextlib.redirect_stdout(io.StringIO()) as text:
            Bootstrap(save_results=False, save_outcomes=False).test(truth, first, second, n_loops=300, sample_size=size)
        line += f', p-value of boostsa for the accuracy {float(re.search("diff acc.*?p < ([0-9.]+)", text.getvalue())[1]):.2f}'
    print(line)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
