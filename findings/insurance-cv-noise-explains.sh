#!/usr/bin/env bash
# Chatterjee's coefficient of insurance-cv is far from 0 for pure chance where the target has equal
# values.
#
# Packages: insurance-cv 0.3.0, scipy 1.17.1, scikit-learn 1.9.1, pandas 2.3.3, numpy 2.4.6, polars
#   1.39.3.
# Behaviour: ChatterjeeSelector gives equal targets their mean rank and divides by n² - 1, which is right
#   where all targets differ. For a target of 0 and 1 with a share p the expected coefficient of an
#   independent variable is 1 - 3 p (1 - p): 0.86 for claims of 5 % of the people, 0.25 for one half. A
#   perfect variable has 1. Each threshold below that keeps noise, and the rarer the claims, the more.
# Expected: "It equals 0 when X and Y are independent", and "For binary or heavily zero-inflated targets
#   (e.g. claim indicator), Xi is well-defined and handles the degenerate distribution correctly". The
#   formula for ties divides by 2 / n times the sum of l (n - l), where l counts the targets that are not
#   smaller.
# Instead: scipy.stats.chatterjeexi(x, y).
# Source: Chatterjee, A New Coefficient of Correlation, 2021, section 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'insurance-cv==0.3.0' 'scipy==1.17.1' \
  'scikit-learn==1.9.1' 'pandas==2.3.3' 'numpy==2.4.6' 'polars==1.39.3'
cat > expected.txt <<'EXPECTED'
amount, always different: noise -0.01, age 0.10; by the formula with ties 0.01 and 0.10; above 0.1: none
claim, 50% of the people: noise 0.27, age 0.40; by the formula with ties 0.00 and 0.18; above 0.1: noise, age
claim, 5% of the people: noise 0.86, age 0.86; by the formula with ties 0.01 and 0.05; above 0.1: noise, age
claim, 1% of the people: noise 0.97, age 0.97; by the formula with ties 0.00 and 0.00; above 0.1: noise, age
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from insurance_cv.feature_selection import ChatterjeeSelector
from scipy.stats import chatterjeexi

random = np.random.default_rng(0)
people = pd.DataFrame({'noise': random.normal(size=20000), 'age': random.uniform(18, 80, 20000)})
risk = np.where(people.age < 25, 3.0, 0.7)
targets = {'amount, always different': risk * random.lognormal(5, 1, 20000)}
for share in (0.5, 0.05, 0.01):
    targets[f'claim, {share:.0%} of the people'] = (random.uniform(size=20000) < share * np.minimum(risk, 1 / share)).astype(int)
for name, target in targets.items():
    selector = ChatterjeeSelector(threshold=0.1).fit(people, target)
    right = [chatterjeexi(people[column], target).statistic for column in people]
    print(f'{name}: noise {selector.scores_["noise"]:.2f}, age {selector.scores_["age"]:.2f}; by the formula with ties',
          f'{abs(right[0]):.2f} and {abs(right[1]):.2f}; above 0.1: {", ".join(selector.selected_features_) or "none"}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
