#!/usr/bin/env bash
# The mean rank of cute_ranking improves where a search finds nothing: it counts as rank 0, before the first.
#
# Packages: cute-ranking 0.0.3, numpy 1.26.4.
# Behaviour: mean_rank is documented as the mean rank of the first relevant item, where the first element
#   has rank 1. A list without a relevant item adds 0, the best rank there is, so a system that finds
#   nothing has a mean rank of 0. mean_reciprocal_rank beside it counts such a list as 0, its worst value.
# Expected: at least the length of the list plus one, or no mean.
# Instead: leave out lists without a relevant item, and count them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'cute-ranking==0.0.3'
cat > expected.txt <<'EXPECTED'
three searches: mean rank 2.00, mean reciprocal rank 0.61, found 100%
the last one finds nothing: mean rank 1.00, mean reciprocal rank 0.50, found 67%
two find nothing: mean rank 0.67, mean reciprocal rank 0.17, found 33%
all find nothing: mean rank 0.00, mean reciprocal rank 0.00, found 0%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from cute_ranking.core import hit_rate_at_k, mean_rank, mean_reciprocal_rank

found = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
nothing = [0, 0, 0, 0]
for name, lists in (('three searches', found), ('the last one finds nothing', [*found[:2], nothing]),
                    ('two find nothing', [found[0], nothing, nothing]), ('all find nothing', 3 * [nothing])):
    print(f'{name}: mean rank {mean_rank(lists):.2f}, mean reciprocal rank {mean_reciprocal_rank(lists):.2f}, '
          f'found {hit_rate_at_k(lists, 4):.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
