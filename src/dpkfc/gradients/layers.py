"""Layers: modules that use the same parameters, the rule for their gradients, and their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from dpkfc.tensors import Tensors
from dpkfc.tracking.states import BatchAxis

MATRICES = ("linear", "conv", "embedding", "tied")
"""Rules of layers whose weight and bias are one matrix."""
_NEEDS_PARAMETERS = ("fallback", "recurrent", "custom")
"""Rules whose gradients are computed from the parameters at the time of the pass."""


@dataclass(frozen=True)
class Layer:
    """One module (or several that share their parameters) and the rule for its gradients.

    Attributes:
        name: path of the (first) module in the model; "" is the model itself.
        modules: the module objects that use these parameters.
        rule: linear, conv, embedding, tied (one weight of embeddings and linear layers), norm,
            recurrent, custom (a rule of `register_layer_rule`) or fallback.
        parameters: role inside the module to the parameter's name in the model, trainable ones
            only.
        frozen: roles that are present but not trained.
        paths: role to the parameter's path in the module, where the two differ (the two linear
            layers of attention).
        transposed: the weight of a linear layer is stored as `[d_in, d_out]`.
        is_hooked: its calls are recorded. Otherwise its parameters are followed from where they
            meet the examples.
    """

    name: str
    modules: tuple[nn.Module, ...]
    rule: str
    parameters: dict[str, str]
    frozen: tuple[str, ...] = ()
    paths: dict[str, str] = field(default_factory=dict)
    transposed: bool = False
    is_hooked: bool = True

    @property
    def module(self) -> nn.Module:
        """Return the first module."""
        return self.modules[0]

    @property
    def groups(self) -> int:
        """Return the groups of a grouped convolution, 1 for other layers."""
        return int(getattr(self.module, "groups", 1))

    @property
    def runs_again(self) -> bool:
        """Return whether its gradients are computed from the parameters, after the pass."""
        return self.rule in _NEEDS_PARAMETERS or bool(self.paths)

    def tensor(self, role: str, module: nn.Module | None = None) -> Tensor:
        """Return the parameter object of a role, in one of the modules or the first one."""
        module = self.modules[0] if module is None else module
        path = self.paths.get(role, role)
        if isinstance(module, torch.jit.ScriptModule):
            return dict(module.named_parameters())[path]
        return module.get_parameter(path)

    @property
    def display_name(self) -> str:
        """Return a name for messages: the path, or the class for the root module."""
        return self.name or f"<{type(self.module).__name__}>"


def named_tensors(layers: Sequence[Layer]) -> Tensors:
    """Return name in the model to tensor of every parameter of some layers."""
    tensors = {}
    for layer in layers:
        for role, name in layer.parameters.items():
            tensors[name] = layer.tensor(role)
    return tensors


def join_names(*names: str) -> str:
    """Return the path that names make up; an empty one names the model itself."""
    return ".".join(name for name in names if name)


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return every module of a model with its path, in the order of `named_modules`."""
    return {module: path for path, module in model.named_modules()}


def class_forward(module: nn.Module) -> Any:
    """Return the forward function of a module's class, None where the module has its own.

    A scripted module has. A forward function may be replaced on one object alone.
    """
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return None
    return type(module).forward


# --------------------------------------------------------------------------------------------------
# A recorded call of a module, as the rules of its layers read it.

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Axes = list[BatchAxis | None]
"""Where some tensors have the batch, None for one that all examples share."""


@dataclass(frozen=True)
class Call:
    """One call of a module: detached inputs and the gradients of the summed losses at its outputs.

    Attributes:
        module: the module called.
        args, kwargs: its inputs, detached.
        output_gradients: one gradient per tensor output, None where the output is not floating
            point.
        axes: where each tensor among the inputs has the batch, None for one that all examples
            share.
        output_axes: where each tensor output has the batch.
        attention: the `AttentionCall` of torch's attention, which has its two linear layers.
    """

    module: nn.Module
    args: Arguments
    kwargs: Keywords
    output_gradients: list[Tensor | None]
    axes: Axes
    output_axes: Axes
    attention: Any = None

    @property
    def input(self) -> Tensor:
        """Return the single tensor input of a module with a rule."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    @property
    def gradient(self) -> Tensor:
        """Return the gradient at the single tensor output of a module with a rule."""
        gradient = self.output_gradients[0]
        assert gradient is not None
        return gradient

    def batched_gradients(self) -> dict[int, tuple[Tensor, BatchAxis]]:
        """Return the output gradients with a batch, and its axes, by the place of the output."""
        gradients = {}
        pairs = zip(self.output_gradients, self.output_axes, strict=True)
        for place, (gradient, axis) in enumerate(pairs):
            if gradient is not None and axis is not None:
                gradients[place] = (gradient, axis)
        return gradients

    def batched_leaves(self) -> tuple[list[Any], Any, dict[int, BatchAxis]]:
        """Return the flattened inputs, their tree, and the batch axes by the place of the input."""
        leaves, spec = tree_flatten((self.args, self.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        axes = zip(places, self.axes, strict=True)
        return leaves, spec, {place: axis for place, axis in axes if axis is not None}

    def join_rows(self, size: int) -> Call:
        """Return the call in which `size` consecutive rows are one example."""

        def join(axis: BatchAxis | None) -> BatchAxis | None:
            return None if axis is None else replace(axis, post=axis.post * size)

        axes, output_axes = (list(map(join, x)) for x in (self.axes, self.output_axes))
        return replace(self, axes=axes, output_axes=output_axes)


def name_arguments(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Keywords:
    """Return the arguments of a call by name, where `names` belong to its first parameters."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


Calls = dict[str, list[Any]]
"""Layer name to its calls, or to blocks of gradients."""


def device_of_layers(layers: Sequence[Layer]) -> torch.device:
    """Return the device of a model's parameters."""
    return layers[0].tensor(next(iter(layers[0].parameters))).device


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors inside some values."""
    if isinstance(values, Tensor):
        return [values]
    if type(values) is tuple and all(isinstance(x, Tensor) for x in values):
        return [*values]  # a tenth of the time that trees of values take
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
