"""Two worlds: a run on data and one on neighbouring data, with everything else frozen, and all that
can be seen of each.

The release is replaced by one that ignores the clipped sum; the clock, the keys of the operating
system and the free memory stand still, so that the same data twice differ in nothing.
"""

import gc
import logging
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpkfc.config import PrivacyConfig
from dpkfc.curvature import GEP, KFAC, NGD, FeatureNoise, TokenNoise
from dpkfc.postprocess import AdamBC, DiSK, WeightEMA
from dpkfc.privacy.mechanism import Released
from dpkfc.session import Session
from tests.audit.walk import (
    Found,
    collect_values,
    files_of,
    find_differences,
    fingerprint,
    process_state,
    tensors_alive,
)
from tests.mutation_cases import kfac
from tests.sessions import cross_entropy as loss_fn

N, B, WIDTH, STEPS = 40, 16, 6, 5
VICTIM = 13  # drawn in the first step of every world, as is the unit that it belongs to


def only_what_is_new():
    gc.collect()
    gc.freeze()


# -- a world ---------------------------------------------------------------------------------------


def blind(clipped, plan, noise, ledger, step):
    """A release of the right shape that does not look at the sum."""
    number = ledger.charge(step, plan.event, plan.noise_multiplier, plan.stddev, plan.sensitivity)
    unit, generator = plan.stddev / plan.expected_batch_size, torch.Generator().manual_seed(step)
    gradients = {
        name: (torch.randn(x.shape, generator=generator, dtype=torch.float64) * unit).to(x.dtype)
        for name, x in clipped.tensors.items()
    }
    return Released(gradients=gradients, noise_variance=unit**2, step=step, release=number)


def fixed_keys():
    """`draw_key` with the same keys in every world, in order."""
    # With this seed the victim is in the first and in the last batch of a session.
    generator = np.random.default_rng(161)
    return lambda: generator.bytes(32)


def freeze(patched, victim=None):
    """Replace the release, and stop what differs between any two runs. Without its victim a world
    draws the same others.

    Returns:
        Fingerprints of the clipped sums, which the tests see and no run does.
    """
    sums = []

    def release_and_note(clipped, *rest):
        sums.append(tuple(fingerprint(x) for x in clipped.tensors.values()))
        return blind(clipped, *rest)

    patched.setattr("dpkfc.release_pipeline.release", release_and_note)
    for module in ("privacy.rng", "rng_state"):
        patched.setattr(f"dpkfc.{module}.draw_key", fixed_keys())
    patched.setattr("dpkfc.memory.available_bytes", lambda: 1 << 22)
    moment = datetime(2026, 1, 1, tzinfo=timezone.utc)
    clock = types.SimpleNamespace(
        datetime=types.SimpleNamespace(now=lambda zone=None: moment), timezone=timezone
    )
    patched.setattr("dpkfc.privacy.ledger_lines.datetime", clock)
    name = types.SimpleNamespace(hex="0" * 32)
    patched.setattr("dpkfc.privacy.ledger_lines.uuid", types.SimpleNamespace(uuid4=lambda: name))
    if victim is not None:
        draw = Session._draw

        def without(self):
            units, records = draw(self)
            keep = units != victim
            return units[keep], None if records is None else records[keep]

        patched.setattr(Session, "_draw", without)
    return sums


@dataclass(frozen=True)
class Seen:
    """All that can be seen of a run."""

    files: Found
    objects: Found
    lines: list[str]
    left: set[str]  # tensors that are alive behind the run and were not before
    sums: list[tuple[str, ...]]  # what must differ, and is compared apart

    def against(self, other):
        """What tells two worlds apart."""
        found = {f"file {path}" for path in find_differences(self.files, other.files)}
        found |= {f"object {path}" for path in find_differences(self.objects, other.objects)}
        # of accounting
        found |= {
            f"log {line}"
            for line in set(self.lines) ^ set(other.lines)
            if "(said once)" not in line
        }
        # what the first run alone leaves is a cache
        return found | {f"tensor {x}" for x in other.left - self.left}


class Lines(logging.Handler):
    """Every log line of the library, whatever its level."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.name}: {record.getMessage()}")


class listening:
    """`with listening() as lines:` the log lines and warnings of the body."""

    def __enter__(self):
        self._handler, self._logger = Lines(), logging.getLogger("dpkfc")
        self._level = self._logger.level
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self._handler)
        self._warnings = warnings.catch_warnings(record=True)
        self._caught = self._warnings.__enter__()
        warnings.simplefilter("always")
        return self._handler.lines

    def __exit__(self, *error):
        self._warnings.__exit__(*error)
        self._handler.lines += [str(warning.message) for warning in self._caught or []]
        self._logger.removeHandler(self._handler)
        self._logger.setLevel(self._level)


# -- tasks and neighbours --------------------------------------------------------------------------


def examples():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (N,), generator=generator)


def net(*middle):
    return nn.Sequential(nn.Linear(WIDTH, 8), *middle, nn.Tanh(), nn.Linear(8, 3)).double()


@dataclass(frozen=True)
class Task:
    """What is trained, and how; everything is made anew in every world."""

    settings: Callable[[], dict[str, Any]] = dict
    model: Callable[[], nn.Module] = net
    data: Callable[[], Any] = examples
    loss: Callable[[nn.Module, Any], Tensor] = loss_fn
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    session: Callable[[], dict[str, Any]] = dict
    units: int = N


def build_with_statistics():
    model = net(nn.BatchNorm1d(8))
    model[1].eval()
    return model


def views(batch):
    return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]


class Reader(nn.Module):
    """Texts of unequal lengths: table, norm, a raw parameter (the fallback), a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(12, 6), nn.LayerNorm(6)
        self.gain, self.cell, self.head = Gain(6), nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, input_ids, attention_mask=None):
        own = (input_ids > 0).unsqueeze(-1)
        read = self.cell(self.gain(self.norm(self.table(input_ids))))[0] * own
        return self.head(read.sum(1) / own.sum(1).clamp(min=1))


class Gain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return x * self.gain.sigmoid()


class Texts:
    """A dataset of pairs of ids and label."""

    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        lengths = torch.randint(3, 7, (N,), generator=generator).tolist()
        self.texts = [torch.randint(1, 12, (length,), generator=generator) for length in lengths]
        self.labels = torch.randint(0, 3, (N,), generator=generator)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.texts[i], self.labels[i]


def padded(rows):
    return nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True), torch.stack(
        [y for _, y in rows]
    )


def gep():
    return {
        "preconditioner": GEP(probe=FeatureNoise(WIDTH), rank=3, probe_size=32),
        "clipping": "embedding_residual",
    }


def ngd():
    made = NGD(probe=FeatureNoise(WIDTH), probe_size=32, lambda_safe=0.05, steps=STEPS, every=2)
    return {"preconditioner": made, "readout": "natural"}


def reading():
    made = KFAC(sides="both", probe=TokenNoise(12, 5, min_length=5), probe_size=16, every=2)
    return {"preconditioner": made, "max_physical_batch_size": "auto"}


def units():
    return {"units": torch.arange(N) // 2}


PATIENTS = {"unit": "patient", "max_records_per_unit": 2}
TASKS = {
    "plain": Task(),
    "kfac, a filter and an average": Task(
        lambda: {"preconditioner": kfac(), "postprocess": DiSK(), "weight_average": WeightEMA(0.9)},
        optimizer=torch.optim.SGD,
    ),
    "gep": Task(gep),
    "frozen statistics, dropout, kfac": Task(
        lambda: {"preconditioner": kfac(), "clipping": "per_layer"},
        lambda: nn.Sequential(build_with_statistics(), nn.Dropout(0.0)),
    ),
    "views, adam-bc": Task(
        lambda: {"augmentations": 2, "postprocess": AdamBC()},
        optimizer=torch.optim.SGD,
        session=lambda: {"augment": views},
    ),
    "units": Task(
        lambda: {**PATIENTS, "max_physical_batch_size": 4, "preconditioner": kfac()},
        session=units,
        units=N // 2,
    ),
    "sizes found by trying": Task(
        lambda: {"max_physical_batch_size": "auto", "preconditioner": kfac()}
    ),
    "texts": Task(
        reading, lambda: Reader().double(), Texts, session=lambda: {"collate_fn": padded}
    ),
    "natural steps": Task(ngd),
    # A row that is left alone is padded to two.
    "normalised, padded": Task(lambda: {"clipping": "normalised", "max_physical_batch_size": 2}),
    "dropout": Task(lambda: {"preconditioner": kfac()}, lambda: net(nn.Dropout(0.3))),
}


def outlier(data, i):
    if isinstance(data, Texts):
        data.texts[i] = torch.full((4,), 11)
    else:
        data[0][i] = 1e6


def broken(data, i):
    data[0][i, 0] = float("nan")


def label(data, i):
    labels = data.labels if isinstance(data, Texts) else data[1]
    labels[i] = (labels[i] + 1) % 3


def sparse(data, i):
    if isinstance(data, Texts):
        data.texts[i] = torch.zeros_like(data.texts[i])
    else:
        data[0][i] = 0


def longer(data, i):
    data.texts[i] = torch.cat([data.texts[i], data.texts[i], torch.arange(1, 12)])


def remove_record(data, i):
    """Nothing changes but that it is never drawn."""


NEIGHBOURS = {
    "outlier": outlier,
    "broken": broken,
    "label": label,
    "sparse": sparse,
    "removed": remove_record,
    "longer": longer,
}


def neighbours_of(name):
    if name == "texts":
        return ["longer", "outlier", "label", "sparse", "removed"]
    return ["outlier", "broken", "label", "sparse", "removed"]


# the data themselves: what a session was given
INPUTS = (
    "session._dataset",
    "session._loader",
    "session._units",
    # The lock of the ledger's file: a place, a descriptor, and other locks of this process.
    "session.ledger._lock",
)


def tensors_in(data):
    return [*data.texts, data.labels] if isinstance(data, Texts) else list(data)


def live(
    task,
    folder,
    neighbour=None,
    plant=None,
    victim=VICTIM,
):
    """One world: a run to the end of its plan, a checkpoint after every other step, and a walk over
    everything.
    """
    data = task.data()
    if neighbour is not None:
        NEIGHBOURS[neighbour](data, victim)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    np.random.seed(0)
    only_what_is_new()
    with pytest.MonkeyPatch.context() as patched, listening() as lines:
        sums = freeze(patched, victim // (N // task.units) if neighbour == "removed" else None)
        work = plant(patched) if plant else None
        model = task.model()
        optimizer = task.optimizer(model.parameters(), lr=0.05)
        config = PrivacyConfig(
            **{"expected_batch_size": B * task.units // N, "steps": STEPS, **task.settings()}
        )
        plan, records = config.with_noise(1.0, 1e-3, task.units), []
        with Session(
            plan, model, optimizer, data, ledger_path=folder / "ledger.jsonl", **task.session()
        ) as session:
            batches = session.batches()
            for batch in batches:
                records.append(session.step(batch, task.loss))
                if work:
                    work(session, batch, records)
                if session.steps_done % 2:
                    session.save(folder / "checkpoint", extra={"done": session.steps_done})
            del batch
            roots = {
                "session": session,
                "model": model,
                "optimizer": optimizer,
                "records": records,
                "batches": batches,
            }
            objects = collect_values({**roots, "process": process_state()}, INPUTS)
            del model, optimizer, session, batches, roots
    objects = {path: value.replace(str(folder), "") for path, value in objects.items()}
    return Seen(files_of(folder), objects, lines, tensors_alive(*tensors_in(data)), sums)
