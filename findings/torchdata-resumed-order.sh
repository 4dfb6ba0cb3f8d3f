#!/usr/bin/env bash
# torchdata resumes an epoch in another order with the random samplers of torch, so that records are
# repeated and others are left out.
#
# Packages: torchdata 0.11.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: a saved state holds the number of the records that were taken. A torch sampler with a seeded
#   generator is drawn anew when the state is loaded, so the first permutation of the generator stands
#   where that of the epoch was. From the second epoch on, StatefulDataLoader and
#   torchdata.nodes.SamplerWrapper skip the taken number in another permutation, without a message.
#   StatefulDataLoader(shuffle=True) is right: its own sampler saves the generator.
# Expected: the rest of the epoch, each record once, or an error for a sampler without a state.
# Why it matters here: an account by epochs assumes each record once an epoch; here some come twice.
# Instead: shuffle=True, or RandomSampler of torchdata.stateful_dataloader.sampler.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torchdata==0.11.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
StatefulDataLoader, shuffle=True: taken [6, 7, 9, 5], resumed [0, 4, 3, 2, 1, 8], twice [], never []
StatefulDataLoader, RandomSampler: taken [4, 0, 8, 5], resumed [3, 9, 0, 8, 6, 2], twice [0, 8], never [1, 7]
StatefulDataLoader, SubsetRandomSampler: taken [3, 9, 4, 2], resumed [3, 9, 0, 8, 6, 2], twice [2, 3, 9], never [1, 5, 7]
StatefulDataLoader, WeightedRandomSampler: taken [1, 7, 2, 6], resumed [8, 4, 1, 5, 3, 0], twice [1], never [9]
SamplerWrapper, RandomSampler: taken [4, 0, 8, 5], resumed [3, 9, 0, 8, 6, 2], twice [0, 8], never [1, 7]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.nodes import Loader, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

records = list(range(10))


def seeded():
    return torch.Generator().manual_seed(0)


def stateful(sampler):
    return StatefulDataLoader(records, batch_size=None, sampler=sampler)


def weighted():
    return WeightedRandomSampler([1.0] * 10, 10, replacement=False, generator=seeded())


for name, make in (
    ('StatefulDataLoader, shuffle=True',
     lambda: StatefulDataLoader(records, batch_size=1, shuffle=True, generator=seeded())),
    ('StatefulDataLoader, RandomSampler', lambda: stateful(RandomSampler(records, generator=seeded()))),
    ('StatefulDataLoader, SubsetRandomSampler',
     lambda: stateful(SubsetRandomSampler(records, generator=seeded()))),
    ('StatefulDataLoader, WeightedRandomSampler', lambda: stateful(weighted())),
    ('SamplerWrapper, RandomSampler',
     lambda: Loader(SamplerWrapper(RandomSampler(records, generator=seeded())))),
):
    loader = make()
    list(loader)  # the first epoch
    epoch = iter(loader)
    taken = [int(next(epoch)) for _ in range(4)]
    state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    resumed = [int(record) for record in loader]
    print(f'{name}: taken {taken}, resumed {resumed}, twice {sorted(set(taken) & set(resumed))},',
          f'never {sorted(set(records) - set(taken) - set(resumed))}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
