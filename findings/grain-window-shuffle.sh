#!/usr/bin/env bash
# grain's shuffle of windows repeats records and leaves others out where the window does not divide the
# number of records.
#
# Packages: grain 0.2.18, numpy 2.4.6.
# Behaviour: WindowShuffleMapDataset permutes the last window as if it were full. Positions beyond the
#   end wrap to the first records, so these come twice, and as many of the last records never come: 17
#   of 1,000 with windows of 128 and seed 1, in each epoch the same. The length is right, and nothing is
#   said. WindowShuffleIterDataset of the same package shuffles the shorter window.
# Expected: each record once in an epoch, as from shuffle() and from the iterable of the same name.
# Why it matters here: a person who comes twice in an epoch has twice the influence that is accounted.
# Instead: MapDataset.shuffle, or WindowShuffleIterDataset, or a window that divides the records.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'grain==0.2.18' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
10 records, window 4, shuffle: 10 records, twice 0, never 0
10 records, window 4, WindowShuffleIterDataset: 10 records, twice 0, never 0
10 records, window 4, WindowShuffleMapDataset: 10 records, twice 2, never 2
1000 records, window 125, shuffle: 1000 records, twice 0, never 0
1000 records, window 125, WindowShuffleIterDataset: 1000 records, twice 0, never 0
1000 records, window 125, WindowShuffleMapDataset: 1000 records, twice 0, never 0
1000 records, window 128, shuffle: 1000 records, twice 0, never 0
1000 records, window 128, WindowShuffleIterDataset: 1000 records, twice 0, never 0
1000 records, window 128, WindowShuffleMapDataset: 1000 records, twice 17, never 17
1 2 3 0 4 7 5 6 0 1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from collections import Counter

from grain import MapDataset
from grain.experimental import WindowShuffleIterDataset, WindowShuffleMapDataset


def describe(name, records, count):
    seen = Counter(int(record) for record in records)
    print(f'{name}: {sum(seen.values())} records, twice {sum(times > 1 for times in seen.values())},',
          f'never {count - len(seen)}')


for count, window in ((10, 4), (1000, 125), (1000, 128)):
    source = MapDataset.source(list(range(count)))
    name = f'{count} records, window {window}'
    describe(f'{name}, shuffle', source.seed(1).shuffle(), count)
    describe(f'{name}, WindowShuffleIterDataset',
             WindowShuffleIterDataset(source.to_iter_dataset(), window_size=window, seed=1), count)
    describe(f'{name}, WindowShuffleMapDataset',
             WindowShuffleMapDataset(source, window_size=window, seed=1), count)
source = MapDataset.source(list(range(10)))
print(*WindowShuffleMapDataset(source, window_size=4, seed=1))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
