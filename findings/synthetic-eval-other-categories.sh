#!/usr/bin/env bash
# synthetic-eval gives a synthetic column without any true category the divergence of a perfect one, 0, and one with
# half of them a better one than perfect, -0.29.
#
# Packages: synthetic-eval 0.1.4 (without its pinned dependencies), torch 2.13.0, pandas 3.1.1, numpy 2.4.6,
#   scipy 1.17.1, scikit-learn 1.9.1, tqdm 4.67.1.
# Behaviour: the Kullback-Leibler divergence of a category is summed over the categories that both tables have. The
#   others, which make it infinite, are left out, and what is left is no longer a divergence and can be negative.
# Expected: infinity, or a large value with a small probability in place of 0; never below 0.
# Why it matters here: "lower is better" by its documentation, and generators are ranked by the mean over the columns.
# Instead: count the share of synthetic values that the real table does not have, or add one to each count, as below.
# Source: Kullback and Leibler (1951), "On information and sufficiency", Annals of Mathematical Statistics 22(1), lemma
#   3.1: at least 0, and 0 only for equal distributions.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'pandas==3.1.1' 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'synthetic-eval==0.1.4'
cat > expected.txt <<'EXPECTED'
the same: synthetic-eval 0.00, with one added to each count 0.00
somewhat more gout: synthetic-eval 0.15, with one added to each count 0.14
half of another disease: synthetic-eval -0.29, with one added to each count 1.64
only another disease: synthetic-eval 0.00, with one added to each count 4.46
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from synthetic_eval.metric_stat import KLDivergence

real = pd.DataFrame({'disease': ['asthma'] * 90 + ['gout'] * 10})


def smoothed(synthetic):
    """Return the divergence after adding one to each count."""
    names = sorted({*real['disease'], *synthetic['disease']})
    p, q = ([(table['disease'] == name).sum() + 1 for name in names] for table in (real, synthetic))
    p, q = np.array(p) / sum(p), np.array(q) / sum(q)
    return (q * np.log(q / p)).sum()


for title, values in {
    'the same': ['asthma'] * 90 + ['gout'] * 10,
    'somewhat more gout': ['asthma'] * 70 + ['gout'] * 30,
    'half of another disease': ['asthma'] * 50 + ['plague'] * 50,
    'only another disease': ['plague'] * 100,
}.items():
    synthetic = pd.DataFrame({'disease': values})
    print(f'{title}: synthetic-eval {KLDivergence(real, synthetic, []):.2f}, with one added to each count '
          f'{smoothed(synthetic):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
