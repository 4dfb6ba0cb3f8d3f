#!/usr/bin/env bash
# The median of weightedstats sorts the list that it is given, so that each weight then belongs to another
# value: the weighted median of the same data is 20 before and 30 after a median is printed.
#
# Packages: weightedstats 0.4.1.
# Behaviour: median(data) sorts data in place. weighted_median and weighted_mean pair data with weights by
#   position, so they are right before and wrong after it, in a program that only reads its numbers.
#   weighted_median(data) without weights calls median and sorts, too.
# Expected: a function that returns a number does not change its arguments.
# Why it matters here: a report of both medians side by side is wrong or right by their order.
# Instead: statistics.median, or median(list(data)).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'weightedstats==0.4.1'
cat > expected.txt <<'EXPECTED'
incomes [30, 10, 20], households [1, 1, 8]: weighted mean 20, weighted median 20
median of statistics 20 and the list [30, 10, 20]
median of weightedstats 20 and the list [10, 20, 30]
weighted mean 27, weighted median 30
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import statistics

import weightedstats

incomes, households = [30, 10, 20], [1, 1, 8]
print(f'incomes {incomes}, households {households}: weighted mean '
      f'{weightedstats.weighted_mean(incomes, households):.0f}, weighted median '
      f'{weightedstats.weighted_median(incomes, households)}')
print('median of statistics', statistics.median(incomes), 'and the list', incomes)
print('median of weightedstats', weightedstats.median(incomes), 'and the list', incomes)
print(f'weighted mean {weightedstats.weighted_mean(incomes, households):.0f}, weighted median '
      f'{weightedstats.weighted_median(incomes, households)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
