#!/usr/bin/env bash
# The average equality gap of biasmetrics has the opposite sign of its description: a group that the model
# gives higher scores has -0.5, which it explains as scores that are too low, with false negatives.
#
# Packages: biasmetrics 0.5.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, scikit-learn 1.9.1, seaborn 0.13.2.
# Behaviour: AEG is 0.5 minus the share of pairs in which the member of the group has the higher score, as
#   scipy's U statistic counts them since version 1.7. Before that mannwhitneyu returned the smaller of the two
#   U statistics, so that the gap was never negative.
# Expected: the reverse: its docstring says that positive scores are a shift to the right, and false
#   positives, and negative ones a shift to the left.
# Why it matters here: it tells a reader that the group that is favoured is at a disadvantage.
# Instead: minus its result.
# Source: Borkan and others, Nuanced Metrics for Measuring Unintended Bias, WWW 2019 companion, which it names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'matplotlib==3.11.2' 'seaborn==0.13.2'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'biasmetrics==0.5.0'
cat > expected.txt <<'EXPECTED'
group with no shift: negative gap 0.01, by its description -0.01; false positives 0.30 in the group, 0.33 outside
group with higher scores: negative gap -0.42, by its description 0.42; false positives 0.94 in the group, 0.30 outside
group with much higher scores: negative gap -0.50, by its description 0.50; false positives 1.00 in the group, 0.32 outside
group with lower scores: negative gap 0.42, by its description -0.42; false positives 0.00 in the group, 0.32 outside
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from biasMetrics.metrics import AEG

random = np.random.default_rng(0)
group = np.arange(4000) % 2
truth = (np.arange(4000) // 2) % 2
for name, shift in (('no shift', 0.0), ('higher scores', 2.0), ('much higher scores', 9.0), ('lower scores', -2.0)):
    scores = truth + shift * group + random.normal(0, 1, 4000)
    scores = (scores - scores.min()) / (scores.max() - scores.min())
    gaps = AEG()
    gaps.score(pd.DataFrame({'target': truth}), pd.DataFrame({'probs': scores}), pd.DataFrame({'group': group}), output=False)
    threshold = np.median(scores[group == 0])
    rates = [((scores > threshold) & (truth == 0) & (group == g)).sum() / ((truth == 0) & (group == g)).sum() for g in (1, 0)]
    higher = (scores[(truth == 0) & (group == 1)][:, None] > scores[(truth == 0) & (group == 0)][None]).mean()
    print(f'group with {name}: negative gap {gaps.output_df.loc["group", "Negative AEG"]:.2f}, '
          f'by its description {higher - 0.5:.2f}; false positives {rates[0]:.2f} in the group, {rates[1]:.2f} outside')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
