"""Run an architecture of the zoo through the library and compare with brute force."""

from __future__ import annotations

import statistics
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import dpkfc
from dpkfc import KFAC, PrivacyConfig, PublicData, Session
from tests.gradients.whitened import whiten
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.brute_force import Gradients, clipped_sum, gradients_of_each, norm_of, relative_error
from tests.zoo.registry import MIXING, SOUND, UNCLEAR, Architecture, rows_of, size_of

PACKAGE = Path(dpkfc.__file__).parent
RATE = 0.1
# A Poisson sampler of three of seven rows draws batches of 1, 2 and 5 rows from this seed.
ROWS, EXPECTED, SEED = 7, 3, 14
SIZES = (1, 2, 5)
EXTRA = 2
PROBE = 6

RIGHT = "right"
WRONG = "wrong"
REFUSED = "refused"
TRACEBACK = "traceback"


class Examples(Dataset[Any]):
    """Serve the rows of a batch and count how many rows were read."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.reads = 0

    def __len__(self) -> int:
        return size_of(self.batch)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return rows_of(self.batch, index)


@dataclass(frozen=True)
class Step:
    """Report one step of the library: the drawn rows, their true gradients and the released sum."""

    rows: list[int]
    gradients: list[Gradients]
    released: Gradients


class StepFailed(Exception):
    """A step on a batch of so many rows raised the cause of this error."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"a step on {rows} rows failed")
        self.rows = rows


@dataclass(frozen=True)
class Result:
    """Report what became of one architecture."""

    outcome: str
    detail: str

    @property
    def is_good(self) -> bool:
        """Whether the outcome is what the architecture's kind asks for."""
        return self.outcome == RIGHT


# -- the library's way: the only code here that knows its interface --------------------------------


def library_steps(
    architecture: Architecture,
    model: nn.Module,
    data: Examples,
    clip: float,
    *,
    precondition: bool = False,
) -> Iterator[Step]:
    """Train a few steps without noise and yield what each step drew and released."""
    if architecture.size is None:
        settings: dict[str, Any] = {
            "expected_batch_size": EXPECTED,
            "steps": len(SIZES),
            "test_mode_seed": SEED,
        }
    else:
        settings = {
            "expected_batch_size": architecture.size,
            "steps": architecture.steps,
            "test_mode_seed": SEED,
            "sampler": "fixed",
        }
    if precondition:
        settings["preconditioner"] = preconditioner_of(architecture, model)
    plan = PrivacyConfig(max_grad_norm=clip, **settings).with_noise(0.0, 1e-3, len(data))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    collate, augment = architecture.collate, architecture.augment
    with Session(plan, model, optimizer, data, collate_fn=collate, augment=augment) as session:
        for batch in session.batches():
            rows = [int(i) for i in batch.rows]
            gradients = (
                []
                if needs_no_gradients(architecture)
                else reference(architecture, model, data, rows)
            )
            before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
            try:
                session.step(batch, architecture.loss_fn)
            except Exception as error:
                raise StepFailed(len(rows)) from error
            after = dict(model.named_parameters())
            divisor = settings["expected_batch_size"]
            released = {
                name: (p - after[name].detach()) * (divisor / RATE) for name, p in before.items()
            }
            if precondition and gradients:
                gradients = [whitened(session, row) for row in gradients]
            yield Step(rows, gradients, released)


def preconditioner_of(architecture: Architecture, model: nn.Module) -> KFAC:
    """Build K-FAC on public rows of the architecture's own kind."""
    batch = architecture.batch(PROBE)
    inputs = architecture.inputs(batch) if architecture.inputs else inputs_of(batch, model)
    return KFAC(
        probe=PublicData(inputs, provenance="drawn at random"), probe_size=PROBE, loss=probe_loss
    )


def probe_loss(output: Any, generator: torch.Generator) -> torch.Tensor:
    """Return the squared distance of every output from one, whatever its shape and container."""
    if isinstance(output, torch.Tensor):
        leaf = output
    elif hasattr(output, "logits"):
        leaf = output.logits
    else:
        leaf = output[0]
    return (leaf - 1).square().flatten(1).sum(1) if leaf.dim() > 1 else (leaf - 1).square()


def inputs_of(batch: Any, model: nn.Module) -> Any:
    """Return what a model is called on: a dict without labels, or all tensors of a tuple but the
    last, or its first alone.
    """
    if isinstance(batch, dict):
        return {name: x for name, x in batch.items() if name != "labels"}
    inputs = batch[:-1] if len(batch) > 1 else batch
    try:
        with torch.no_grad():
            model(*inputs)
    except (TypeError, RuntimeError):
        inputs = inputs[:1]
    return inputs[0] if len(inputs) == 1 else inputs


def whitened(session: Session, gradients: Gradients) -> Gradients:
    """Map a gradient by the metric of a session, with explicit matrices."""
    metric = session.preconditioner.metric if session.preconditioner is not None else {}
    result: Gradients = {}
    for layer in session.layers:
        result.update(whiten(layer, metric.get(layer.name), gradients))
    return result


# -- comparison ------------------------------------------------------------------------------------


def needs_no_gradients(architecture: Architecture) -> bool:
    """Tell whether brute force has nothing to compare with."""
    return architecture.kind == MIXING or architecture.is_random


def reference(
    architecture: Architecture, model: nn.Module, data: Examples, rows: Sequence[int]
) -> list[Gradients]:
    """Return the gradients of rows by brute force, in a copy of the model."""
    copy = architecture.make()
    copy.load_state_dict(model.state_dict())
    return defined_gradients(architecture, copy, rows_of(data.batch, list(rows)))


def defined_gradients(architecture: Architecture, model: nn.Module, batch: Any) -> list[Gradients]:
    """Return the gradients by brute force, or none where an unclear model cannot take a batch of
    one.
    """
    try:
        return gradients_of_each(model, architecture.singles(batch), architecture.loss_fn)
    except (ValueError, RuntimeError):
        if architecture.kind == UNCLEAR:
            return []
        raise


def clip_of(architecture: Architecture, batch: Any) -> float:
    """Choose a clipping norm that about half of the examples exceed."""
    if needs_no_gradients(architecture):
        return 1.0
    gradients = defined_gradients(architecture, architecture.make(), batch)
    usable = [norm_of(g) for g in gradients if 0 < norm_of(g) < float("inf")]
    return statistics.median(usable) * (1 + 1e-6) if usable else 1.0


def compare(architecture: Architecture, *, precondition: bool = False) -> Result:
    """Run one architecture, with K-FAC or without, and return its outcome."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        return Result(*outcome_of(architecture, precondition=precondition))


def records_of(architecture: Architecture) -> int:
    """Return the number of examples of an architecture's dataset."""
    if architecture.size is None:
        return ROWS
    return architecture.records or architecture.size + EXTRA


def outcome_of(architecture: Architecture, *, precondition: bool = False) -> tuple[str, str]:
    """Train an architecture, compare every step with brute force, and return the outcome with its
    detail.
    """
    data = Examples(architecture.batch(records_of(architecture)))
    model = architecture.make()
    clip = clip_of(architecture, data.batch)
    worst, releases = 0.0, 0
    try:
        for step in library_steps(architecture, model, data, clip, precondition=precondition):
            releases += 1
            if architecture.is_random:
                bound = len(step.rows) * clip * (1 + 1e-9)
                length = norm_of(step.released)
                if not 0 < length <= bound:
                    return WRONG, f"the release has norm {length:.3g}, outside (0, {bound:.3g}]"
            if step.gradients:
                error = relative_error(step.released, clipped_sum(step.gradients, clip))
                worst = max(worst, error)
                if not error <= architecture.tolerance:
                    return WRONG, f"off by {error:.1e} in a batch of {len(step.rows)}"
    except Exception as error:
        outcome, detail = outcome_of_error(architecture, error, data.reads)
        if outcome == RIGHT and architecture.kind == MIXING and releases > 0:
            return WRONG, f"refused after {releases} releases and {data.reads} rows read"
        return outcome, detail
    if architecture.kind == MIXING:
        return WRONG, "trained although it mixes examples"
    return RIGHT, f"off by {worst:.1e}"


def outcome_of_error(architecture: Architecture, error: Exception, reads: int) -> tuple[str, str]:
    """Tell a refusal by the library from a traceback; return the outcome with its detail."""
    place = "before the first step"
    if isinstance(error, StepFailed):
        place = f"in a batch of {error.rows}"
        cause = error.__cause__
        assert isinstance(cause, Exception)
        error = cause
    if not from_the_library(error):
        return TRACEBACK, f"{place}: {traceback_of(error)}"
    outcome = REFUSED if architecture.kind == SOUND else RIGHT
    return outcome, f"{place}, {reads} rows read: {first_line(error)}"


def from_the_library(error: Exception) -> bool:
    """Tell whether an error was raised by a line of dpkfc, or carries a note of it, and is not
    torch's alone.
    """
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    is_ours = raised_in.is_relative_to(PACKAGE)
    return isinstance(error, ValueError) and (is_ours or bool(getattr(error, "__notes__", [])))


def first_line(error: Exception) -> str:
    """Return the beginning of an error's message."""
    lines = str(error).splitlines() or [""]
    return lines[0]


def traceback_of(error: Exception) -> str:
    """Return the kind of an error, where it was raised and the beginning of its message."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = frame.filename.rsplit("/", 1)[-1]
    return f"{type(error).__name__} at {place}:{frame.lineno}: {first_line(error)}"


def select_entries(*, with_missing_packages: bool = False) -> list[Architecture]:
    """Return the architectures whose packages are installed, or all."""
    return [
        architecture
        for architecture in ARCHITECTURES.values()
        if with_missing_packages
        or architecture.requires is None
        or find_spec(architecture.requires) is not None
    ]
