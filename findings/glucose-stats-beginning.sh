#!/usr/bin/env bash
# glucose-stats cannot tell the events of a recording that begins within one, and counts short ones.
#
# Packages: glucose-stats 0.0.7, pandas 2.2.3, numpy 2.2.6.
# Behaviour: an event has to last 15 minutes. The function pairs the first start with the first end,
#   and a recording that begins below 70 mg/dL has an end without a start: each later start is paired
#   with the end before it, and an AssertionError says that the event list is wrong. Without later
#   events the one at the beginning is kept, however short it is.
# Expected: the events of the rest of the recording, and no event of five minutes.
# Why it matters here: sensors begin at any time, and exports are cut at midnight.
# Instead: put one reading in range before the first one, and drop it afterwards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'glucose-stats==0.0.7'
cat > expected.txt <<'EXPECTED'
hypo, in range, 30 minutes low: 7 readings in events
hyper, in range, 30 minutes low: 7 readings in events
hypo, in range, one reading low: 0 readings in events
hyper, in range, one reading low: 0 readings in events
hypo, one reading low at the beginning: 1 readings in events
hyper, one reading low at the beginning: 1 readings in events
hypo, low at the beginning, later 30 minutes low: Oops, there is something wrong with your event list. Start 202
hyper, low at the beginning, later 30 minutes low: Oops, there is something wrong with your event list. Start 202
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from glucosestats.stats import hyper, hypo


def series(*parts):
    values = [value for value, count in parts for _ in range(count)]
    return pd.Series(values, pd.date_range('2026-03-01', periods=len(values), freq='5min'), dtype=float)


for title, parts in (('in range, 30 minutes low', [(110, 6), (60, 7), (110, 6)]),
                     ('in range, one reading low', [(110, 6), (60, 1), (110, 6)]),
                     ('one reading low at the beginning', [(60, 1), (110, 12)]),
                     ('low at the beginning, later 30 minutes low', [(60, 4), (110, 6), (60, 7), (110, 6)])):
    for name, function, glucose in (('hypo', hypo, series(*parts)),
                                    ('hyper', hyper, series(*[(250 - value, count) for value, count in parts]))):
        try:
            print(f'{name}, {title}: {int(function(glucose).sum())} readings in events')
        except AssertionError as error:
            print(f'{name}, {title}: {str(error)[:62]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
