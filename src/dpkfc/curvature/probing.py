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
from dpkfc.curvature.likelihood import Draws, likelihood_loss
from dpkfc.curvature.probes import Probe

__all__ = ["Capture", "ProbeRun", "blocks_on_probe", "public_generator", "undisturbed"]

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


def public_generator(seed: int, step: int) -> torch.Generator:
    """The probe's random stream of one refresh: its own, repeatable, public, and apart from every other stream."""
    digest = hashlib.sha256(f"dpkfc probe, seed {seed}, step {step}".encode()).digest()
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


def device_of(model: nn.Module) -> torch.device:
    """Device of the first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def blocks_on_probe(model: nn.Module, capture: Capture, run: ProbeRun) -> Iterator[Mapping[str, Block]]:
    """The layers' contributions on the probe, one micro-batch after another; every call replays the same probe.

    Args:
        model: should be inside `undisturbed`.
        capture: maps (model, loss) to layer name and block, in the per-example scale.
        run: what to run.

    Raises:
        ValueError: an output or a loss that is not finite, or of another number of examples.
    """
    generator = public_generator(run.seed, run.step)
    inputs, labels = run.probe.sample(run.size, generator)
    if inputs.shape[0] != run.size:
        raise ValueError(f"the probe {type(run.probe).__name__} returned {inputs.shape[0]} examples, not {run.size}")
    draws = Draws(generator, run.size)
    for start in range(0, run.size, run.chunk):
        rows = slice(start, min(run.size, start + run.chunk))
        loss = _loss_of(run, _placed(inputs[rows], model), None if labels is None else labels[rows], draws, rows)
        with torch.enable_grad():
            blocks = capture(model, loss)
        if not blocks:
            raise ValueError("capture returned no layer: the probe's loss does not depend on any trainable layer")
        yield blocks


def _placed(inputs: Tensor, model: nn.Module) -> Tensor:
    dtype = _dtype_of(model) if inputs.is_floating_point() else inputs.dtype
    return inputs.to(device_of(model), dtype)


def _loss_of(
    run: ProbeRun, inputs: Tensor, labels: Tensor | None, draws: Draws, rows: slice
) -> Callable[[nn.Module], Tensor]:
    """The closure handed to `capture`: per-example losses of these probe examples."""

    def loss(model: nn.Module) -> Tensor:
        output = model(inputs)
        if run.loss is None:
            losses = likelihood_loss(run.likelihood, output, labels=run.labels, given=labels, draws=draws, rows=rows)
        else:
            losses = run.loss(output, draws.generator)
        if losses.shape != (inputs.shape[0],):
            raise ValueError(
                f"the probe's loss returned shape {tuple(losses.shape)} for {inputs.shape[0]} examples; "
                "it must return one loss an example, [batch]"
            )
        if not torch.isfinite(losses).all():
            raise ValueError("the probe's loss contains NaN or infinity; check the model's output on the probe")
        return losses

    return loss
