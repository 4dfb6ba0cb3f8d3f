#!/usr/bin/env bash
# reliabilipy takes absolute values of the correlations, so questions that have nothing to do with each
# other have a Cronbach's alpha of 0.8.
#
# Packages: reliabiliPy 0.0.36, factor_analyzer 0.5.1, scikit-learn 1.5.2, scipy 1.15.3, pandas 2.2.3,
#   numpy 2.2.6.
# Behaviour: from raw answers it computes alpha, omega and Guttman's lambda of the absolute correlations.
#   Correlations by chance, half of them negative, cancel in alpha; their absolute values add up. The
#   fewer people, the more reliable the noise. A correlation matrix that the caller makes is taken as it
#   is, so the same answers have two alphas.
# Expected: an alpha near 0, as from the variances of the answers and of their sum.
# Why it matters here: how reliable a questionnaire is decides whether its score is used as an outcome,
#   and noise for privacy looks like reliability.
# Instead: reverse the questions that are meant to be reversed, and pass correlations_matrix with
#   is_corr_matrix=True; or pingouin.cronbach_alpha.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.2.3' 'scipy==1.15.3' 'scikit-learn==1.5.2'
env/bin/python -m pip install -q -q --disable-pip-version-check 'reliabilipy==0.0.36' 'factor_analyzer==0.5.1'
cat > expected.txt <<'EXPECTED'
20 questions answered at random
20 people: alpha 0.82, by the variances 0.16; of their correlation matrix 0.05
50 people: alpha 0.73, by the variances 0.12; of their correlation matrix 0.10
200 people: alpha 0.57, by the variances 0.01; of their correlation matrix 0.00
2000 people: alpha 0.26, by the variances 0.03; of their correlation matrix 0.03
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from reliabilipy import reliability_analysis

QUESTIONS = 20
print(f'{QUESTIONS} questions answered at random')
for people in (20, 50, 200, 2000):
    answers = np.random.default_rng(0).normal(size=(people, QUESTIONS))
    raw = reliability_analysis(raw_dataset=pd.DataFrame(answers), is_corr_matrix=False)
    raw.fit()
    correlations = pd.DataFrame(np.corrcoef(answers.T))
    given = reliability_analysis(correlations_matrix=correlations, is_corr_matrix=True)
    given.fit()
    share = answers.var(axis=0, ddof=1).sum() / answers.sum(axis=1).var(ddof=1)
    alpha = QUESTIONS / (QUESTIONS - 1) * (1 - share)
    print(f'{people} people: alpha {raw.alpha_cronbach:.2f}, by the variances {alpha:.2f};',
          f'of their correlation matrix {given.alpha_cronbach:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
