#!/usr/bin/env bash
# The confidence interval of abtoolkit adds the quantile of the power to the one of the error: intervals of 95 % have
# a confidence of 99.5 %, and they are wider the more powerful the test is.
#
# Packages: abtoolkit 2.0.1, numpy 2.4.6, scipy 1.17.1.
# Behaviour: estimate_confidence_interval takes z of 1 - alpha / 2 plus z of the power, 2.80 for 0.05 and 0.8, which
#   belongs into the size of a sample. With power=0.5 the interval is right.
# Expected: mean ± 1.96 standard errors for alpha = 0.05, whatever the power of a later test is.
# Why it matters here: a value that a test rejects at 5 % lies within the interval of 95 %.
# Instead: power=0.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'abtoolkit==2.0.1'
cat > expected.txt <<'EXPECTED'
alpha 0.05, power 0.5: mean ± 1.96 standard errors, holds the truth in 95.1% of 20000 samples
alpha 0.05, power 0.8: mean ± 2.80 standard errors, holds the truth in 99.5% of 20000 samples
alpha 0.05, power 0.95: mean ± 3.60 standard errors, holds the truth in 100.0% of 20000 samples
alpha 0.1, power 0.5: mean ± 1.64 standard errors, holds the truth in 90.1% of 20000 samples
alpha 0.1, power 0.8: mean ± 2.49 standard errors, holds the truth in 98.7% of 20000 samples
alpha 0.1, power 0.95: mean ± 3.29 standard errors, holds the truth in 99.9% of 20000 samples
alpha 0.32, power 0.5: mean ± 0.99 standard errors, holds the truth in 67.9% of 20000 samples
alpha 0.32, power 0.8: mean ± 1.84 standard errors, holds the truth in 93.4% of 20000 samples
alpha 0.32, power 0.95: mean ± 2.64 standard errors, holds the truth in 99.2% of 20000 samples
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from abtoolkit.continuous.utils import estimate_confidence_interval

random = np.random.default_rng(0)
samples = random.normal(120, 15, (20_000, 50))
for alpha in (0.05, 0.1, 0.32):
    for power in (0.5, 0.8, 0.95):
        low, high = estimate_confidence_interval(samples.mean(axis=1), 15, 50, alpha, power, 'two-sided')
        print(f'alpha {alpha}, power {power}: mean ± {(high - low)[0] / 2 / (15 / np.sqrt(50)):.2f} standard errors, '
              f'holds the truth in {np.mean((low <= 120) & (120 <= high)):.1%} of 20000 samples')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
