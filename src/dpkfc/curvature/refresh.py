"""Run one refresh: a pass over a probe, its factors, and the one number that scales the metric.

The model is left exactly as it was. `private_step.PreconditionerManager.refresh` decides that a
refresh is due and calls `kfac.KFAC.build`, which calls the functions here.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.curvature.factors import FactorAccumulator, FactorCache, largest_entry
from dpkfc.curvature.layer_factors import (
    FactorOptions,
    LayerAccumulator,
    LayerFactors,
    RowSubsampler,
    probe_norms,
)
from dpkfc.curvature.probes import (
    Inputs,
    Probe,
    call,
    device_of,
    examples,
    hash_tensor,
    move_to_model,
    named_inputs,
    padding_mask,
    select,
    tensors,
)
from dpkfc.linalg.blocks import Block, Blocks
from dpkfc.linalg.metric import Metric, NamedTensors, Tensors
from dpkfc.memory import is_out_of_memory

# --------------------------------------------------------------------------------------------------
# The loss on a probe: a likelihood of the model's output, with labels from a public random stream.
#
# With labels drawn from the model's own predictive distribution the output gradients are those of
# the Fisher information (one Monte-Carlo draw). No label of a private example is used.
#
# Outputs `[N, K]` and `[N, T, K]` have the classes on the last axis, `[N, K, *spatial]` with two or
# more spatial axes on the second. The loss of an example is the mean over its positions, as a
# training loss should be. With a padding mask the mean is over its text positions, and the others
# have no gradient.
#
# Logits of a language model are large, `[N, T, 50 000]`. Labels and cross-entropy are computed a
# few rows at a time, and the only copy of the logits' size is their gradient.

LABELS = ("model", "uniform", "given")
LIKELIHOODS = ("categorical", "gaussian", "bernoulli")
_IGNORED = -100
_PIECE = 1 << 20  # logits in one piece


class ProbeRandomness:
    """Random numbers of a whole probe, by rows: they do not depend on the micro-batch size.

    Args:
        generator: the probe's stream.
        total: examples in the probe.
    """

    def __init__(self, generator: torch.Generator, total: int) -> None:
        self.generator = generator
        self.total = total
        self._numbers: NamedTensors = {}

    def rows(self, kind: str, shape: tuple[int, ...], rows: slice, device: torch.device) -> Tensor:
        """Return uniform or normal numbers `[len(rows), *shape]` of these examples; float64."""
        if kind not in self._numbers:
            draw = torch.rand if kind == "uniform" else torch.randn
            size = (self.total, *shape)
            self._numbers[kind] = draw(size, generator=self.generator, dtype=torch.float64)
        numbers = self._numbers[kind]
        if numbers.shape[1:] != shape:
            raise ValueError(
                "the model's output changed its shape between probe micro-batches, "
                f"{tuple(numbers.shape[1:])} to {shape}"
            )
        return numbers[rows].to(device)


@dataclass(frozen=True)
class _Labels:
    """The source of labels: `model` or `uniform` with random numbers of these rows, or given."""

    kind: str
    given: Tensor | None
    draws: ProbeRandomness
    rows: slice

    def numbers(self, distribution: str, like: Tensor) -> Tensor:
        """Return random numbers of these rows in the shape `[N, ...]` of a tensor."""
        shape = tuple(like.shape[1:])
        return self.draws.rows(distribution, shape, self.rows, like.device)


def logits_of(output: Any) -> Tensor:
    """Return the tensor in a model's output: itself, its `.logits` or its item `logits`.

    Raises:
        ValueError: no such tensor.
    """
    logits = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif not isinstance(output, Tensor):
        logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"the model's output on the probe is a {type(output).__name__} without `.logits`; "
            "give KFAC a loss(output, generator) that returns one loss an example"
        )
    return logits


def _finite_logits(output: Any) -> Tensor:
    """Return the tensor in a model's output on a probe, whose values are read.

    Raises:
        ValueError: no such tensor, or one that is not finite.
    """
    logits = logits_of(output)
    if not math.isfinite(largest_entry(logits.detach())):
        raise ValueError(
            f"the model's output on the probe (shape {tuple(logits.shape)}) contains NaN or "
            "infinity; check the probe's scale and the model's parameters"
        )
    return logits


def likelihood_loss(
    likelihood: str,
    output: Any,
    *,
    labels: str,
    given: Tensor | None,
    draws: ProbeRandomness,
    rows: slice,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the negative log-likelihood of each probe example.

    Args:
        likelihood: categorical, gaussian (unit variance) or bernoulli.
        output: what the model returned.
        labels: model, uniform or given.
        given: the probe's own labels of these rows, or None.
        draws: random numbers of the whole probe.
        rows: the numbers of these examples.
        mask: True `[N, T]` at the positions that are text; read only for outputs `[N, T, K]`.

    Returns:
        Losses `[N]`.

    Raises:
        ValueError: labels that are missing or out of range, or an output that does not fit the
            likelihood or the mask.
    """
    logits = _finite_logits(output)
    if labels != "given":
        given = None
    elif given is None:
        raise ValueError(
            "labels='given' needs a probe with labels, such as PublicData(inputs, labels, ...)"
        )
    if logits.dim() < 1 or logits.shape[0] != rows.stop - rows.start:
        raise ValueError(
            f"the model returned shape {tuple(logits.shape)} for {rows.stop - rows.start} probe "
            "examples; the leading axis must be the batch"
        )
    if logits.dim() != 3:
        mask = None
    elif mask is not None and mask.shape != logits.shape[:2]:
        raise ValueError(
            f"the model returned shape {tuple(logits.shape)} for an attention mask of shape "
            f"{tuple(mask.shape)}, so positions differ; give KFAC your own loss(output, generator)"
        )
    source = _Labels(labels, given, draws, rows)
    return _LOSSES[likelihood](logits, source, mask)


def labels_fit(likelihood: str, output: Any, given: Tensor) -> bool:
    """Return whether labels `[n, ...]` have the shape and the classes of an output `[N, ...]`."""
    logits = _finite_logits(output)
    if likelihood != "categorical":
        return given[0].numel() == logits[0].numel()
    if logits.dim() >= 4:
        logits = logits.movedim(1, -1)
    if given.is_floating_point() or given.shape[1:] != logits.shape[1:-1]:
        return False
    counted = given[given != _IGNORED]
    is_class = (counted >= 0) & (counted < logits.shape[-1])
    return bool(is_class.all())


def _categorical(logits: Tensor, source: _Labels, mask: Tensor | None) -> Tensor:
    if logits.dim() < 2 or (logits.dim() < 4 and logits.shape[-1] < 2):
        raise ValueError(
            "a categorical likelihood needs logits [batch, ..., classes], got "
            f"{tuple(logits.shape)}; use likelihood='bernoulli' or 'gaussian'"
        )
    if logits.dim() >= 4:
        logits = logits.movedim(1, -1)
    classes = logits.shape[-1]
    if source.given is not None:
        target = _check_labels(source.given.to(logits.device), logits, classes)
    else:
        uniform = source.numbers("uniform", logits[..., 0])
        target = _draw_classes(logits.detach(), uniform, source.kind)
    counted = target != _IGNORED
    if mask is not None:
        counted = counted & mask.to(target.device)
    rows = (logits.reshape(-1, classes), target.reshape(-1), counted.reshape(-1))
    losses: Tensor = _CrossEntropy.apply(*rows)
    losses = losses.view(target.shape)
    if target.dim() == 1:
        return losses
    totals = losses.flatten(1).sum(1)
    counts = counted.flatten(1).sum(1)
    return totals / counts.clamp(min=1)


class _CrossEntropy(torch.autograd.Function):
    """−log softmax(logits) at the target `[M]`, zero for a row that does not count.

    The backward pass needs only the logits and writes one tensor of their size. Torch's own
    cross-entropy takes three.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        target = target.clamp(min=0).unsqueeze(1)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # Without any rows there are no pieces.
        totals = [logits.new_zeros(0, dtype=dtype)]
        for x in _pieces(logits):
            total = torch.logsumexp(x.to(dtype), 1)
            totals.append(total)
        normaliser = torch.cat(totals)
        ctx.save_for_backward(logits, target, counted, normaliser)
        chosen = logits.gather(1, target)
        losses = normaliser - chosen.squeeze(1)
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, target, counted, normaliser = ctx.saved_tensors
        weight = gradient.masked_fill(~counted, 0.0).unsqueeze(1)
        out = torch.empty_like(logits)
        start = 0
        for x in _pieces(logits):
            rows = slice(start, start + len(x))
            own_target = target[rows]
            logarithms = x.to(normaliser.dtype) - normaliser[rows].unsqueeze(1)
            p = torch.exp(logarithms)
            ones = p.new_ones(own_target.shape)
            p.scatter_add_(1, own_target, -ones)
            p.mul_(weight[rows])
            out[rows] = p
            start = rows.stop
        return out, None, None


def _pieces(rows: Tensor) -> Iterator[Tensor]:
    """Yield rows `[M, K]` a few at a time."""
    step = max(1, _PIECE // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step]


def _draw_classes(logits: Tensor, uniform: Tensor, labels: str) -> Tensor:
    """Return classes by inverse transform of one uniform number a position."""
    classes = logits.shape[-1]
    if labels == "uniform":
        return (uniform * classes).long().clamp(max=classes - 1)
    # Without any rows there are no pieces.
    pieces = [torch.zeros(0, 1).to(uniform.device, torch.int64)]
    start = 0
    flat = uniform.reshape(-1, 1)
    for x in _pieces(logits.reshape(-1, classes)):
        stop = start + len(x)
        weights = torch.softmax(x.double(), -1)
        cumulative = weights.cumsum(-1)
        pieces.append(torch.searchsorted(cumulative, flat[start:stop]))
        start = stop
    numbers = torch.cat(pieces).view(uniform.shape)
    return numbers.clamp(max=classes - 1)


def _check_labels(given: Tensor, logits: Tensor, classes: int) -> Tensor:
    if given.shape != logits.shape[:-1] or given.is_floating_point():
        raise ValueError(
            f"the probe's labels have shape {tuple(given.shape)} and dtype {given.dtype}, but the "
            f"logits need integer labels of shape {tuple(logits.shape[:-1])}"
        )
    counted = given[given != _IGNORED]
    if counted.numel() and not (0 <= int(counted.min()) and int(counted.max()) < classes):
        raise ValueError(
            f"the probe's labels run from {int(counted.min())} to {int(counted.max())}, but the "
            f"model has {classes} classes; relabel the public data or use labels='model'"
        )
    return given.long()


def _gaussian(logits: Tensor, source: _Labels, mask: Tensor | None) -> Tensor:
    if source.given is not None:
        target = _match_shape(source.given, logits)
    else:
        noise = source.numbers("normal", logits).to(logits.dtype)
        target = logits.detach() + noise
    squares = (logits - target).square()
    return _mean_over_outputs(0.5 * squares, mask)


def _bernoulli(logits: Tensor, source: _Labels, mask: Tensor | None) -> Tensor:
    if source.given is not None:
        target = _match_shape(source.given, logits)
    else:
        uniform = source.numbers("uniform", logits)
        is_one = uniform < 0.5
        if source.kind == "model":
            probability = torch.sigmoid(logits.detach().double())
            is_one = uniform < probability
        target = is_one.to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return _mean_over_outputs(losses, mask)


def _match_shape(given: Tensor, logits: Tensor) -> Tensor:
    if given.numel() != logits.numel():
        shapes = f"{tuple(given.shape)}, the model's output {tuple(logits.shape)}"
        raise ValueError(f"the probe's labels have shape {shapes}; they must match")
    return given.to(logits).view_as(logits)


def _mean_over_outputs(losses: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        counted = mask.to(losses)
        totals = losses.mean(2) * counted
        counts = counted.sum(1)
        return totals.sum(1) / counts.clamp(min=1)
    if losses.dim() == 1:
        return losses
    return losses.flatten(1).mean(1)


_LOSSES: dict[str, Callable[[Tensor, _Labels, Tensor | None], Tensor]] = {
    "categorical": _categorical,
    "gaussian": _gaussian,
    "bernoulli": _bernoulli,
}


# --------------------------------------------------------------------------------------------------
# The pass.

_log = logging.getLogger(__name__)
Capture = Callable[[nn.Module, Callable[[nn.Module], Tensor]], Blocks]
ProbeLoss = Callable[[Any, torch.Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """A pass over a probe that shows the curvature of a model.

    Attributes:
        probe: source of inputs.
        size: examples in total, a public constant.
        chunk: examples in one forward pass.
        labels, likelihood: the loss, see `likelihood_loss`.
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

    blocks: Blocks
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
    text = f"dpkfc {purpose}, seed {seed}, step {step}"
    digest = hashlib.sha256(text.encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    return torch.Generator().manual_seed(number)


def run_probe(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    part: slice | None = None,
    *,
    gradients_from: int = 0,
) -> Iterator[ProbeMicrobatch]:
    """Yield the layers' contributions on the probe by micro-batch; every call replays the probe.

    A micro-batch with fewer examples comes first, so that the last one is full. Delete each
    micro-batch before you ask for the next, or both are in memory.

    Args:
        model: should be inside `preserve_model`.
        capture: maps (model, loss) to layer name and block, in the per-example scale.
        spec: what to run.
        part: the examples to run, None for all.
        gradients_from: the examples before this one have no backward pass: `capture` is called
            without gradients.

    Raises:
        ValueError: inputs that the model cannot take, or an output or a loss that is not finite or
            has another number of examples.
    """
    generator = public_generator(spec.seed, spec.step)
    inputs, labels = _sample(spec, generator)
    source = _ProbeLoss(spec, labels, ProbeRandomness(generator, spec.size))
    cuts = (gradients_from, *range(0, spec.size, spec.within or spec.size))
    part = part or slice(0, spec.size)
    for rows in _micro_batches(part, spec.chunk, cuts):
        chosen = move_to_model(select(inputs, rows), model)
        chosen = _refine(spec, model, chosen, rows)
        mask = padding_mask(chosen, spec.probe.padding_id)
        loss = partial(source.losses, chosen, rows, mask)
        differentiated = rows.stop > gradients_from
        with torch.set_grad_enabled(differentiated):
            blocks = capture(model, loss)
        microbatch = ProbeMicrobatch(blocks, rows, mask, source.note, differentiated)
        yield microbatch
        # Otherwise these stay in memory next to the next ones.
        del microbatch, blocks


def _micro_batches(rows: slice, chunk: int, cuts: Iterable[int]) -> Iterator[slice]:
    """Yield slices of at most `chunk` of the examples `rows`; none crosses a cut."""
    inner = {cut for cut in cuts if rows.start < cut < rows.stop}
    bounds = sorted({rows.start, rows.stop} | inner)
    for low, high in pairwise(bounds):
        ends = range(high, low, -chunk)
        for end in reversed(ends):
            start = max(low, end - chunk)
            yield slice(start, end)


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
    generator = public_generator(spec.seed, spec.step, "refine")
    targets = ProbeRandomness(generator, spec.size)

    def losses(x: Tensor, numbers: slice) -> Tensor:
        output = _call_on_probe(model, x, spec.probe)
        return likelihood_loss(
            spec.likelihood, output, labels="uniform", given=None, draws=targets, rows=numbers
        )

    return spec.probe.refine(inputs, losses, rows)


def _sample(spec: ProbeSpec, generator: torch.Generator) -> tuple[Inputs, Tensor | None]:
    """Return what the probe samples, or raise an error that names the probe."""
    kind = type(spec.probe).__name__
    sample = spec.probe.sample(spec.size, generator)
    if not isinstance(sample, tuple) or len(sample) != 2:
        raise ValueError(
            f"{kind}.sample() must return inputs and labels (or None), got a "
            f"{type(sample).__name__}"
        )
    inputs, labels = sample
    inputs = named_inputs(inputs)
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
    digest = hashlib.sha256()
    with torch.random.fork_rng(devices=[]):
        for spec in specs:
            generator = public_generator(spec.seed, spec.step)
            inputs, labels = _sample(spec, generator)
            for name, x in tensors(inputs):
                hash_tensor(digest, name, x)
            if labels is not None:
                hash_tensor(digest, "labels", labels)
    return digest.hexdigest()


class _OutOfTable(ValueError):
    """A row that an embedding does not have."""


def _check_ids(name: str, probe: str) -> Callable[..., None]:
    """Return a hook that refuses ids which the embedding `name` does not have."""

    def hook(table: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids = args[0] if args else keywords["input"]
        rows = cast(nn.Embedding, table).num_embeddings
        if not ids.numel():
            return
        low, high = map(int, torch.aminmax(ids))
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
        shapes = []
        for name, x in tensors(inputs):
            shape = f"{name} {tuple(x.shape)} {x.dtype}"
            shapes.append(shape.strip())
        given = ", ".join(shapes)
        hint = f": {probe.call_hint}" if isinstance(error, TypeError) else ""
        raise ValueError(
            f"the model cannot be called on what the probe {kind} gives it ({given}): {error}; "
            f"match shape, dtype and names of private examples{hint}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _ProbeLoss:
    """The loss on one pass over a probe.

    Attributes:
        spec: of the pass.
        labels: of all its examples, or None.
        randomness: of its examples.
        note: what became of labels that do not fit the model's output.
    """

    spec: ProbeSpec
    labels: Tensor | None
    randomness: ProbeRandomness
    note: str = ""

    def losses(self, inputs: Inputs, rows: slice, mask: Tensor | None, model: nn.Module) -> Tensor:
        """Return the per-example losses of some examples, as `capture` asks for them."""
        spec = self.spec
        output = _call_on_probe(model, inputs, spec.probe)
        if spec.loss is None:
            losses = likelihood_loss(
                spec.likelihood,
                output,
                labels=self._choose_labels(output),
                given=None if self.labels is None else self.labels[rows],
                draws=self.randomness,
                rows=rows,
                mask=mask,
            )
        else:
            losses = spec.loss(output, self.randomness.generator)
        size = rows.stop - rows.start
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

    def _choose_labels(self, output: Any) -> str:
        """Return where labels come from: the given ones, unless one does not fit the head.

        All labels of the probe decide this, not the ones that were sampled.
        """
        spec = self.spec
        stored = spec.probe.stored_labels
        labels = self.labels if stored is None else stored
        if spec.labels != "given" or labels is None:
            return spec.labels
        if labels_fit(spec.likelihood, output, labels):
            return spec.labels
        if not self.note:
            self.note = (
                "the probe's labels do not fit the model's output: labels were drawn from the model"
            )
            _log.warning("%s", self.note)
        return "model"


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


def gather_from_all(team: RefreshGroup | None, work: Callable[[], T]) -> list[T]:
    """Run work on every process, and return all results in their order."""
    if team is None:
        return [work()]
    return team.all_gather(team.run_on_all(work))


def rows_of_process(team: RefreshGroup | None, size: int, first: int = 0) -> slice:
    """Return the consecutive examples from `first` to `size` that this process runs.

    All processes run about the same number.
    """
    if team is None:
        return slice(first, size)
    count = size - first
    start = count * team.rank // team.world_size
    stop = count * (team.rank + 1) // team.world_size
    return slice(first + start, first + stop)


def send_to_owners(
    team: RefreshGroup, parts: Mapping[str, P], cost: Callable[[P], float]
) -> dict[str, list[P]]:
    """Send the parts of each layer to its owner.

    Args:
        team: the processes.
        parts: layer name to the sums of this process; layers that its examples do not reach may be
            missing.
        cost: cost of finishing a layer, in any unit.

    Returns:
        The layers that this process owns to their parts, in the order of the processes, on the CPU.
    """
    costs = {name: cost(part) for name, part in parts.items()}
    owners = assign_owners(team.all_gather(costs))
    own: dict[str, list[P]] = defaultdict(list)
    cpu = torch.device("cpu")
    for owner in range(team.world_size):
        own_parts = {name: part for name, part in parts.items() if owners[name] == owner}
        sent = copy_to_device(own_parts, cpu)
        received = team.gather(sent, owner)
        for of_process in received or ():
            for name, part in of_process.items():
                own[name].append(part)
    # In the order of the layers.
    return {name: own[name] for name in owners if name in own}


def finish_on_owners(
    finish: Callable[[], dict[str, R]], model: nn.Module, team: RefreshGroup | None
) -> dict[str, R]:
    """Return what all processes make of the layers that they own.

    Args:
        finish: returns layer name to result, for the layers of this process.
        model: on whose device the results are wanted.
        team: the processes, None for this one alone.

    Returns:
        The same on every process, in one order, since owners hold consecutive layers.
    """
    if team is None:
        return finish()
    own = copy_to_device(team.run_on_all(finish), torch.device("cpu"))
    merged = {}
    for part in team.all_gather(own):
        for name, x in part.items():
            merged[name] = copy_to_device(x, device_of(model))
    return merged


def assign_owners(costs: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Return the process that finishes each layer.

    A process owns consecutive layers, which often share a factor, at about equal cost.

    Args:
        costs: of the layers that each process knows.
    """
    known: dict[str, float] = defaultdict(float)
    for own_costs in costs:
        for name, cost in own_costs.items():
            known[name] = max(cost, known[name])
    total = sum(known.values())
    processes = len(costs)
    done = 0.0
    owners = {}
    for name, cost in known.items():
        middle = done + cost / 2
        owner = 0
        if total > 0:
            owner = int(processes * middle / total)
        owners[name] = min(processes - 1, owner)
        done += cost
    return owners


def copy_to_device(value: T, device: torch.device) -> T:
    """Return a copy of a value with every tensor in it on a device.

    An object that several parts of the value hold stays one object.
    """
    known = {}

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
    is_value = hasattr(x, "__dict__") and not isinstance(x, type)
    if is_own_class and is_value:
        twin = copy.copy(x)
        for name, part in vars(x).items():
            object.__setattr__(twin, name, copy_part(part))
        return twin
    if isinstance(x, Mapping):
        return {key: copy_part(part) for key, part in x.items()}
    if isinstance(x, (list, tuple)):
        parts = map(copy_part, x)
        return type(x)(parts)
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


# --------------------------------------------------------------------------------------------------
# Sums of factors that refreshes keep for the next one.
#
# With share β of the past, rows x of refresh t and n_t examples in it, the factor of a side is
#
#     S_t / N_t,     S_t = β S_{t−1} + Σ x xᵀ,     N_t = β N_{t−1} + n_t,
#
# a mean of the refreshes' factors with weights β^(age), which needs no correction at the start.
# About 1/(1 − β) probes stand behind every factor, so probes can be small. Everything kept is a
# function of probes and released parameters.
#
# Source: the running average of Martens and Grosse (2015), section 5, with the weights of Adam's
# corrected means.

History = Mapping[str, Mapping[str, FactorAccumulator]]
"""Layer to side to sums."""
_KEY = "running"


def keep_history(layer: LayerAccumulator, factors: LayerFactors) -> dict[str, FactorAccumulator]:
    """Return the sums of a layer by side, with the eigenvectors from which the next one starts."""
    kept = {}
    for side, sums in layer.sides.items():
        kept[side] = sums.detached_copy()
        kept[side].warm_start_from(factors.sides[side])
    return kept


def measure_drift(
    layers: Mapping[str, LayerAccumulator], past: History, team: RefreshGroup | None = None
) -> float:
    """Measure how far the factors of a probe lie from those that are kept.

    Args:
        layers: sums of this probe; of several processes, the layers that this one owns.
        past: sums that are kept of all layers.
        team: the processes, None for this one alone.

    Returns:
        The mean over all sides of ‖A/tr A − B/tr B‖ ÷ ‖A/tr A‖ (Frobenius), A kept and B new;
        infinite for a new layer. Two probes of n examples at the same parameters differ by their
        sampling noise: about √(1/n) times a number that grows with the effective rank.
    """

    def measure_own() -> list[float]:
        distances = []
        for name, layer in layers.items():
            for side, sums in layer.sides.items():
                distance = math.inf
                if name in past:
                    distance = past[name][side].distance(sums)
                distances.append(distance)
        return distances

    distances = list(chain.from_iterable(gather_from_all(team, measure_own)))
    return sum(distances) / max(1, len(distances))


def history_state(histories: Sequence[History]) -> tuple[NamedTensors, list[list[Any]]]:
    """Return tensors and JSON-able values for the state of a preconditioner, one entry a probe."""
    tensors = {}
    values: list[list[Any]] = []
    for probe, layers in enumerate(histories):
        for name, sides in layers.items():
            for side, sums in sides.items():
                own_tensors, own_values = sums.state()
                number = len(values)
                for key, tensor in own_tensors.items():
                    tensors[f"{_KEY}.{number}.{key}"] = tensor
                values.append([probe, name, side, sorted(own_tensors), own_values])
    return tensors, values


def history_from_state(tensors: Tensors, values: Sequence[Sequence[Any]]) -> tuple[History, ...]:
    """Return the histories whose state `history_state` returned.

    Raises:
        ValueError: a tensor is missing.
    """
    histories: dict[int, dict[str, dict[str, FactorAccumulator]]] = {}
    for i, (probe, name, side, keys, own_values) in enumerate(values):
        try:
            own_tensors = {key: tensors[f"{_KEY}.{i}.{key}"] for key in keys}
        except KeyError as error:
            raise ValueError(
                f"not the state of a preconditioner, or a damaged one: {error!r}"
            ) from error
        sides = histories.setdefault(probe, {}).setdefault(name, {})
        sides[side] = FactorAccumulator.restore(own_tensors, own_values)
    return tuple(histories.values())


# --------------------------------------------------------------------------------------------------
# What one pass measures, and the number that scales the metric.

SCALE_SIZE = 64  # last probe examples, for the two medians


@dataclass(frozen=True, kw_only=True)
class ProbeStatistics:
    """Sums over one pass through the probe.

    Attributes:
        layers: layer name to its factors, not decomposed yet, or to what `measure` has started.
        unknown: layer name to the kind of a block without factors; the layer keeps the identity.
        last: the last micro-batch, if it holds all examples that the scale is measured on. None
            otherwise, and if several processes each ran a part of the probe.
        note: what became of labels that do not fit the model's output.
    """

    layers: Mapping[str, Any]
    unknown: Mapping[str, str]
    last: ProbeMicrobatch | None
    note: str = ""


def measure(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    options: FactorOptions,
    team: RefreshGroup | None = None,
    *,
    start: Callable[..., Any] = LayerAccumulator,
) -> ProbeStatistics:
    """Run the probe and add up factors; of several processes, each runs its own examples.

    With `sides="input"` only the last examples, on which the scale is measured too, are
    differentiated. They give the size of output gradients and the factors of layers without an
    input factor (norms, recurrent layers, ties).

    Args:
        model: should be inside `preserve_model`.
        capture: maps (model, loss) to layer name and block.
        spec: what to run.
        options: how factors are formed.
        team: the processes that share the refresh, None for this one alone.
        start: makes the empty sums of a layer; takes the arguments of `LayerAccumulator`.

    Raises:
        ValueError: a layer's contribution on the probe is not finite or does not fit.
        RuntimeError: the probe does not return the same inputs on every process.
    """
    if team is None:
        return _measure_own(model, capture, spec, options, None, start)
    check_same_probe(gather_from_all(team, partial(digest_of_probes, [spec])))
    own = team.run_on_all(lambda: _measure_own(model, capture, spec, options, team, start))
    unknown: dict[str, str] = {}
    note = ""
    for own_unknown, own_note in team.all_gather((dict(own.unknown), own.note)):
        unknown |= own_unknown
        note = note or own_note
    return ProbeStatistics(layers=own.layers, unknown=unknown, last=None, note=note)


def _measure_own(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    options: FactorOptions,
    team: RefreshGroup | None,
    start: Callable[..., Any],
) -> ProbeStatistics:
    """Return the statistics of this process's examples."""
    generator = public_generator(spec.seed, spec.step, "positions")
    subsampler = RowSubsampler(generator, spec.size, options.rows_per_dim)
    cache = FactorCache()
    layers = {}
    unknown: dict[str, str] = {}
    last = None
    note = ""

    def add(part: ProbeMicrobatch, name: str, block: Block) -> None:
        if block.kind is None:
            unknown[name] = type(block).__name__
            return
        if block.batch_size != part.size:
            raise ValueError(f"capture returned {block.batch_size} examples instead of {part.size}")
        if name not in layers:
            kind = options.kinds.get(name)
            layers[name] = start(block, options, kind, subsampler, cache)
        if part.differentiated:
            layers[name].add(block)
        else:
            layers[name].add_inputs(block)

    rows = rows_of_process(team, spec.size)
    microbatches = run_probe(
        model,
        capture,
        spec,
        rows,
        gradients_from=_scale_from(spec) if options.sides == "input" else 0,
    )
    for part in microbatches:
        subsampler.start(part.rows, part.mask)
        part.visit(partial(add, part))
        cache.forget()
        note = part.note
        last = scale_microbatch(part, spec)
        # Otherwise this micro-batch stays in memory next to the next one.
        del part
    return ProbeStatistics(layers=layers, unknown=unknown, last=last, note=note)


def gather_layers(
    layers: Mapping[str, Any], model: nn.Module, team: RefreshGroup | None
) -> Mapping[str, Any]:
    """Return the sums of all processes for the layers that this one owns, on the model's device."""
    if team is None:
        return layers
    own = {name: layer.detached_copy() for name, layer in layers.items()}
    device = device_of(model)
    parts = send_to_owners(team, own, lambda layer: layer.cost(team.world_size))
    return team.run_on_all(lambda: sum_parts(copy_to_device(parts, device)))


def decompose_layers(
    layers: Mapping[str, LayerAccumulator],
    max_pairs: Callable[[str, str], int | None],
    model: nn.Module,
    team: RefreshGroup | None = None,
    *,
    past: History,
    share: float,
    is_kept: bool = False,
) -> tuple[dict[str, LayerFactors], History]:
    """Return the factors of every layer, and what the next refresh needs of them.

    Of several processes, each decomposes its own layers and sends them to all.

    Args:
        layers: sums of the probe; of several processes, the layers that this one owns.
        max_pairs: maps layer and side to the eigenpairs to compute of a wide side, None for all.
            The trace of the others is kept.
        model: on whose device the factors are wanted.
        team: the processes that share the refresh.
        past: sums of earlier refreshes, of all layers.
        share: weight of the past.
        is_kept: whether the next refresh needs anything.
    """

    def decompose_own() -> dict[str, tuple[LayerFactors, dict[str, FactorAccumulator]]]:
        results = {}
        for name, layer in layers.items():
            total = layer.merge_history(past.get(name, {}), share)
            own_factors = total.result(partial(max_pairs, name))
            kept = keep_history(total, own_factors) if is_kept else {}
            results[name] = (own_factors, kept)
        return results

    factors = {}
    history = {}
    for name, (own_factors, kept) in finish_on_owners(decompose_own, model, team).items():
        factors[name] = own_factors
        if kept:
            history[name] = kept
    return factors, history


def sum_parts(parts: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return layer name to the sum of its parts."""
    cache = FactorCache()
    sums = {}
    for name, (first, *others) in parts.items():
        sums[name] = first.detached_copy(cache)
        for other in others:
            sums[name].merge(other)
    return sums


def probe_scale(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    metric: Metric,
    *,
    last: ProbeMicrobatch | None,
    team: RefreshGroup | None = None,
) -> float:
    """Return median ‖g‖ ÷ median ‖P g‖ over the last probe examples; 1 if a median is zero.

    The last micro-batch gives these examples if it holds enough of them. Otherwise they run through
    the model again, in parts if several processes share the refresh. To avoid that pass, inputs and
    output gradients of all of them would have to stay in memory until the factors are known.
    """
    first = _scale_from(spec)
    if last is not None and last.rows.start <= first:
        plain, mapped = _norms([last], first, metric)
    else:
        rows = rows_of_process(team, spec.size, first)
        microbatches = run_probe(model, capture, spec, rows)
        parts = gather_from_all(team, lambda: _norms(microbatches, rows.start, metric))
        plain, mapped = torch.cat(parts, 1)
    if not plain.numel():
        return 1.0
    ratio = _median(plain) / max(_median(mapped), 1e-300)
    return ratio if 0 < ratio < math.inf else 1.0


def scale_microbatch(part: ProbeMicrobatch, spec: ProbeSpec) -> ProbeMicrobatch | None:
    """Return the micro-batch if it holds all examples that the scale is measured on, else None.

    Other micro-batches are not worth their memory.
    """
    if part.rows.start > _scale_from(spec) or part.rows.stop != spec.size:
        return None
    return part


def _scale_from(spec: ProbeSpec) -> int:
    """Return the first example that the scale is measured on."""
    return max(0, spec.size - SCALE_SIZE)


def _norms(parts: Iterable[ProbeMicrobatch], first: int, metric: Metric) -> Tensor:
    """Return norms of the examples from `first` on, without the metric and with it, `[2, n]`."""
    norms = [torch.zeros(2, 0, dtype=torch.float64)]
    for part in parts:
        # Without blocks every parameter is used outside of layers and keeps the identity.
        if part.blocks:
            start = max(first, part.rows.start)
            last = part.rows.stop - start
            plain, mapped = probe_norms(part.blocks, {}, metric, last=last)
            norms.append(torch.stack([plain, mapped]))
        del part
    return torch.cat(norms, 1)


def _median(norms: Tensor) -> float:
    return float(torch.quantile(norms, 0.5))
