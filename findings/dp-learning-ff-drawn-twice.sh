#!/usr/bin/env bash
# The private prototypes of dp-learning-ff draw people with repetition and account for a sample without:
# with half of the people in a step the true ε is 13.6 where 3.5 is stated.
#
# Packages: dp-learning-ff 0.0.8, autodp 0.2.3.1, torch 2.13.0, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: CoinpressPrototyping calibrates its noise with AmplificationBySampling of autodp, for which
#   each person is in the sample once with the probability p_sampling. The sampler draws a number of
#   copies of each person from a Poisson distribution with that mean: with 0.5, 9 % of the people are in
#   the mean twice or more, and move it by a multiple of the sensitivity.
# Expected: one draw a person, with which the stated ε is exact.
# Instead: p_sampling=1.
# Source: the divergence of one step at δ = 1e-5 is integrated below; for one draw it is autodp's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dp-learning-ff==0.0.8' 'autodp==0.2.3.1' \
  'torch==2.13.0' 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1'
cat > expected.txt <<'EXPECTED'
of 1000 people with p_sampling 0.5, 604 are in the mean 0 times, 307 are in the mean 1 times, 71 are in the mean 2 times, 17 are in the mean 3 times, 1 are in the mean 4 times
p_sampling 0.5, one step of 0.5: stated ε 3.53, one draw a person 3.53, the draws of the sampler 13.58
p_sampling 0.1, one step of 0.5: stated ε 1.68, one draw a person 1.68, the draws of the sampler 2.95
p_sampling 0.1, one step of 2.0: stated ε 6.58, one draw a person 6.58, the draws of the sampler 18.62
EXPECTED
env/bin/python -W ignore - > seen.txt 2> /dev/null <<'PYTHON'
from math import exp, factorial

import numpy
from dp_learning_ff import give_private_prototypes
from dp_learning_ff.mechanisms import CoinpressGM
from scipy.stats import norm

people = 1000
prototype = give_private_prototypes(numpy.eye(people), numpy.zeros(people), [1e14], subsampling=0.5)[0]
copies = numpy.round(prototype / prototype[prototype > 1e-5].min()).astype(int)
print('of 1000 people with p_sampling 0.5,', ', '.join(f'{(copies == count).sum()} are in the mean {count} times'
                                                       for count in range(copies.max() + 1)))


def epsilon(shares, noise, delta=1e-5):
    """Find the ε at which a person with these shares of 0, 1, 2, ... copies has the divergence δ."""
    places = numpy.linspace(-12 * noise, 12 * noise + 25, 200001)
    width = places[1] - places[0]
    inside = sum(share * norm.pdf(places, count, noise) for count, share in enumerate(shares))
    outside = norm.pdf(places, 0, noise)
    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        worst = max(numpy.maximum(first - numpy.exp(middle) * second, 0).sum() * width
                    for first, second in ((inside, outside), (outside, inside)))
        low, high = (middle, high) if worst > delta else (low, middle)
    return high


for rate, cost in ((0.5, 0.5), (0.1, 0.5), (0.1, 2.0)):
    stated = CoinpressGM([cost], p_sampling=rate).get_approxDP(1e-5)
    noise = (2 * cost) ** -0.5
    poisson = [exp(-rate) * rate**count / factorial(count) for count in range(20)]
    print(f'p_sampling {rate}, one step of {cost}: stated ε {stated:.2f}, one draw a person '
          f'{epsilon([1 - rate, rate], noise):.2f}, the draws of the sampler {epsilon(poisson, noise):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
