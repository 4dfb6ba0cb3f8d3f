#!/usr/bin/env bash
# ScoringPy adds the weights of a column to each column whose name begins its name.
#
# Packages: ScoringPy 1.1.6, numpy 2.4.6, pandas 2.3.3, scikit-learn 1.9.1, matplotlib 3.11.2,
#   seaborn 0.13.2.
# Behaviour: WoeBinning collects the classes of a feature by the beginning of their name. The value
#   of income is the sum over the classes of income and of income_partner, so that it takes four
#   values in place of two, and a partner's income counts twice. CreditScoring finds coefficients in
#   the same way, by the first feature that fits. A feature whose name begins no other one is right.
# Expected: the value of the class, as in WoE_dict.
# Instead: rename the columns so that none begins another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ScoringPy==1.1.6' 'numpy==2.4.6' 'pandas==2.3.3' 'scikit-learn==1.9.1' 'matplotlib==3.11.2' 'seaborn==0.13.2'
cat > expected.txt <<'EXPECTED'
beside income_partner: low income -0.93 or 0.13 by the partner's, in WoE_dict -0.45
beside income_partner: high income 0.08 or 1.14 by the partner's, in WoE_dict 0.56
beside partner_income: low income -0.45 or -0.45 by the partner's, in WoE_dict -0.45
beside partner_income: high income 0.56 or 0.56 by the partner's, in WoE_dict 0.56
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from ScoringPy.module import WoeAnalysis, WoeBinning

random = np.random.default_rng(0)
income = random.choice(['high', 'low'], 4000)
partner = random.choice(['high', 'low'], 4000)
good = random.random(4000) < 0.5 + 0.2 * (income == 'high') + 0.2 * (partner == 'high')
target = pd.DataFrame({'good': good.astype(int)})
for name in ('income_partner', 'partner_income'):
    table = pd.DataFrame({'income': income, name: partner})
    analysis = WoeAnalysis()
    for column in table:
        analysis.discrete(column, table, target)
    encoded = WoeBinning(analysis.WoE_dict).fit(table).transform(table)
    for own in ('low', 'high'):
        values = [encoded.loc[(table['income'] == own) & (table[name] == other), 'income'].iloc[0] for other in ('low', 'high')]
        print(f"beside {name}: {own} income {values[0]:.2f} or {values[1]:.2f} by the partner's,",
              f"in WoE_dict {analysis.WoE_dict['income:' + own]:.2f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
