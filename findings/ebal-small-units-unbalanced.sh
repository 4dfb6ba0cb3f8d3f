#!/usr/bin/env bash
# Entropy balancing with ebal leaves variables in small units as they are and says that it has converged: with an income
# in euros, sex is not balanced, and an effect of 1 is 2.9.
#
# Packages: ebal 1.0.0, statsmodels 0.14.4, scikit-learn 1.6.1, scipy 1.15.3, pandas 2.2.3, numpy 1.26.4.
# Behaviour: by default the variables are replaced by their principal components without being scaled, and components
#   with a variance below 1 and below a thousandth of the sum are dropped. A share or a zero and one beside an income in
#   euros is one of them. The largest difference that is returned is the one of the components that are left.
# Expected: the same weights for an income in euros and in thousands, and equal shares of women in both groups.
# Why it matters here: to balance each variable is all that the method is for.
# Instead: PCA=False, or scale the variables.
# Source: Hainmueller (2012), "Entropy balancing for causal effects", Political Analysis 20(1): each specified moment is
#   balanced exactly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ebal==1.0.0' 'statsmodels==0.14.4' 'scikit-learn==1.6.1' 'scipy==1.15.3' 'pandas==2.2.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
income in euros, PCA True: converged True, women 72% of the treated and 35% of the weighted others, effect 2.86
income in euros, PCA False: converged True, women 72% of the treated and 72% of the weighted others, effect 1.05
income in thousands, PCA True: converged True, women 72% of the treated and 72% of the weighted others, effect 1.05
income in thousands, PCA False: converged True, women 72% of the treated and 72% of the weighted others, effect 1.05
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from ebal import ebal_bin

random = np.random.default_rng(0)
people = 2000
woman, income = random.integers(0, 2, people), random.normal(30000, 8000, people)
chosen = 1 / (1 + np.exp(-(1.5 * woman - 1 + (income - 30000) / 16000)))
treated = (random.random(people) < chosen).astype(int)
outcome = 5 * woman + treated + random.normal(size=people)
for unit, name in ((1, 'euros'), (1000, 'thousands')):
    for components in (True, False):
        result = ebal_bin(print_level=-1, PCA=components).ebalance(
            treated, np.column_stack([woman, income / unit]), outcome
        )
        others = treated == 0
        share = np.average(woman[others], weights=result['w'][others])
        print(f"income in {name}, PCA {components}: converged {result['converged']}, women "
              f'{woman[treated == 1].mean():.0%} of the treated and {share:.0%} of the weighted others, '
              f"effect {result['wls'].params[1]:.2f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
