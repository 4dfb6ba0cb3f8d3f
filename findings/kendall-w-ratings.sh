#!/usr/bin/env bash
# The concordance of kendall-w, documented to be between 0 and 1 for lists of ratings, is 0.09 for three doctors
# who give each patient the same grade, and 71 for three who give the same marks.
#
# Packages: kendall-w 1.0.0.
# Behaviour: compute_w puts the ratings into the formula for ranks as they are. Marks up to 100 make W as
#   large as they like, and grades that several patients share make it small, since there is no correction
#   for ties either. Nothing warns; a comment in the source says that a check for ranks is to be done.
# Expected: W between 0 and 1, as its docstring says, and 1 for raters who agree, as it says too: the ratings
#   of each rater ranked, equal ones with their mean rank, and the sum of t³ - t for t equal ones subtracted.
# Instead: scipy.stats.rankdata for each rater, and the corrected formula below.
# Source: Kendall and Babington Smith, The problem of m rankings, Ann. Math. Stat. 10, 1939.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' 'kendall-w==1.0.0'
cat > expected.txt <<'EXPECTED'
ranks, three raters agree: kendall-w 1.00, by hand 1.00
grades 1 and 2, three raters agree: kendall-w 0.09, by hand 1.00
marks of 100, three raters agree: kendall-w 71.43, by hand 1.00
marks of 100, one rater reversed: kendall-w 9.21, by hand 0.11
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from kendall_w import compute_w
from scipy.stats import rankdata


def by_hand(ratings):
    ranks = np.array([rankdata(rater) for rater in np.array(ratings).T]).T
    n, m = ranks.shape
    ties = sum((counts ** 3 - counts).sum() for counts in
               (np.unique(rater, return_counts=True)[1] for rater in ranks.T))
    spread = ((ranks.sum(axis=1) - m * (n + 1) / 2) ** 2).sum()
    return 12 * spread / (m ** 2 * (n ** 3 - n) - m * ties)


examples = {
    'ranks, three raters agree': [[1] * 3, [2] * 3, [3] * 3, [4] * 3, [5] * 3, [6] * 3],
    'grades 1 and 2, three raters agree': [[1] * 3, [1] * 3, [1] * 3, [2] * 3, [2] * 3, [2] * 3],
    'marks of 100, three raters agree': [[50] * 3, [60] * 3, [65] * 3, [70] * 3, [80] * 3, [95] * 3],
    'marks of 100, one rater reversed': [[50, 50, 95], [60, 60, 80], [65, 65, 70], [70, 70, 65], [80, 80, 60],
                                         [95, 95, 50]],
}
for name, ratings in examples.items():
    print(f'{name}: kendall-w {compute_w(ratings):.2f}, by hand {by_hand(ratings):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
