#!/usr/bin/env bash
# dose-response-analyzer ignores the metric by which it should select models.
#
# Packages: dose-response-analyzer 0.1.1, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn
#   1.7.2, matplotlib 3.10.6, seaborn 0.13.2.
# Behaviour: selection_metric is documented as "Metric for model selection ('rmse', 'aic', 'bic',
#   'r2')", is stored, and not read. fit_best_models takes the smallest root mean squared error,
#   which the model with the most parameters always has where models are nested, so the doses that
#   it reports are the ones of an overfitted curve.
# Expected: the model with the smallest AIC or BIC of the summary table.
# Instead: take the row with the smallest AIC from summary_table.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2' 'matplotlib==3.10.6' 'seaborn==0.13.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'dose-response-analyzer==0.1.1'
cat > expected.txt <<'EXPECTED'
selection_metric=rmse, first drug: 4 parameters, AIC -46.6, IC90 311; smallest AIC: 3 parameters, AIC -48.5, IC90 346
selection_metric=rmse, second drug: 4 parameters, AIC -34.7, IC90 248; smallest AIC: 2 parameters, AIC -37.2, IC90 303
selection_metric=rmse, third drug: 4 parameters, AIC -40.2, IC90 174; smallest AIC: 3 parameters, AIC -42.1, IC90 188
selection_metric=aic, first drug: 4 parameters, AIC -46.6, IC90 311; smallest AIC: 3 parameters, AIC -48.5, IC90 346
selection_metric=aic, second drug: 4 parameters, AIC -34.7, IC90 248; smallest AIC: 2 parameters, AIC -37.2, IC90 303
selection_metric=aic, third drug: 4 parameters, AIC -40.2, IC90 174; smallest AIC: 3 parameters, AIC -42.1, IC90 188
selection_metric=bic, first drug: 4 parameters, AIC -46.6, IC90 311; smallest AIC: 3 parameters, AIC -48.5, IC90 346
selection_metric=bic, second drug: 4 parameters, AIC -34.7, IC90 248; smallest AIC: 2 parameters, AIC -37.2, IC90 303
selection_metric=bic, third drug: 4 parameters, AIC -40.2, IC90 174; smallest AIC: 3 parameters, AIC -42.1, IC90 188
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from dra import DoseResponseAnalyzer

parameters = {'model1': 2, 'model2': 3, 'model3': 4, 'model4': 2, 'model5': 3, 'model6': 2}
draw = np.random.RandomState(0)
dose = np.repeat(10.0 ** np.arange(-1, 4), 3)
tables = {}
for drug in ('first', 'second', 'third'):
    response = 1 / (1 + dose / 30) + 0.05 * draw.normal(size=dose.size)
    tables[drug] = pd.DataFrame({'Compound': drug, 'Conc': dose, 'Rab10': response})
for metric in ('rmse', 'aic', 'bic'):
    for drug, table in tables.items():
        with contextlib.redirect_stdout(io.StringIO()):
            analyzer = DoseResponseAnalyzer(selection_metric=metric, enable_custom_models=False)
            result = analyzer.fit_best_models(table)
        chosen, models = result['best_models'].iloc[0], result['summary_table']
        best = models.loc[models['AIC'].idxmin()]
        seen, right = (f'{parameters[row["Model"]]} parameters, AIC {row["AIC"]:.1f}, IC90 {row["IC90"]:.0f}'
                       for row in (chosen, best))
        print(f'selection_metric={metric}, {drug} drug: {seen}; smallest AIC: {right}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
