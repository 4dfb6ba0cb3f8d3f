#!/usr/bin/env bash
# The 95 % bootstrap intervals of concentrationMetrics have a confidence of 90 %: the whole error is taken at
# each end.
#
# Packages: concentrationMetrics 0.6.0, numpy 2.4.6, pandas 2.3.3.
# Behaviour: compute with ci=0.95 returns the places 0.05 and 0.95 of the sorted samples.
# Expected: the places 0.025 and 0.975, as for any interval with 95 % between its ends. With ci=0.5 the two
#   ends are the same number, and with ci=0.3 the lower end is the larger one.
# Why it matters here: the interval is documented by its confidence, and twice as many values are outside.
# Instead: pass (1 + ci) / 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'concentrationMetrics==0.6.0'
cat > expected.txt <<'EXPECTED'
ci=0.95: 0.241 to 0.277, 89% of other samples are between; by quantiles 0.237 to 0.281
ci=0.8: 0.250 to 0.268, 59% of other samples are between; by quantiles 0.245 to 0.273
ci=0.5: 0.259 to 0.259, 0% of other samples are between; by quantiles 0.252 to 0.267
ci=0.3: 0.265 to 0.254, 0% of other samples are between; by quantiles 0.255 to 0.263
ci=0.975: 0.237 to 0.280
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import concentrationMetrics
import numpy as np

index = concentrationMetrics.Index()
random = np.random.default_rng(0)
np.random.seed(0)
values = random.lognormal(0, 0.5, 200)
repeats = np.sort([index.gini(np.random.choice(values, 200)) for repeat in range(4000)])
for level in (0.95, 0.8, 0.5, 0.3):
    low, middle, high = index.compute(values, index='gini', ci=level, samples=4000)
    between = np.mean((repeats >= low) & (repeats <= high))
    right = np.quantile(repeats, [(1 - level) / 2, (1 + level) / 2])
    print(f'ci={level}: {low:.3f} to {high:.3f}, {between:.0%} of other samples are between; '
          f'by quantiles {right[0]:.3f} to {right[1]:.3f}')
low, middle, high = index.compute(values, index='gini', ci=0.975, samples=4000)
print(f'ci=0.975: {low:.3f} to {high:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
