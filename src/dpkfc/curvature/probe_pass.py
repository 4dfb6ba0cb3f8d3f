"""A pass over a probe through a model that is left exactly as it was, and the loss of this pass."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.curvature.probes import (
    Inputs,
    Probe,
    call,
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
        self._numbers: dict[str, Tensor] = {}

    def rows(self, kind: str, shape: tuple[int, ...], rows: slice, device: torch.device) -> Tensor:
        """Return uniform or normal numbers `[len(rows), *shape]` of these examples; float64."""
        if kind not in self._numbers:
            draw = torch.rand if kind == "uniform" else torch.randn
            self._numbers[kind] = draw(
                self.total, *shape, generator=self.generator, dtype=torch.float64
            )
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
        return self.draws.rows(distribution, tuple(like.shape[1:]), self.rows, like.device)


def logits_of(output: Any) -> Tensor:
    """Return the tensor in a model's output: itself, its `.logits` or its item `logits`.

    Raises:
        ValueError: no such tensor, or one that is not finite.
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
    if logits.numel() and not all(torch.isfinite(x) for x in torch.aminmax(logits)):
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
    logits = logits_of(output)
    if labels == "given" and given is None:
        raise ValueError(
            "labels='given' needs a probe with labels, such as PublicData(inputs, labels, ...)"
        )
    if labels != "given":
        given = None
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
    return _LOSSES[likelihood](logits, _Labels(labels, given, draws, rows), mask)


def labels_fit(likelihood: str, output: Any, given: Tensor) -> bool:
    """Return whether labels `[n, ...]` have the shape and the classes of an output `[N, ...]`."""
    logits = logits_of(output)
    if likelihood != "categorical":
        return given[0].numel() == logits[0].numel()
    if logits.dim() >= 4:
        logits = logits.movedim(1, -1)
    if given.is_floating_point() or given.shape[1:] != logits.shape[1:-1]:
        return False
    counted = given[given != _IGNORED]
    if not counted.numel():
        return True
    return 0 <= int(counted.min()) and int(counted.max()) < logits.shape[-1]


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
    flat = logits.reshape(-1, classes)
    losses: Tensor = _CrossEntropy.apply(flat, target.reshape(-1), counted.reshape(-1))
    losses = losses.view(target.shape)
    if target.dim() == 1:
        return losses
    return losses.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)


class _CrossEntropy(torch.autograd.Function):
    """−log softmax(logits) at the target `[M]`, zero for a row that does not count.

    The backward pass needs only the logits and writes one tensor of their size. Torch's own
    cross-entropy takes three.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        target = target.clamp(min=0).unsqueeze(1)
        total = [torch.logsumexp(x.to(_wide(x)), 1) for x in _pieces(logits)]
        normaliser = torch.cat(total) if total else logits.new_zeros(0)
        ctx.save_for_backward(logits, target, counted, normaliser)
        losses = normaliser - logits.gather(1, target).squeeze(1)
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, target, counted, normaliser = ctx.saved_tensors
        weight = gradient.masked_fill(~counted, 0.0).unsqueeze(1)
        out = torch.empty_like(logits)
        start = 0
        for x in _pieces(logits):
            rows = slice(start, start + x.shape[0])
            p = torch.exp(x.to(normaliser.dtype) - normaliser[rows].unsqueeze(1))
            p.scatter_add_(1, target[rows], p.new_full(target[rows].shape, -1.0))
            out[rows] = p.mul_(weight[rows])
            start = rows.stop
        return out, None, None


def _wide(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


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
    step = max(1, _PIECE // classes)
    numbers = uniform.reshape(-1, 1).split(step)
    drawn = []
    for x, u in zip(_pieces(logits.reshape(-1, classes)), numbers, strict=True):
        drawn.append(torch.searchsorted(torch.softmax(x.double(), -1).cumsum(-1), u))
    if not drawn:
        return uniform.long()
    return torch.cat(drawn).view(uniform.shape).clamp(max=classes - 1)


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
    return _mean_over_outputs(0.5 * (logits - target).square(), mask)


def _bernoulli(logits: Tensor, source: _Labels, mask: Tensor | None) -> Tensor:
    if source.given is not None:
        target = _match_shape(source.given, logits)
    else:
        uniform = source.numbers("uniform", logits)
        one = torch.sigmoid(logits.detach().double()) if source.kind == "model" else 0.5
        target = (uniform < one).to(logits.dtype)
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
        return (losses.mean(2) * counted).sum(1) / counted.sum(1).clamp(min=1)
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
Capture = Callable[[nn.Module, Callable[[nn.Module], Tensor]], Mapping[str, Block]]
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


def probe_digest(inputs: Inputs, labels: Tensor | None) -> str:
    """Return a hash of what a probe has returned."""
    digest = hashlib.sha256()
    for name, x in [*tensors(inputs), ("labels", labels)]:
        if x is not None:
            digest.update(f"{name}{x.dtype}{tuple(x.shape)}".encode())
            flat = x.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
