#!/usr/bin/env bash
# afrikana-risk finds a perfect separation in a score that is the same for everybody.
#
# Packages: afrikana-risk 1.0.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: monitor_period sorts by the score and takes the largest distance of the two cumulative
#   shares at any row, also between rows of one score. A constant score has a statistic of 1 in a
#   table with the defaults on top, beside an AUC of 0.5, and another one after each shuffle. A
#   score of a few classes is better than it is for the same reason.
# Expected: the distance at the end of each score, 0 for a constant one.
# Instead: scipy.stats.ks_2samp of the scores of both groups.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'afrikana-risk==1.0.0'
cat > expected.txt <<'EXPECTED'
one score for all, defaults first: KS 1.00, by hand 0.00, AUC 0.50
one score for all, defaults last: KS 1.00, by hand 0.00, AUC 0.50
one score for all, shuffled: KS 0.39, by hand 0.00, AUC 0.50
two classes, defaults first: KS 0.42, by hand 0.25, AUC 0.62
two classes, defaults last: KS 0.75, by hand 0.25, AUC 0.62
two classes, shuffled: KS 0.34, by hand 0.25, AUC 0.62
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from afrikana_risk.monitoring.monitor import ModelMonitor
from scipy.stats import ks_2samp

classes = {'one score for all': (0.3, 0.3), 'two classes': (0.6, 0.3)}
for name, (of_defaults, of_others) in classes.items():
    rows = [(of_defaults, 1)] * 10 + [(0.3, 1)] * 10 + [(of_others, 0)] * 60 + [(of_defaults, 0)] * 20
    table = pd.DataFrame(rows, columns=['score', 'default'])
    right = ks_2samp(table.loc[table['default'] == 1, 'score'], table.loc[table['default'] == 0, 'score']).statistic
    orders = {
        'defaults first': table.sort_values('default', ascending=False, kind='stable'),
        'defaults last': table.sort_values('default', kind='stable'),
        'shuffled': table.sample(frac=1, random_state=1),
    }
    for order, rows in orders.items():
        monitor = ModelMonitor()
        monitor.set_reference(rows)
        report = monitor.monitor_period(rows, 'June', target_col='default')
        print(f"{name}, {order}: KS {report['ks']:.2f}, by hand {right:.2f}, AUC {report['auc']:.2f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
