"""A pass over a probe through a model that is left exactly as it was."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from dpkfc.curvature.probe_loss import ProbeRandomness, labels_fit, likelihood_loss
from dpkfc.curvature.probes import (
    Inputs,
    Probe,
    call,
    device_of,
    examples,
    move_to_model,
    named_inputs,
    padding_mask,
    select,
    tensors,
)
from dpkfc.linalg.blocks import Block
from dpkfc.memory import is_out_of_memory

# --------------------------------------------------------------------------------------------------
# A refresh over several processes.
#
# Every process runs its part of the probe and adds up what its examples contribute. The parts of a
# layer go to the process that owns it. The owner joins them in the order of the probe, decomposes
# the sum and sends the result to all. The result is that of one process, except for the order in
# which sums over many examples are added up.

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")


class RefreshGroup(Protocol):
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
        """Run work on all processes; an error on one is raised on all."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, in their order."""
        ...

    def gather(self, value: T, to: int) -> list[T] | None:
        """Return the values of all on one process, None on the others."""
        ...


def rows_of_process(team: RefreshGroup | None, size: int, first: int = 0) -> slice:
    """Return the consecutive examples from `first` to `size` that this process runs.

    All processes run about the same number.
    """
    if team is None:
        return slice(first, size)
    count = size - first
    start = first + count * team.rank // team.world_size
    stop = first + count * (team.rank + 1) // team.world_size
    return slice(start, stop)


def finish_on_owners(
    team: RefreshGroup,
    parts: Mapping[str, P],
    cost: Callable[[P], float],
    finish: Callable[[Mapping[str, list[P]]], Mapping[str, R]],
    device: torch.device,
) -> dict[str, R]:
    """Send the parts of each layer to its owner, finish it there, and send the result to all.

    Args:
        team: the processes.
        parts: layer name to the sums of this process; layers that its examples do not reach may be
            missing.
        cost: cost of finishing a layer, in any unit.
        finish: maps layer name to its parts in the order of the processes; returns the results.
        device: of the model on this process.

    Returns:
        Layer name to result, the same on every process.
    """
    own = send_to_owners(team, parts, cost)
    results = team.run_on_all(lambda: finish(copy_to_device(own, device)))
    return broadcast_results(team, results, device)


def send_to_owners(
    team: RefreshGroup, parts: Mapping[str, P], cost: Callable[[P], float]
) -> dict[str, list[P]]:
    """Send the parts of each layer to its owner; arguments as in `finish_on_owners`.

    Returns:
        The layers that this process owns to their parts, in the order of the processes, on the CPU.
    """
    owners = assign_owners(team.all_gather({name: cost(part) for name, part in parts.items()}))
    own: dict[str, list[P]] = {}
    for owner in range(team.world_size):
        sent = {name: part for name, part in parts.items() if owners[name] == owner}
        for received in team.gather(copy_to_device(sent, torch.device("cpu")), owner) or ():
            for name in received:
                own.setdefault(name, []).append(received[name])
    return {name: own[name] for name in owners if name in own}


def broadcast_results(
    team: RefreshGroup, results: Mapping[str, R], device: torch.device
) -> dict[str, R]:
    """Return the results of all processes; in one order, since owners hold consecutive layers."""
    parts = team.all_gather(copy_to_device(dict(results), torch.device("cpu")))
    return {name: copy_to_device(x, device) for part in parts for name, x in part.items()}


def assign_owners(costs: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Return the process that finishes each layer.

    A process owns consecutive layers, which often share a factor, at about equal cost.

    Args:
        costs: of the layers that each process knows.
    """
    known: dict[str, float] = {}
    for own_costs in costs:
        for name, cost in own_costs.items():
            known[name] = max(cost, known.get(name, 0.0))
    total = sum(known.values())
    done = 0.0
    owners: dict[str, int] = {}
    for name, cost in known.items():
        owners[name] = 0
        if total > 0:
            owners[name] = min(len(costs) - 1, int(len(costs) * (done + cost / 2) / total))
        done += cost
    return owners


def copy_to_device(value: T, device: torch.device) -> T:
    """Return a copy of a value with every tensor in it on a device.

    An object that several parts of the value hold stays one object.
    """
    known: dict[int, Any] = {}

    def copy_once(x: Any) -> Any:
        if id(x) not in known:
            known[id(x)] = _copy_value(x, device, copy_once)
        return known[id(x)]

    return cast(T, copy_once(value))


def _copy_value(x: Any, device: torch.device, copy_part: Callable[[Any], Any]) -> Any:
    if isinstance(x, Tensor):
        return x.detach().to(device)
    if isinstance(x, torch.device):
        return device
    is_own_class = is_dataclass(x) or type(x).__module__.startswith("dpkfc.")
    if hasattr(x, "__dict__") and is_own_class and not isinstance(x, type):
        twin = copy.copy(x)
        for name, part in vars(x).items():
            object.__setattr__(twin, name, copy_part(part))
        return twin
    if isinstance(x, Mapping):
        return {key: copy_part(part) for key, part in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(copy_part(part) for part in x)
    return x


def check_same_probe(digests: Sequence[str]) -> None:
    """Refuse, on every process, a probe whose hashes differ between the processes.

    Raises:
        RuntimeError: naming the first process whose hash differs from that of rank 0.
    """
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise RuntimeError(
                f"the probe returns other inputs on rank {rank} than on rank 0; "
                "sample(n, generator) must depend on its generator alone"
            )


def probe_digest(inputs: Inputs, labels: Tensor | None) -> str:
    """Return a hash of what a probe has returned."""
    digest = hashlib.sha256()
    for name, x in [*tensors(inputs), ("labels", labels)]:
        if x is not None:
            digest.update(f"{name}{x.dtype}{tuple(x.shape)}".encode())
            flat = x.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
Capture = Callable[[nn.Module, Callable[[nn.Module], Tensor]], Mapping[str, Block]]
ProbeLoss = Callable[[Any, torch.Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """A pass over a probe that shows the curvature of a model.

    Attributes:
        probe: source of inputs.
        size: examples in total, a public constant.
        chunk: examples in one forward pass.
        labels, likelihood: the loss, see `probe_loss`.
        loss: maps (model output, generator) to losses `[N]` instead.
        seed, step: name the random stream.
        within: no forward pass crosses a multiple of this number of examples, None for any.
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
class ProbeMicrobatch:
    """One micro-batch of a probe after its backward pass.

    Attributes:
        blocks: layer name to the layer's contribution; a mapping may form contributions on demand.
        rows: the examples of the probe in it.
        mask: True `[n, T]` at the positions that are text, None if the inputs have no mask.
        note: what became of labels that do not fit the model's output.
        differentiated: whether there was a backward pass. Without one, blocks show only the inputs
            of layers.
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

    def visit(self, add: Callable[[str, Block], None]) -> None:
        """Give every layer's block to a function, one at a time, and name the layer in its errors.

        Raises:
            ValueError: of the function.
        """
        for name in self.blocks:
            block = self.blocks[name]
            try:
                add(name, block)
            except ValueError as error:
                raise ValueError(f"layer '{name}': {error}") from error
            # Otherwise this block stays in memory next to the next one.
            del block


def public_generator(seed: int, step: int, purpose: str = "probe") -> torch.Generator:
    """Return a random stream of one refresh: repeatable, public, and separate from all others."""
    digest = hashlib.sha256(f"dpkfc {purpose}, seed {seed}, step {step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside; restore modes, buffers and the global random state afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            buffers.append((module, name, buffer, buffer.detach().clone()))
    device = device_of(model)
    devices = [device] if device.type == "cuda" else []
    try:
        model.eval()
        # cuDNN differentiates recurrent layers in training mode only. Without dropout both modes
        # give the same result.
        for module, _ in modes:
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
                # torch.equal does not take sparse tensors.
                is_sparse = buffer.layout != torch.strided
                if is_sparse or not torch.equal(buffer, before):
                    buffer.copy_(before)


def run_probe(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    first: int = 0,
    *,
    stop: int | None = None,
    gradients_from: int = 0,
    on_sample: Callable[[Inputs, Tensor | None], None] | None = None,
) -> Iterator[ProbeMicrobatch]:
    """Yield the layers' contributions on the probe by micro-batch; every call replays the probe.

    A micro-batch with fewer examples comes first, so that the last one is full. Delete each
    micro-batch before you ask for the next, or both are in memory.

    Args:
        model: should be inside `preserve_model`.
        capture: maps (model, loss) to layer name and block, in the per-example scale.
        spec: what to run.
        first: skips the examples before this one.
        stop: skips this example and those after it; None for none.
        gradients_from: the examples before this one have no backward pass: `capture` is called
            without gradients.
        on_sample: called with all inputs and labels of the probe.

    Raises:
        ValueError: inputs that the model cannot take, or an output or a loss that is not finite or
            has another number of examples.
    """
    generator = public_generator(spec.seed, spec.step)
    inputs, labels = _sample(spec, generator)
    if on_sample is not None:
        on_sample(inputs, labels)
    randomness = ProbeRandomness(generator, spec.size)
    # All labels of the probe decide how labels are used, not the ones that were sampled.
    stored = spec.probe.stored_labels
    source = _LabelSource(labels if stored is None else stored)
    cuts = (gradients_from, *range(0, spec.size, spec.within or spec.size))
    last = spec.size if stop is None else stop
    for rows in _micro_batches(first, last, spec.chunk, cuts):
        chosen = _refine(spec, model, move_to_model(select(inputs, rows), model), rows)
        mask = padding_mask(chosen, spec.probe.padding_id)
        own_labels = None if labels is None else labels[rows]
        loss = _loss_of(spec, chosen, own_labels, randomness, rows=rows, mask=mask, source=source)
        differentiated = rows.stop > gradients_from
        # No local name holds the blocks, or they would stay in memory next to the next ones.
        yield ProbeMicrobatch(
            _capture_blocks(model, capture, loss, differentiated),
            rows,
            mask,
            source.note,
            differentiated,
        )


def _capture_blocks(
    model: nn.Module,
    capture: Capture,
    loss: Callable[[nn.Module], Tensor],
    differentiated: bool,
) -> Mapping[str, Block]:
    with torch.set_grad_enabled(differentiated):
        return capture(model, loss)


def _micro_batches(first: int, stop: int, chunk: int, cuts: Iterable[int]) -> Iterator[slice]:
    """Yield slices of at most `chunk` examples from `first` to `stop`; none crosses a cut."""
    inner = {cut for cut in cuts if first < cut < stop}
    for low, high in pairwise(sorted({first, stop} | inner)):
        for end in reversed(range(high, low, -chunk)):
            yield slice(max(low, end - chunk), end)


def _refine(spec: ProbeSpec, model: nn.Module, inputs: Inputs, rows: slice) -> Inputs:
    """Return inputs, moved towards classes by a probe that does so, with its own random stream."""
    if not spec.probe.is_refined:
        return inputs
    if spec.loss is not None or spec.likelihood == "gaussian":
        loss_name = "the likelihood 'gaussian'" if spec.loss is None else "a loss of your own"
        raise ValueError(
            f"{type(spec.probe).__name__} moves inputs towards classes, and {loss_name} has none; "
            "give its probe itself"
        )
    targets = ProbeRandomness(public_generator(spec.seed, spec.step, "refine"), spec.size)

    def losses(x: Tensor, numbers: slice) -> Tensor:
        output = _call_on_probe(model, x, spec.probe)
        return likelihood_loss(
            spec.likelihood, output, labels="uniform", given=None, draws=targets, rows=numbers
        )

    return spec.probe.refine(inputs, losses, rows)


@dataclass
class _LabelSource:
    """All labels that decide whether given labels are used, and what became of them."""

    labels: Tensor | None
    note: str = ""

    def kind(self, spec: ProbeSpec, output: Any) -> str:
        """Return where labels come from: the given ones, unless one does not fit the head."""
        if spec.labels != "given" or self.labels is None:
            return spec.labels
        if labels_fit(spec.likelihood, output, self.labels):
            return spec.labels
        if not self.note:
            self.note = (
                "the probe's labels do not fit the model's output: labels were drawn from the model"
            )
            _log.warning("%s", self.note)
        return "model"


def _sample(spec: ProbeSpec, generator: torch.Generator) -> tuple[Inputs, Tensor | None]:
    """Return what the probe samples, or raise an error that names the probe."""
    kind = type(spec.probe).__name__
    sample = spec.probe.sample(spec.size, generator)
    if not isinstance(sample, tuple) or len(sample) != 2:
        raise ValueError(
            f"{kind}.sample() must return inputs and labels (or None), got a "
            f"{type(sample).__name__}"
        )
    inputs, labels = named_inputs(sample[0]), sample[1]
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    if not all(isinstance(x, Tensor) for x in values):
        raise ValueError(
            f"{kind}.sample() must return a tensor or a mapping of tensors, got "
            f"{type(inputs).__name__}"
        )
    if examples(inputs) != spec.size:
        raise ValueError(f"the probe {kind} returned {examples(inputs)} examples, not {spec.size}")
    return inputs, labels


def digest_of_probes(specs: Iterable[ProbeSpec]) -> str:
    """Return a hash of all that probes sample for a refresh, without running the model."""
    digest = ""
    with torch.random.fork_rng(devices=[]):
        for spec in specs:
            digest += probe_digest(*_sample(spec, public_generator(spec.seed, spec.step)))
    return digest


class _OutOfTable(ValueError):
    """A row that an embedding does not have."""


def _check_ids(name: str, probe: str) -> Callable[..., None]:
    """Return a hook that refuses ids which the embedding `name` does not have."""

    def hook(table: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids = args[0] if args else keywords["input"]
        rows = cast(nn.Embedding, table).num_embeddings
        low, high = (int(x) for x in torch.aminmax(ids)) if ids.numel() else (0, 0)
        if low < 0 or high >= rows:
            raise _OutOfTable(
                f"the probe {probe} reads row {min(low, 0) or high} of the embedding '{name}', "
                f"of {rows} rows; give it the model's vocabulary, length and segments"
            )

    return hook


def _call_on_probe(model: nn.Module, inputs: Inputs, probe: Probe) -> Any:
    """Return the model's output on a probe, or raise an error that describes the inputs."""
    kind = type(probe).__name__
    handles = []
    for name, module in model.named_modules():
        # A subclass with a forward pass of its own may take something else than ids.
        if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            hook = _check_ids(name, kind)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        return call(model, inputs)
    except _OutOfTable:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        shapes = (f"{name} {tuple(x.shape)} {x.dtype}".strip() for name, x in tensors(inputs))
        given = ", ".join(shapes)
        hint = f": {probe.call_hint}" if isinstance(error, TypeError) else ""
        raise ValueError(
            f"the model cannot be called on what the probe {kind} gives it ({given}): {error}; "
            f"match shape, dtype and names of private examples{hint}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _loss_of(
    spec: ProbeSpec,
    inputs: Inputs,
    labels: Tensor | None,
    randomness: ProbeRandomness,
    *,
    rows: slice,
    mask: Tensor | None,
    source: _LabelSource,
) -> Callable[[nn.Module], Tensor]:
    """Return the function for `capture`: the per-example losses of these probe examples."""
    size = rows.stop - rows.start

    def loss(model: nn.Module) -> Tensor:
        output = _call_on_probe(model, inputs, spec.probe)
        if spec.loss is None:
            losses = likelihood_loss(
                spec.likelihood,
                output,
                labels=source.kind(spec, output),
                given=labels,
                draws=randomness,
                rows=rows,
                mask=mask,
            )
        else:
            losses = spec.loss(output, randomness.generator)
        if losses.shape != (size,):
            raise ValueError(
                f"the probe's loss returned shape {tuple(losses.shape)} for {size} examples; "
                "it must return one loss an example, [batch]"
            )
        if not torch.isfinite(losses).all():
            raise ValueError(
                "the probe's loss contains NaN or infinity; check the model's output on the probe"
            )
        return losses

    return loss
