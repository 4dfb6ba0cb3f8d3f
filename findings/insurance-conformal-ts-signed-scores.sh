#!/usr/bin/env bash
# SPCI of insurance-conformal-ts takes a one-sided quantile of signed scores for both sides: with the Poisson score
# its intervals of 90 % hold 80 % of the values.
#
# Packages: insurance-conformal-ts 0.2.0, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1, scikit-learn 1.9.1, statsmodels 0.14.6.
# Behaviour: PoissonPearsonScore returns (y - mu) / sqrt(mu) with its sign and says that "methods in this library
#   handle this internally". ACI and EnbPI take the absolute values. SPCI regresses the 90 % quantile of the signed
#   scores from 20 values on and goes that far in both directions, so 10 % are missed on each side.
# Expected: 90 % in an interval of 90 %, as with the absolute residuals.
# Why it matters here: the Pearson scores are the ones for claim counts.
# Instead: a score that returns absolute values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'insurance-conformal-ts==0.2.0' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'statsmodels==0.14.6'
cat > expected.txt <<'EXPECTED'
absolute residuals: counts in intervals of 90 %: ACI 90%, SPCI 89%
Pearson: counts in intervals of 90 %: ACI 90%, SPCI 79%
Pearson, absolute: counts in intervals of 90 %: ACI 90%, SPCI 89%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from insurance_conformal_ts import AbsoluteResidualScore, ACI, ConstantForecaster, PoissonPearsonScore, SPCI

TRAINED, FIRST = 60, 50


class AbsolutePearsonScore(PoissonPearsonScore):
    def score(self, y, y_hat, **options):
        return np.abs(super().score(y, y_hat, **options))


counts = np.random.default_rng(0).poisson(100, 260).astype(float)
for name, score in (('absolute residuals', AbsoluteResidualScore()), ('Pearson', PoissonPearsonScore()),
                    ('Pearson, absolute', AbsolutePearsonScore())):
    inside = []
    for method in (ACI(ConstantForecaster(), score=score), SPCI(ConstantForecaster(), score=score, n_lags=2)):
        method.fit(counts[:TRAINED])
        lower, upper = method.predict_interval(counts[TRAINED:], alpha=0.1)
        inside.append(np.mean(((lower <= counts[TRAINED:]) & (counts[TRAINED:] <= upper))[FIRST:]))
    print(f'{name}: counts in intervals of 90 %: ACI {inside[0]:.0%}, SPCI {inside[1]:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
