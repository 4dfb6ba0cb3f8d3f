"""Running a probe through a model that is left exactly as it was."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from dpkfc.curvature.probe_loss import Draws, fits, likelihood_loss
from dpkfc.curvature.probes import (
    Inputs,
    Probe,
    call,
    device_of,
    examples,
    named_inputs,
    padding_mask,
    placed,
    select,
    tensors,
)
from dpkfc.linalg.blocks import Block
from dpkfc.memory import is_out_of_memory

# --------------------------------------------------------------------------------------------------
# A refresh over several processes: each runs its part of the probe, and each layer is finished by
# one of them.
#
# Every process adds up what its own examples of the probe contribute. The parts of a layer go to
# the process that owns it, are joined there in the order of the probe, decomposed, and sent to all.
# What comes out is what one process finds, but for the order in which sums of many examples are
# added up.

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")


class Team(Protocol):
    """The processes that share a refresh. All call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Do work everywhere; an error anywhere is raised everywhere."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """The values of all, in their order."""
        ...

    def gather(self, value: T, to: int) -> list[T] | None:
        """The values of all on one of them."""
        ...


def own_rows(team: Team | None, size: int, first: int = 0) -> slice:
    """Of the examples from `first` to `size` of a probe, those that this process runs: consecutive ones, in equal shares."""
    if team is None:
        return slice(first, size)
    count = size - first
    return slice(first + count * team.rank // team.world_size, first + count * (team.rank + 1) // team.world_size)


def joined(
    team: Team,
    parts: Mapping[str, P],
    cost: Callable[[P], float],
    finish: Callable[[Mapping[str, list[P]]], Mapping[str, R]],
    device: torch.device,
) -> dict[str, R]:
    """Bring the parts of each layer to its owner, finish it there, and send what was made of it to all.

    Args:
        team: the processes.
        parts: layer name to what this process has added up; a layer may be missing where its examples do not reach it.
        cost: what finishing a layer costs, in any unit.
        finish: maps layer name to its parts in the order of the processes; returns what is made of each.
        device: of the model on this process.

    Returns:
        Layer name to what was made of it, the same on every process.
    """
    mine = handed_over(team, parts, cost)
    return told_to_all(team, team.run_on_all(lambda: finish(moved_to(mine, device))), device)


def handed_over(team: Team, parts: Mapping[str, P], cost: Callable[[P], float]) -> dict[str, list[P]]:
    """Bring the parts of each layer to its owner; arguments as in `joined`.

    Returns:
        The layers that this process owns to their parts, in the order of the processes, on the CPU.
    """
    owners = owners_of(team.all_gather({name: cost(part) for name, part in parts.items()}))
    mine: dict[str, list[P]] = {}
    for owner in range(team.world_size):
        sent = {name: part for name, part in parts.items() if owners[name] == owner}
        for received in team.gather(moved_to(sent, torch.device("cpu")), owner) or ():
            for name in received:
                mine.setdefault(name, []).append(received[name])
    return {name: mine[name] for name in owners if name in mine}


def told_to_all(team: Team, made: Mapping[str, R], device: torch.device) -> dict[str, R]:
    """What each process has made of its layers, on all of them; in one order, as owners hold consecutive layers."""
    found = team.all_gather(moved_to(dict(made), torch.device("cpu")))
    return {name: moved_to(x, device) for part in found for name, x in part.items()}


def owners_of(costs: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Which process finishes which layer: consecutive layers, which often share a factor, at about equal cost.

    Args:
        costs: of the layers that each process knows.
    """
    known: dict[str, float] = {}
    for of in costs:
        for name, cost in of.items():
            known[name] = max(cost, known.get(name, 0.0))
    total, done, owners = sum(known.values()), 0.0, {}
    for name, cost in known.items():
        owners[name] = min(len(costs) - 1, int(len(costs) * (done + cost / 2) / total)) if total > 0 else 0
        done += cost
    return owners


def moved_to(value: T, device: torch.device) -> T:
    """A copy of a value with every tensor in it on a device; what several parts of it hold stays one object."""
    known: dict[int, Any] = {}

    def copied(x: Any) -> Any:
        if id(x) not in known:
            known[id(x)] = _copied(x, device, copied)
        return known[id(x)]

    return copied(value)


def _copied(x: Any, device: torch.device, inside: Callable[[Any], Any]) -> Any:
    if isinstance(x, Tensor):
        return x.detach().to(device)
    if isinstance(x, torch.device):
        return device
    if hasattr(x, "__dict__") and (is_dataclass(x) or type(x).__module__.startswith("dpkfc.")) and not isinstance(x, type):
        twin = copy.copy(x)
        for name, item in vars(x).items():
            object.__setattr__(twin, name, inside(item))
        return twin
    if isinstance(x, Mapping):
        return {key: inside(item) for key, item in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(inside(item) for item in x)
    return x


def agreed(what: str, found: Sequence[str]) -> None:
    """Raise on every process where the hashes of all are not one.

    Raises:
        RuntimeError: naming the first process whose hash is another than that of rank 0.
    """
    other = next((rank for rank, digest in enumerate(found) if digest != found[0]), None)
    if other is not None:
        raise RuntimeError(
            f"the {what} returns other inputs on rank {other} than on rank 0; its sample(n, generator) must return the same "
            "for the same generator on every process"
        )


def probe_digest(inputs: Inputs, labels: Tensor | None) -> str:
    """Hash of what a probe has returned."""
    digest = hashlib.sha256()
    for name, x in [*tensors(inputs), ("labels", labels)]:
        if x is not None:
            digest.update(f"{name}{x.dtype}{tuple(x.shape)}".encode())
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
Capture = Callable[[nn.Module, Callable[[nn.Module], Tensor]], Mapping[str, Block]]
ProbeLoss = Callable[[Any, torch.Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class ProbeRun:
    """What is run on a model to see its curvature.

    Attributes:
        probe: source of inputs.
        size: examples in total, a public constant.
        chunk: examples a forward pass.
        labels, likelihood: the loss, see `likelihood`.
        loss: maps (model output, generator) to losses `[N]` instead.
        seed, step: name the random stream.
        within: no forward pass goes over a multiple of this number of examples, counted from the first; None for any.
    """

    probe: Probe
    size: int
    chunk: int
    labels: str
    likelihood: str
    loss: ProbeLoss | None
    seed: int
    step: int
    within: int | None = None


@dataclass(frozen=True)
class Piece:
    """One micro-batch of a probe after its backward pass.

    Attributes:
        blocks: layer name to what the layer contributes; a mapping may form them on demand.
        rows: which examples of the probe these are.
        mask: True `[n, T]` at the positions that are text, None where the inputs do not say.
        note: what became of labels that do not fit the model's output.
        differentiated: whether there was a backward pass; without one blocks show what layers have read, and nothing else.
    """

    blocks: Mapping[str, Block]
    rows: slice
    mask: Tensor | None = None
    note: str = ""
    differentiated: bool = True

    @property
    def size(self) -> int:
        """Number of examples n."""
        return int(self.rows.stop - self.rows.start)


def public_generator(seed: int, step: int, purpose: str = "probe") -> torch.Generator:
    """A random stream of one refresh: its own, repeatable, public, and apart from every other stream."""
    digest = hashlib.sha256(f"dpkfc {purpose}, seed {seed}, step {step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards modes, buffers and the global random state are those of before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(m, name, b, b.detach().clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    device = device_of(model)
    devices = [device] if device.type == "cuda" else []
    try:
        model.eval()
        for module, _ in modes:  # cuDNN differentiates recurrent layers in training mode only; the same without dropout
            module.training = isinstance(module, nn.RNNBase) and not module.dropout
        with torch.random.fork_rng(devices=devices), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                is_sparse = buffer.layout != torch.strided  # torch.equal does not take sparse tensors
                if is_sparse or not torch.equal(buffer, before):
                    buffer.copy_(before)


def blocks_on_probe(
    model: nn.Module,
    capture: Capture,
    run: ProbeRun,
    first: int = 0,
    *,
    stop: int | None = None,
    gradients_from: int = 0,
    drawn: Callable[[Inputs, Tensor | None], None] | None = None,
) -> Iterator[Piece]:
    """The layers' contributions on the probe, one micro-batch after another; every call replays the same probe.

    The micro-batch with fewer examples, if there is one, comes first: the last one is full. Let go of each before the next is
    asked for, or both are in memory.

    Args:
        model: should be inside `undisturbed`.
        capture: maps (model, loss) to layer name and block, in the per-example scale.
        run: what to run.
        first: leaves out the examples before this one.
        stop: leaves out this example and those after it; None for none.
        gradients_from: the examples before this one have no backward pass: `capture` is called without gradients.
        drawn: is shown all inputs and labels of the probe.

    Raises:
        ValueError: inputs that the model cannot take, an output or a loss that is not finite, or of another number of
            examples.
    """
    generator = public_generator(run.seed, run.step)
    inputs, labels = _sampled(run, generator)
    if drawn is not None:
        drawn(inputs, labels)
    draws, known = Draws(generator, run.size), _known_labels(run, labels)
    cuts = (gradients_from, *range(0, run.size, run.within or run.size))
    for rows in _micro_batches(first, run.size if stop is None else stop, run.chunk, cuts):
        held = _refined(run, model, placed(select(inputs, rows), model), rows)
        mask = padding_mask(held, getattr(run.probe, "padding", None))
        loss = _loss_of(run, held, None if labels is None else labels[rows], draws, rows=rows, mask=mask, known=known)
        differentiated = rows.stop > gradients_from
        yield Piece(_captured(model, capture, loss, differentiated), rows, mask, known.note, differentiated)


def _captured(
    model: nn.Module, capture: Capture, loss: Callable[[nn.Module], Tensor], differentiated: bool
) -> Mapping[str, Block]:
    with torch.set_grad_enabled(differentiated):
        return capture(model, loss)


def _micro_batches(first: int, stop: int, chunk: int, cuts: Iterable[int]) -> Iterator[slice]:
    """Slices of at most `chunk` examples from `first` to `stop`, none of them across one of the cuts."""
    for low, high in pairwise(sorted({first, stop, *(cut for cut in cuts if first < cut < stop)})):
        for end in reversed(range(high, low, -chunk)):
            yield slice(max(low, end - chunk), end)


def _refined(run: ProbeRun, model: nn.Module, inputs: Inputs, rows: slice) -> Inputs:
    """Inputs as they are, or moved towards classes by a probe that does that; with numbers of a stream of their own."""
    refine = getattr(run.probe, "refine", None)
    if refine is None:
        return inputs
    if run.loss is not None or run.likelihood == "gaussian":
        what = "a loss of your own" if run.loss is not None else "the likelihood 'gaussian'"
        raise ValueError(f"{type(run.probe).__name__} moves inputs towards classes, and {what} has none; give its probe itself")
    targets = Draws(public_generator(run.seed, run.step, "refine"), run.size)

    def losses(x: Tensor, numbers: slice) -> Tensor:
        output = _output(model, x, run.probe)
        return likelihood_loss(run.likelihood, output, labels="uniform", given=None, draws=targets, rows=numbers)

    refined: Inputs = refine(inputs, losses, rows)
    return refined


@dataclass
class _Known:
    """The labels that a probe holds, whether drawn for this refresh or not, and what became of them."""

    labels: Tensor | None
    note: str = ""

    def kind(self, run: ProbeRun, output: Any) -> str:
        """Where labels come from: those given, unless one of them does not fit the head."""
        if run.labels != "given" or self.labels is None or fits(run.likelihood, output, self.labels):
            return run.labels
        if not self.note:
            self.note = "the probe's labels do not fit the model's output: labels were drawn from the model"
            _log.warning("%s", self.note)
        return "model"


def _known_labels(run: ProbeRun, drawn: Tensor | None) -> _Known:
    """All labels of the probe where it holds some: which of them were drawn must not decide what they are used for."""
    held = getattr(run.probe, "labels", None)
    return _Known(held if isinstance(held, Tensor) else drawn)


def _sampled(run: ProbeRun, generator: torch.Generator) -> tuple[Inputs, Tensor | None]:
    """What the probe returned, or an error that names it."""
    kind = type(run.probe).__name__
    drawn = run.probe.sample(run.size, generator)
    if not isinstance(drawn, tuple) or len(drawn) != 2:
        raise ValueError(f"{kind}.sample() must return inputs and labels (or None), got a {type(drawn).__name__}")
    inputs, labels = named_inputs(drawn[0]), drawn[1]
    held = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    if not all(isinstance(x, Tensor) for x in held):
        raise ValueError(f"{kind}.sample() must return a tensor or a mapping of tensors, got {type(inputs).__name__}")
    if examples(inputs) != run.size:
        raise ValueError(f"the probe {kind} returned {examples(inputs)} examples, not {run.size}")
    return inputs, labels


def digest_of_probes(config: Any, step: int) -> str:
    """Hash of all that the probes of a preconditioner return for a refresh; empty where it has none. Nothing is run.

    Args:
        config: with `run_at(step)` where it has a probe, and `output_probe` where it has two.
        step: names the random stream.
    """
    if not hasattr(config, "run_at"):
        return ""
    run, other = config.run_at(step), getattr(config, "output_probe", None)
    with torch.random.fork_rng(devices=[]):
        runs = [run] if other is None else [run, replace(run, probe=other)]
        return "".join(probe_digest(*_sampled(of, public_generator(of.seed, of.step))) for of in runs)


class _OutOfTable(ValueError):
    """A row that an embedding does not have."""


def _output(model: nn.Module, inputs: Inputs, probe: Probe) -> Any:
    """The model's output on a probe, or an error that says what the probe gave it."""
    kind = type(probe).__name__

    def checked(name: str) -> Callable[..., None]:
        def hook(table: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
            ids, rows = (args[0] if args else more["input"]), cast(nn.Embedding, table).num_embeddings
            low, high = (int(x) for x in torch.aminmax(ids)) if ids.numel() else (0, 0)
            if low < 0 or high >= rows:
                raise _OutOfTable(
                    f"the probe {kind} reads row {min(low, 0) or high} of the embedding '{name}', which has {rows} rows; give "
                    "the probe the vocabulary, the length and the segments that the model has (a larger vocabulary: "
                    "model.resize_token_embeddings)"
                )

        return hook

    # A subclass with a forward pass of its own may take something else than ids (positions from a shape).
    modules = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Embedding))
    tables = [(name, m) for name, m in modules if type(m).forward is nn.Embedding.forward]
    handles = [m.register_forward_pre_hook(checked(name), with_kwargs=True) for name, m in tables]
    try:
        return call(model, inputs)
    except _OutOfTable:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        given = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}".strip() for name, x in tensors(inputs))
        raise ValueError(
            f"the model cannot be called on what the probe {kind} gives it ({given}): {error}; the probe's inputs need the "
            f"shape, dtype and names of the private examples{_way_out(probe, error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _way_out(probe: Probe, error: Exception) -> str:
    """What to change where the names of the arguments are the matter."""
    if not isinstance(error, TypeError):
        return ""
    if getattr(probe, "bare", None) is False:
        return f": for a model that is called as model(ids) give the ids alone, {type(probe).__name__}(..., bare=True)"
    return (
        ": a tensor is passed as model(x), a mapping as model(**inputs), so for a model with several inputs write a probe whose "
        "sample() returns {name of the argument: tensor} (docs/models.md)"
    )


def _loss_of(
    run: ProbeRun, inputs: Inputs, labels: Tensor | None, draws: Draws, *, rows: slice, mask: Tensor | None, known: _Known
) -> Callable[[nn.Module], Tensor]:
    """The closure handed to `capture`: per-example losses of these probe examples."""
    size = rows.stop - rows.start

    def loss(model: nn.Module) -> Tensor:
        output = _output(model, inputs, run.probe)
        if run.loss is None:
            losses = likelihood_loss(
                run.likelihood, output, labels=known.kind(run, output), given=labels, draws=draws, rows=rows, mask=mask
            )
        else:
            losses = run.loss(output, draws.generator)
        if losses.shape != (size,):
            raise ValueError(
                f"the probe's loss returned shape {tuple(losses.shape)} for {size} examples; "
                "it must return one loss an example, [batch]"
            )
        if not torch.isfinite(losses).all():
            raise ValueError("the probe's loss contains NaN or infinity; check the model's output on the probe")
        return losses

    return loss
