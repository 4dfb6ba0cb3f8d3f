#!/usr/bin/env bash
# The weight of evidence of lastochka takes a class without defaults for a risky one.
#
# Packages: lastochka 0.0.16, scikit-learn 1.2.2, pandas 1.5.3, numpy 1.23.5, scipy 1.10.1,
#   tqdm 4.66.5.
# Behaviour: weights are ln(share of the non-defaults / share of the defaults), and higher for lower
#   risk. Where a class has no defaults, its share of them, 0, is replaced by 0.5, half of all
#   defaults, and not by a small number. The grade in which nobody of 300 defaulted has a weight of
#   -0.38, below the grade with 5 % defaults, 1.00, and near the one with 20 %, -0.56.
# Expected: the highest weight for the safest grade.
# Instead: merge classes without defaults with a neighbour before the fit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lastochka==0.0.16' 'scikit-learn==1.2.2' 'pandas==1.5.3' 'numpy==1.23.5' 'scipy==1.10.1' 'tqdm==4.66.5'
cat > expected.txt <<'EXPECTED'
0 of 300 default in grade A: weight -0.38, by hand, with half a default 4.45
15 of 300 default in grade B: weight 1.00, by hand 1.00
60 of 300 default in grade C: weight -0.56, by hand -0.56
50 of 100 default in grade D: weight -1.95, by hand -1.95
1 of 300 default in grade A: weight 3.76, by hand 3.76
15 of 300 default in grade B: weight 1.01, by hand 1.01
60 of 300 default in grade C: weight -0.55, by hand -0.55
50 of 100 default in grade D: weight -1.94, by hand -1.94
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from lastochka import LastochkaTransformer

people = {'A': (300, 0), 'B': (300, 15), 'C': (300, 60), 'D': (100, 50)}
for one_default in (False, True):
    if one_default:
        people['A'] = (300, 1)
    grade = np.repeat(list(people), [n for n, _ in people.values()])
    default = np.concatenate([np.arange(n) < bad for n, bad in people.values()]).astype(int)
    table = pd.DataFrame({'grade': grade})
    weight = LastochkaTransformer().fit(table, default).transform(table)['grade'].to_numpy()
    for name, (n, bad) in people.items():
        by_hand = np.log((n - bad) / (default == 0).sum() / max(bad, 0.5) * default.sum())
        print(f'{bad} of {n} default in grade {name}: weight {weight[grade == name][0]:.2f},',
              f'by hand{", with half a default" if bad == 0 else ""} {by_hand:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
