#!/usr/bin/env bash
# The Gaussian audit of jax-privacy finds a large ε, at 95 % confidence, where nothing leaks.
#
# Packages: jax-privacy 2.0.0, jax 0.10.2, dp-accounting 0.6.0, scipy 1.17.1, numpy 2.4.6.
# Behaviour: epsilon_from_gdp subtracts the normal quantiles of upper bounds of the two error rates
#   and takes the absolute value. Both rates at their upper bounds look worse than guessing, so the
#   slack of the bounds is read as a leak. Scores from one distribution for all canaries give an
#   ε above 0 in nearly every audit, and fewer canaries give a larger ε.
# Expected: 0 in at least 95 of 100 audits, and less from fewer canaries.
# Instead: epsilon_clopper_pearson or epsilon_one_run of the same class.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'jax-privacy==2.0.0' 'jax==0.10.2' 'jaxlib==0.10.2' 'dp-accounting==0.6.0' 'scipy==1.17.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
20 + 20 canaries without a leak, of 100 audits above 0: gdp 95, clopper_pearson 0; median gdp 10.3
100 + 100 canaries without a leak, of 100 audits above 0: gdp 99, clopper_pearson 0; median gdp 7.6
1000 + 1000 canaries without a leak, of 100 audits above 0: gdp 100, clopper_pearson 0; median gdp 4.1
EXPECTED
env/bin/python - > seen.txt <<'PYTHON'
import numpy as np
from jax_privacy.auditing import CanaryScoreAuditor

for count in (20, 100, 1000):
    random = np.random.default_rng(0)
    gdp, exact = [], []
    for _ in range(100):
        audit = CanaryScoreAuditor(random.normal(size=count), random.normal(size=count))
        gdp.append(audit.epsilon_from_gdp(significance=0.05, delta=1e-5))
        exact.append(audit.epsilon_clopper_pearson(significance=0.05, delta=1e-5))
    above = [sum(epsilon > 0 for epsilon in audits) for audits in (gdp, exact)]
    print(
        f'{count} + {count} canaries without a leak, of 100 audits above 0:',
        f'gdp {above[0]}, clopper_pearson {above[1]}; median gdp {np.median(gdp):.1f}',
    )
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
