"""Running a probe through a model that is left exactly as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.blocks import Block
from dpkfc.curvature.inputs import Inputs, call, device_of, examples, padding_mask, placed, select
from dpkfc.curvature.likelihood import Draws, likelihood_loss
from dpkfc.curvature.probes import Probe

__all__ = ["Capture", "Piece", "ProbeRun", "blocks_on_probe", "public_generator", "undisturbed"]

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
    """

    probe: Probe
    size: int
    chunk: int
    labels: str
    likelihood: str
    loss: ProbeLoss | None
    seed: int
    step: int


@dataclass(frozen=True)
class Piece:
    """One micro-batch of a probe after its backward pass.

    Attributes:
        blocks: layer name to what the layer contributes; a mapping may form them on demand.
        rows: which examples of the probe these are.
        mask: True `[n, T]` at the positions that are text, None where the inputs do not say.
    """

    blocks: Mapping[str, Block]
    rows: slice
    mask: Tensor | None = None

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
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def blocks_on_probe(model: nn.Module, capture: Capture, run: ProbeRun, first: int = 0) -> Iterator[Piece]:
    """The layers' contributions on the probe, one micro-batch after another; every call replays the same probe.

    The micro-batch with fewer examples, if there is one, comes first: the last one is full.

    Args:
        model: should be inside `undisturbed`.
        capture: maps (model, loss) to layer name and block, in the per-example scale.
        run: what to run.
        first: leaves out the examples before this one.

    Raises:
        ValueError: an output or a loss that is not finite, or of another number of examples.
    """
    generator = public_generator(run.seed, run.step)
    inputs, labels = run.probe.sample(run.size, generator)
    if examples(inputs) != run.size:
        raise ValueError(f"the probe {type(run.probe).__name__} returned {examples(inputs)} examples, not {run.size}")
    draws = Draws(generator, run.size)
    stops = range(run.size, first, -run.chunk)
    for stop in reversed(stops):
        rows = slice(max(first, stop - run.chunk), stop)
        held = placed(select(inputs, rows), model)
        mask = padding_mask(held, getattr(run.probe, "padding", None))
        loss = _loss_of(run, held, None if labels is None else labels[rows], draws, rows=rows, mask=mask)
        with torch.enable_grad():
            blocks = capture(model, loss)
        if not blocks:
            raise ValueError("capture returned no layer: the probe's loss does not depend on any trainable layer")
        yield Piece(blocks, rows, mask)


def _loss_of(
    run: ProbeRun, inputs: Inputs, labels: Tensor | None, draws: Draws, *, rows: slice, mask: Tensor | None
) -> Callable[[nn.Module], Tensor]:
    """The closure handed to `capture`: per-example losses of these probe examples."""
    size = rows.stop - rows.start

    def loss(model: nn.Module) -> Tensor:
        output = call(model, inputs)
        if run.loss is None:
            losses = likelihood_loss(
                run.likelihood, output, labels=run.labels, given=labels, draws=draws, rows=rows, mask=mask
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
