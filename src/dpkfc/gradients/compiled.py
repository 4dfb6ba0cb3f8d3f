"""torch.compile beside the tape: a compiled graph holds the operations of a module and shows no call of the layers in it.

Parts without trainable parameters may be compiled: nothing is recorded in them. Compiled parts with trainable parameters
are refused by name; a compiled function that calls layers (a whole loss function) is cut at every layer; and a graph that
was made where nobody listened is noticed by what autograd reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dpkfc.gradients.layers import Layer
from dpkfc.gradients.sharded import in_graph

__all__ = ["refuse_shortcuts", "refuse_tracing", "shortcuts"]


def refuse_tracing() -> None:
    """Called first in a hook: never a part of a compiled graph.

    A graph would keep the hooks of the one tape that was open when it was made. Where a hook raises while it is traced, the
    compiler cuts its graph there and the layer is called as without it; with fullgraph=True the error is the user's.

    Raises:
        RuntimeError: while a compiler traces.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a layer with trainable parameters cannot be a part of one compiled graph: its calls have to be seen. Compile only "
            "parts without trainable parameters, or leave out fullgraph=True"
        )


def shortcuts(layers: Iterable[Layer], called: set[str]) -> dict[str, Tensor]:
    """Parameters that autograd must not reach, because the tape stands between: name to tensor.

    Args:
        layers: all layers.
        called: names of the layers whose calls were recorded; one of the fallback reaches its parameters as it is.
    """
    watched = [layer for layer in layers if layer.rule != "fallback" or layer.name not in called]
    found = {full: in_graph(layer.tensor(role)) for layer in watched for role, full in layer.parameters.items()}
    return {full: p for full, p in found.items() if p.requires_grad}


def refuse_shortcuts(parameters: Mapping[str, Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Raise where a gradient has reached a parameter past its layer: no clip has bounded what such a use contributes.

    Args:
        parameters: from `shortcuts`.
        gradients: of the losses, one each; None where autograd reaches none.

    Raises:
        ValueError: naming the parameter and the ways out.
    """
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and bool(gradient.to_dense().any()):
            raise ValueError(
                f"the per-example gradient of '{name}' differs from what its layer has shown: the losses depend on it outside "
                "the module that owns it (through F.linear with another module's weight, in loss_fn, in a method other than "
                "forward, or in a graph that torch.compile made earlier): call that module itself, give the parameter to the "
                "module whose forward uses it, or leave the function that calls the layers uncompiled"
            )
