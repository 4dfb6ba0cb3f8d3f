"""Side doors: whatever tells two neighbouring data sets apart, other than through the released
noisy sums, is found here.

Two runs on neighbouring data sets, in which the release is replaced by one that ignores the clipped
sum and gives both the same noise. What is left that differs between the two worlds has passed
beside the mechanism. Compared are every file of the run, every object that can be reached from
session, model, optimizer and step records, what the modules of the library and the global
generators remember, every tensor that is still alive, every log line and every warning.

The clock, the keys of the operating system and the free memory are frozen, so that the same data
twice differ in nothing.
"""

import dataclasses
import gc
import json
import logging
import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from dpkfc.app import prepare as app_prepare
from dpkfc.app import train as recipe_train
from dpkfc.app.metrics import list_unprotected
from dpkfc.app.recipes.catalogue import find_recipe, run_config
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.session import Session
from dpkfc.verification.check import Verdict
from tests.app.accounting import remember_accounting
from tests.audit.sizes import FULL, size
from tests.audit.walk import collect_values, files_of, process_state, tensors_alive
from tests.audit.worlds import (
    NEIGHBOURS,
    STEPS,
    TASKS,
    VICTIM,
    WIDTH,
    B,
    Seen,
    Task,
    blind,
    examples,
    freeze,
    kfac,
    listening,
    live,
    neighbours_of,
    net,
    only_what_is_new,
)

# Figures that are computed from private data without noise, for the operator alone. The card must
# list each of them.
PRIVATE = ("batch_size", "clipped_fraction", "nonfinite_fraction", "median_norm", "seconds")
# What a check says that looks at private gradients on purpose, once, to the operator: that a NaN
# kept it from a verdict.
CHECKS = (
    "object engine._step._scale._warned",
    "log the gradients of this loss do not show by what it divides",
)
# What follows private data inside the process, is in no file, and decides no figure and no release
# but through the clipped sum.
WORKING = {
    "process['generators']['torch']": (
        "torch's global generator: how much dropout and augmentation draw follows the batch"
    ),
    "session._size": "how many rows fit into memory, measured on the first batch",
    "session._weights._places": "where the weights lie in memory",
    "engine._step.weights._places": "where the weights lie in memory",
    "session._watch._cases": "how many more batches are looked at for rare labels and lengths",
}


@pytest.fixture(autouse=True, scope="module")
def _collector():
    """What is there before a world is put out of the collector's sight, see `only_what_is_new`; at
    the end it is seen again.
    """
    yield
    gc.unfreeze()


def is_allowed(difference):
    """One of the private figures in the place it is marked in, or working state that stays in the
    process.
    """
    figures = "|".join(PRIVATE)
    places = (
        rf"object records\[\d+\]\.({figures})",
        rf"file metrics\.parquet: ({figures})",
        rf"progress\[\d+\]\.({figures})",
    )
    if any(re.fullmatch(pattern, difference) for pattern in places):
        return True
    return any(
        re.match(re.escape(f"object {start}") + r"([.\[ ]|$)", difference) for start in WORKING
    )


_lived = {}


def base(name, folder):
    """The world without a change, lived once."""
    if name not in _lived:
        _lived[name] = live(TASKS[name], folder / "base")
    return _lived[name]


# -- nothing but the private figures ---------------------------------------------------------------


@pytest.mark.quick("dropout", "natural steps")
@pytest.mark.parametrize("name", [name for i, name in enumerate(TASKS) if FULL or i % 2])
def test_the_same_data_twice_differ_in_nothing(name, tmp_path):
    """Otherwise the walk could not tell a side door from chance; time, memory of a step and places
    in memory are not frozen.
    """
    one, other = base(name, tmp_path), live(TASKS[name], tmp_path / "again")
    assert {
        x
        for x in one.against(other)
        if not re.search(r"\.seconds$|session\._size|_weights\._places", x)
    } == set()
    assert len(one.objects) > 300 and any("checkpoint" in path for path in one.files)
    assert one.sums == other.sums and len(one.sums) == STEPS


PAIRS = [(name, neighbour) for name in TASKS for neighbour in neighbours_of(name)]


@pytest.mark.quick("units-*", "kfac, a filter*", "gep-*")
@pytest.mark.parametrize(
    "name, neighbour", [pair for i, pair in enumerate(PAIRS) if FULL or i % 4 == 0]
)
def test_neighbours_differ_in_private_figures_alone(name, neighbour, tmp_path, evidence):
    one, other = base(name, tmp_path), live(TASKS[name], tmp_path / "neighbour", neighbour)
    found = one.against(other)
    assert {x for x in found if not is_allowed(x)} == set()
    moved = sum(a != b for a, b in zip(one.sums, other.sums, strict=True))
    assert moved > 0, "the victim was never drawn: the worlds are the same"
    evidence(
        "side doors",
        f"{name}, {neighbour}",
        values_compared=len(one.objects) + len(one.files),
        sums_that_differ=moved,
        private_figures_that_differ=len(found),
        side_doors=0,
    )


# -- a run folder, from the command line's own code ------------------------------------------------

QUICK = {
    "recipe": "digits",
    "steps": 3,
    "expected_batch_size": 24,
    "accountant": "rdp",
    "epsilon": 2.0,
    "probe_size": 16,
}
QUICK |= {"every": 2, "evaluate_every": 1}


def recipe_world(folder, method, neighbour, victim=7):
    """(what a run of `dpkfc train` leaves, what its progress bar was told, its card)."""
    recipe, told = find_recipe("digits"), list[str]()

    def load(folder):
        found = recipe.load(folder)
        few = tuple(x[:60].clone() for x in found.train)
        if neighbour is not None:
            NEIGHBOURS[neighbour](few, victim)
        return replace(found, train=few, test=tuple(x[:100] for x in found.test))

    with pytest.MonkeyPatch.context() as patched, listening() as lines, remember_accounting():
        sums = freeze(patched, victim if neighbour == "removed" else None)
        patched.setattr(app_prepare, "recipe_of", lambda config: replace(recipe, load=load))
        advance = recipe_train.TrainingProgress.advance

        def advance_and_note(self, **figures):
            told.append(figures)
            advance(self, **figures)

        patched.setattr(recipe_train.TrainingProgress, "advance", advance_and_note)
        torch.manual_seed(0)
        config = run_config({**QUICK, "method": method, "out": str(folder)})
        recipe_train.run(config, Console(file=StringIO()))
    card = json.loads((folder / "privacy_card.json").read_text("utf-8"))
    flat = {
        f"progress[{i}].{key}": repr(value)
        for i, row in enumerate(told)
        for key, value in row.items()
    }
    return Seen({**files_of(folder), **flat}, {}, lines, set(), sums), told, card


@pytest.fixture(scope="module")
def recipe_base(tmp_path_factory):
    methods = size(("dp-kfc",), ("dp-kfc", "dp-sgd", "disk"))
    return {
        method: recipe_world(tmp_path_factory.mktemp("base") / "run", method, None)
        for method in methods
    }


@pytest.mark.parametrize(
    "neighbour", size(("broken",), ("outlier", "broken", "label", "sparse", "removed"))
)
def test_a_run_folder_differs_in_marked_columns_alone(neighbour, recipe_base, tmp_path, evidence):
    for method, (one, _, card) in recipe_base.items():
        other, _, _ = recipe_world(tmp_path / method, method, neighbour)
        found = {x.removeprefix("file ") if "progress" in x else x for x in one.against(other)}
        # of the file, in which the order of the remarks is drawn anew each time it is written
        digest = card["weights"]["sha256"]
        found -= {f"file {place}" for place, held in one.files.items() if digest in str(held)}
        assert {x for x in found if not is_allowed(x)} == set()
        assert one.sums != other.sums
        assert {
            "model.safetensors: 9.weight",
            "privacy_card.md: line 0",
            "metrics.parquet: accuracy",
        } <= set(one.files)
        assert any(path.startswith("figures.json") for path in one.files) and any(
            path.startswith("ledger.jsonl") for path in one.files
        )
        listed = " ".join(card["not_private"])
        assert (
            all(f"metrics.parquet: {figure}" in listed for figure in PRIVATE)
            and "progress bar" in listed
        )
        evidence(
            "side doors",
            f"run folder, {method}, {neighbour}",
            values_compared=len(one.files),
            side_doors=0,
            private_figures_that_differ=len(found),
        )


def test_every_private_figure_is_marked_where_it_is_made():
    from dpkfc.step_record import StepRecord

    assert set(PRIVATE) <= set(list_unprotected("test"))
    public = {"step", "release", "notes"}
    assert {f.name for f in dataclasses.fields(StepRecord)} == public | set(PRIVATE)
    for name in ("batch_size", "clipped_fraction", "nonfinite_fraction", "median_norm"):
        line = next(
            line
            for line in (StepRecord.__doc__ or "").splitlines()
            if line.strip().startswith(f"{name}:")
        )
        assert "PRIVATE" in line


# -- the interface of Opacus, which releases elsewhere ---------------------------------------------


def engine_world(neighbour, victim=VICTIM):
    from dpkfc.integrations.opacus import PrivacyEngine

    data = examples()
    if neighbour is not None:
        NEIGHBOURS[neighbour](data, victim)
    torch.manual_seed(0)
    only_what_is_new()
    with pytest.MonkeyPatch.context() as patched, listening() as lines:
        sums = freeze(patched)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=B)
        engine = PrivacyEngine(accountant="rdp")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            preconditioner=kfac(),
        )
        for _ in range(2):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        del x, y
        roots = {
            "engine": engine,
            "model": model,
            "optimizer": optimizer,
            "process": process_state(),
        }
        objects = collect_values(roots, ("engine._step._source", "engine._step._looks._source"))
        objects = {path: value for path, value in objects.items() if "Loader" not in value}
        del engine, model, optimizer, loader, roots
    return Seen({}, objects, lines, tensors_alive(*data), sums)


@pytest.mark.parametrize("neighbour", size(("outlier",), ("outlier", "broken", "label", "sparse")))
def test_scripts_of_opacus_have_no_side_door_either(neighbour):
    one, other = engine_world(None), engine_world(neighbour)
    assert one.sums != other.sums and len(one.objects) > 200
    found = {x for x in one.against(other) if not is_allowed(x)}
    assert {x for x in found if neighbour != "broken" or not x.startswith(CHECKS)} == set()


# -- planted side doors ----------------------------------------------------------------------------


class Remembers(nn.Module):
    """A running mean of what it is shown."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x


class Caches(nn.Module):
    """Keeps the largest number that it has seen in a plain attribute."""

    largest = 0.0

    def forward(self, x):
        self.largest = max(self.largest, float(x.abs().max()))
        return x


def remove_guards(patched):
    """What keeps a forward pass from leaving anything in the model is taken out."""
    patched.setattr("dpkfc.gradients.clipped_sum.own_pass", lambda model: nullcontext())
    patched.setattr("dpkfc.loss_check.check_on_public_rows", lambda *args, **kwargs: Verdict())


def no_work(patched):
    remove_guards(patched)


def filter_of_sums(patched):
    """A filter whose state is fed the clipped sum at its first step, in the last bits."""
    release, apply = Session._release, PostprocessPipeline.apply
    first = []

    def release_and_keep(self, clipped):
        if not first:
            first.append(1e-9 * sum(x.sum() for x in clipped.tensors.values()))
        return release(self, clipped)

    def leaky(self, *args, **options):
        found = apply(self, *args, **options)
        self._states = [{key: x + first[0] for key, x in state.items()} for state in self._states]
        return found

    patched.setattr(Session, "_release", release_and_keep)
    patched.setattr(PostprocessPipeline, "apply", leaky)


def release_of_sums(patched):
    """A release that lets one part in 1e12 of the sum past the noise."""
    current = blind

    def leaky(clipped, *rest):
        passed = {name: 1e-12 * x for name, x in clipped.tensors.items()}
        found = current(clipped, *rest)
        return replace(found, gradients={n: g + passed[n] for n, g in found.gradients.items()})

    patched.setattr("dpkfc.release_pipeline.release", leaky)


def learning_rate_of_norms(patched):
    def work(session, batch, records):
        session.optimizer.param_groups[0]["lr"] = 0.05 / (1 + records[-1].median_norm)

    return work


def logged_loss(patched):
    def work(session, batch, records):
        logging.getLogger("dpkfc.session").debug(
            "clipped %.6f of the batch", records[-1].median_norm
        )

    return work


def noted_in_the_checkpoint(patched):
    """A running mean of a private figure, kept with the optimizer."""

    def work(session, batch, records):
        session.optimizer.param_groups[0]["norms"] = sum(
            record.median_norm for record in records
        ) / len(records)

    return work


_museum = []


def keep_gradients(patched):
    """Norms that outlive the step, in a list that no walk from the session reaches."""
    import dpkfc.session

    original = dpkfc.session.clipped_sum

    def release_and_keep(*args, **kwargs):
        sums, norms = original(*args, **kwargs)
        _museum.append(norms)
        return sums, norms

    patched.setattr("dpkfc.session.clipped_sum", release_and_keep)


def warn_of_norms(patched):
    def work(session, batch, records):
        warnings.warn(f"large gradients: {records[-1].median_norm:.12f}", stacklevel=1)

    return work


def refreshed_on_the_batch(patched):
    """A metric that follows the norms of the batches."""
    original = Session._clipped_sum

    def leaky(self, batch, loss):
        sums, norms = original(self, batch, loss)
        current = self._pipeline.preconditioning.current
        scaled = {
            name: entry.scale_by(float(1 + norms.mean())) for name, entry in current.metric.items()
        }
        object.__setattr__(current, "metric", scaled)
        return sums, norms

    patched.setattr(Session, "_clipped_sum", leaky)


PLANTED = {
    "buffer of a forward pass": (
        replace(TASKS["plain"], model=lambda: nn.Sequential(Remembers(), net())),
        no_work,
        "mean",
    ),
    "attribute of a forward pass": (
        replace(TASKS["plain"], model=lambda: nn.Sequential(Caches(), net())),
        no_work,
        "largest",
    ),
    "filter fed the clipped sum": (
        TASKS["kfac, a filter and an average"],
        filter_of_sums,
        "postprocess._states",
    ),
    "a trace of the sum in the release": (
        TASKS["plain"],
        release_of_sums,
        "checkpoint/model.safetensors",
    ),
    "learning rate that follows norms": (TASKS["plain"], learning_rate_of_norms, "param_groups"),
    "log of a private figure": (TASKS["plain"], logged_loss, "log dpkfc.session: clipped"),
    "warning with a private figure": (TASKS["plain"], warn_of_norms, "log large gradients"),
    "private figure in a checkpoint": (
        TASKS["plain"],
        noted_in_the_checkpoint,
        "checkpoint/manifest.json.meta.optimizer",
    ),
    "gradients that outlive a step": (TASKS["plain"], keep_gradients, "tensor torch.float64"),
    "metric scaled by private norms": (
        Task(lambda: {"preconditioner": kfac(every=50)}),
        refreshed_on_the_batch,
        "metric",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_side_door_is_found(planted, tmp_path, evidence):
    task, plant, where = PLANTED[planted]
    _museum.clear()
    neighbour = "outlier" if "forward pass" in planted else "removed"
    worlds = [live(task, tmp_path / str(change), change, plant) for change in (None, neighbour)]
    _museum.clear()
    found = {x for x in worlds[0].against(worlds[1]) if not is_allowed(x)}
    assert any(where in x for x in found), sorted(found)[:20]
    evidence("side doors", f"planted: {planted}", found=True, traces=len(found))
