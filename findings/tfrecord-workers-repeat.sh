#!/usr/bin/env bash
# Each worker of a DataLoader reads the whole TFRecord file where tfrecord has no index for it.
#
# Packages: tfrecord 1.14.6, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: TFRecordDataset shares a file among workers if it is given an index; index_path=None,
#   which is allowed and reads the same records in one process, gives all records to each worker.
#   An epoch of 4 workers holds each patient four times. MultiTFRecordDataset does the same. No
#   warning.
# Expected: each record once an epoch, or an error for more than one worker without an index. For
#   private training the sampling rate, and so ε, is computed for one.
# Instead: write an index with tfrecord.tools.tfrecord2idx and pass its path, and count an epoch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tfrecord==1.14.6' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
0 workers, no index: one file 10 patients, each [1] times; two files 20 patients, each [1] times
0 workers, with an index: one file 10 patients, each [1] times; two files 20 patients, each [1] times
2 workers, no index: one file 10 patients, each [2] times; two files 20 patients, each [2] times
2 workers, with an index: one file 10 patients, each [1] times; two files 20 patients, each [1] times
4 workers, no index: one file 10 patients, each [4] times; two files 20 patients, each [4] times
4 workers, with an index: one file 10 patients, each [1] times; two files 20 patients, each [1] times
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from collections import Counter

from tfrecord import TFRecordWriter
from tfrecord.tools.tfrecord2idx import create_index
from tfrecord.torch.dataset import MultiTFRecordDataset, TFRecordDataset
from torch.utils.data import DataLoader

for name, first in (('north', 0), ('south', 10)):
    writer = TFRecordWriter(f'{name}.tfrecord')
    for patient in range(first, first + 10):
        writer.write({'patient': (patient, 'int')})
    writer.close()
    create_index(f'{name}.tfrecord', f'{name}.idx')


def count(dataset, workers):
    batches = DataLoader(dataset, batch_size=2, num_workers=workers)
    times = Counter(patient for batch in batches for patient in batch['patient'].flatten().tolist())
    return f'{len(times)} patients, each {sorted(set(times.values()))} times'


columns = {'patient': 'int'}
for workers in (0, 2, 4):
    for index in (None, '{}.idx'):
        one = TFRecordDataset('north.tfrecord', index and index.format('north'), columns)
        both = MultiTFRecordDataset(
            '{}.tfrecord', index, {'north': 0.5, 'south': 0.5}, columns, infinite=False
        )
        print(f'{workers} workers, {"with an index" if index else "no index"}:',
              f'one file {count(one, workers)}; two files {count(both, workers)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
