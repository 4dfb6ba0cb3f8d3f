#!/usr/bin/env bash
# The revenue that bayes-ab expects from log-normal data is a hundred times too large, since it takes the
# mean square of the logarithms for their variance: 545 in place of 5.4 a person, and 10**20 cents.
#
# Packages: bayes-ab 0.4.3, numpy 1.26.4, scipy 1.17.1.
# Behaviour: DeltaLognormalDataTest passes the sum of the squared logarithms where the squares around their
#   mean belong. For logarithms around 3 with a standard deviation of 0.5 the variance becomes 9.3 in place
#   of 0.25, and the expected value is exp(mean + variance / 2). In cents in place of euros all is worse.
#   Its averages are right; the chances and the expected loss are those of the drawn values.
# Expected: draws around the averages that it reports, and the same chances in euros and cents.
# Why it matters here: an expected loss of 293 a person for an average of 5 is the number that decides when
#   to end an experiment.
# Instead: draws by hand, as below; NormalDataTest on the logarithms has an error of its own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bayes-ab==0.4.3' 'numpy==1.26.4' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
euros, A: average 5.44, drawn by hand 5.5, drawn by bayes-ab 545, expected loss 293
euros, B: average 6.93, drawn by hand 7.02, drawn by bayes-ab 704, expected loss 133
cents, A: average 544, drawn by hand 550, drawn by bayes-ab 8.22e+19, expected loss 9.3e+18
cents, B: average 693, drawn by hand 702, drawn by bayes-ab 9.32e+18, expected loss 8.22e+19
hundreds of euros, A: average 0.0544, drawn by hand 0.0549, drawn by bayes-ab 0.226, expected loss 0.0607
hundreds of euros, B: average 0.0693, drawn by hand 0.0702, drawn by bayes-ab 0.277, expected loss 0.00987
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
from bayes_ab.experiments import DeltaLognormalDataTest

random = np.random.default_rng(0)
revenues = {name: np.where(random.random(500) < 0.3, np.exp(random.normal(3, 0.5, 500)), 0) for name in 'AB'}


def draw_by_hand(values, draws=20_000):
    logarithms = np.log(values[values > 0])
    number = len(logarithms)
    shares = random.beta(1 + number, 1 + len(values) - number, draws)
    variances = logarithms.var() * number / random.chisquare(number - 1, draws)
    return shares * np.exp(random.normal(logarithms.mean(), np.sqrt(variances / number)) + variances / 2)


for unit, factor in (('euros', 1), ('cents', 100), ('hundreds of euros', 0.01)):
    test = DeltaLognormalDataTest()
    for name, values in revenues.items():
        test.add_variant_data(name, (factor * values).tolist())
    with contextlib.redirect_stdout(io.StringIO()):
        results = test.evaluate(seed=1)
    for result, values in zip(results, revenues.values()):
        drawn = test.data[result['variant']]['samples']
        print(f'{unit}, {result["variant"]}: average {result["avg_values"]:.3g}, drawn by hand '
              f'{draw_by_hand(factor * values).mean():.3g}, drawn by bayes-ab {np.mean(drawn):.3g}, '
              f'expected loss {result["expected_loss"]:.3g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
