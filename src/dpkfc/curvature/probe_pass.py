"""Run a probe through a model, forward and backward."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from dpkfc.curvature.likelihood import ProbeRandomness, labels_fit, likelihood_loss
from dpkfc.curvature.model_inputs import (
    Inputs,
    call,
    examples,
    hash_tensor,
    move_to_model,
    named_inputs,
    padding_mask,
    select,
    tensors,
)
from dpkfc.curvature.probes import Probe
from dpkfc.linalg.blocks import Block, Blocks
from dpkfc.memory import is_out_of_memory

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
