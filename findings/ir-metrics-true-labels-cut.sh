#!/usr/bin/env bash
# The scores of ir-metrics at k depend on the order of the relevant items.
#
# Packages: ir-metrics 0.1.6, numpy 2.4.6, pandas 2.3.3.
# Behaviour: k is documented to keep "the highest k scores in the ranking". The function that prepares the
#   arguments cuts the list of the true labels after k as well. Relevant items from place k + 1 on do not
#   count where they are found, and are not missed where they are not. The documentation of ndcg says that
#   the order of the true labels does not matter.
# Expected: the same values for each order; 0.5 for a recall of two of four items.
# Instead: cut the predictions before the call and leave k out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'ir-metrics==0.1.6'
cat > expected.txt <<'EXPECTED'
relevant [1, 2, 3, 4], found [3, 4, 90, 91]
  k=2: recall 0.00, precision 0.00, reciprocal rank 0.00
  the first two without k: recall 0.50, precision 1.00, reciprocal rank 1.00
relevant [3, 4, 1, 2], found [3, 4, 90, 91]
  k=2: recall 1.00, precision 1.00, reciprocal rank 1.00
  the first two without k: recall 0.50, precision 1.00, reciprocal rank 1.00
relevant [1, 3, 2, 4], found [3, 4, 90, 91]
  k=2: recall 0.50, precision 0.50, reciprocal rank 1.00
  the first two without k: recall 0.50, precision 1.00, reciprocal rank 1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from irmetrics.topk import precision, recall, rr

found = [3, 4, 90, 91]
for relevant in ([1, 2, 3, 4], [3, 4, 1, 2], [1, 3, 2, 4]):
    print(f'relevant {relevant}, found {found}')
    for name, items, k in (('k=2', found, 2), ('the first two without k', found[:2], None)):
        print(f'  {name}: recall {recall(relevant, items, k=k):.2f}, precision {precision(relevant, items, k=k):.2f}, '
              f'reciprocal rank {rr(relevant, items, k=k):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
