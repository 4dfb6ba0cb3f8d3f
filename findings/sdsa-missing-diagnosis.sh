#!/usr/bin/env bash
# sdsa counts a missing diagnosis as a diagnosis, and reports the l-diversity of the groups that it removed.
#
# Packages: sdsa 1.2.1, polars 1.31.0.
# Behaviour: the number of different values of a group includes the missing one. Ten people who have
#   HIV and one whose diagnosis is not recorded have an l of 2 and stay. The l_achieved of the result
#   is taken over the groups that are large enough before the ones below l are removed, so that a
#   table whose groups all keep l is reported with l = 1.
# Expected: an l of 1 for the first table, whose group is then removed, and of 3 for the second one.
# Why it matters here: one person who did not answer makes the diagnosis of ten others public, and the
#   report cannot be used to check the result.
# Instead: fill missing values with the most frequent one of the group before, and count l afterwards.
# Source: Machanavajjhala et al., l-Diversity (2007): l well-represented values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'polars==1.31.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'sdsa==1.2.1'
cat > expected.txt <<'EXPECTED'
one not recorded: l asked for 2, reported 2, 0 rows suppressed; diagnoses of the groups that stay {'north': 1}
a group with one diagnosis: l asked for 3, reported 1, 6 rows suppressed; diagnoses of the groups that stay {'south': 3}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import polars as pl
from sdsa.kanon.enforce import enforce_k

first = pl.DataFrame({'area': ['north'] * 11, 'diagnosis': ['HIV'] * 10 + [None]})
second = pl.DataFrame({'area': ['south'] * 9 + ['west'] * 6,
                       'diagnosis': ['flu', 'asthma', 'gout'] * 3 + ['HIV'] * 6})
for title, table, l in (('one not recorded', first, 2), ('a group with one diagnosis', second, 3)):
    result = enforce_k(table, ['area'], 5, sensitive_columns=['diagnosis'], l=l)
    kept = result.df.drop_nulls().group_by('area').agg(pl.col('diagnosis').n_unique()).sort('area')
    print(f'{title}: l asked for {l}, reported {result.l_achieved["diagnosis"]},',
          f'{result.rows_suppressed} rows suppressed; diagnoses of the groups that stay', dict(kept.rows()))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
