"""Which parameter is covered by which rule, decided once from the model's modules.

Every trainable parameter belongs to exactly one layer. A layer with a rule never has its weight gradient computed by
autograd; any other module that owns parameters directly is covered by the per-module fallback.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["Layer", "find_layers"]

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Modules whose children are used without being called: the module answers for all parameters below it.
_OPAQUE = (nn.MultiheadAttention,)


@dataclass(frozen=True)
class Layer:
    """One module (or several that share their parameters) and the rule that yields its per-example gradients.

    Attributes:
        name: path of the (first) module in the model; "" is the model itself.
        modules: the module objects that use these parameters.
        rule: linear, conv, embedding, norm or fallback.
        parameters: role inside the module to the parameter's name in the model, trainable ones only.
        frozen: roles that are present but not trained.
    """

    name: str
    modules: tuple[nn.Module, ...]
    rule: str
    parameters: dict[str, str]
    frozen: tuple[str, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The first module."""
        return self.modules[0]

    def tensor(self, role: str) -> Tensor:
        """The parameter object of a role."""
        tensor = self.module.get_parameter(role)
        return tensor

    @property
    def display_name(self) -> str:
        """A name for people: the path, or the class for the root module."""
        return self.name or f"<{type(self.module).__name__}>"


def find_layers(model: nn.Module) -> list[Layer]:
    """Assign every trainable parameter of a model to a layer.

    Args:
        model: any module; it is only read.

    Returns:
        Layers in module order; their `parameters` partition the trainable parameters.

    Raises:
        ValueError: nothing is trainable; a BatchNorm in training mode; a module whose forward pass mixes examples or
            writes private statistics into a buffer; a parameter shared by modules of different kinds.
    """
    layers: list[Layer] = []
    covered: dict[Tensor, int] = {}
    below_opaque: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=True):
        refuse_mixing(name, module)
        if module in below_opaque:
            continue
        opaque = isinstance(module, _OPAQUE)
        if opaque:
            below_opaque.update(m for m in module.modules() if m is not module)
        own = dict(module.named_parameters(recurse=opaque))
        trainable = {role: p for role, p in own.items() if p.requires_grad}
        if not trainable:
            continue
        shared = {covered[p] for p in trainable.values() if p in covered}
        if shared:
            layers[_tie_target(layers, shared, name, module, trainable)] = _tied(layers, shared, module, trainable)
            continue
        for p in trainable.values():
            covered[p] = len(layers)
        prefix = f"{name}." if name else ""
        layers.append(
            Layer(
                name=name,
                modules=(module,),
                rule=_rule(module),
                parameters={role: prefix + role for role in trainable},
                frozen=tuple(role for role in own if role not in trainable),
            )
        )
    _check_partition(model, layers)
    return layers


def _rule(module: nn.Module) -> str:
    """The rule of a module by its forward function, so that a subclass with its own forward takes the fallback."""
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return "linear"
    if any(
        forward is c.forward and type(module)._conv_forward is c._conv_forward for c in _CONVS if isinstance(module, c)
    ):
        return "conv"
    if forward is nn.Embedding.forward:
        return "embedding"
    if any(forward is c.forward for c in _NORMS + _BATCH_NORMS if isinstance(module, c)):
        return "norm"
    return "fallback"


def refuse_mixing(name: str, module: nn.Module) -> None:
    """Refuse modules that mix examples or store statistics of private data.

    Raises:
        ValueError: naming the module and the ways out.
    """
    where = f"module '{name}' ({type(module).__name__})"
    if isinstance(module, _BATCH_NORMS) and (module.training or not module.track_running_stats):
        raise ValueError(
            f"{where} mixes the examples of a batch, so no per-example gradient exists. Three ways out: replace it by "
            "nn.GroupNorm; replace it by nn.InstanceNorm or nn.LayerNorm; or freeze its statistics with .eval() "
            "(pretrained running statistics stay, gain and bias may still train)."
        )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats and module.training:
        raise ValueError(
            f"{where} would write running statistics of private data into a buffer; use track_running_stats=False or .eval()."
        )
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            raise ValueError(
                f"{where}: max_norm rewrites rows chosen by private data outside the mechanism; use max_norm=None."
            )
        if module.scale_grad_by_freq and module.weight.requires_grad:
            raise ValueError(
                f"{where}: scale_grad_by_freq mixes the examples of a batch; use scale_grad_by_freq=False."
            )


def _tie_target(
    layers: list[Layer], shared: set[int], name: str, module: nn.Module, trainable: dict[str, Tensor]
) -> int:
    """Index of the layer that a module with shared parameters joins.

    Raises:
        ValueError: the sharing modules differ in rule or share only some of their parameters.
    """
    first = layers[min(shared)]
    same = len(shared) == 1 and _rule(module) == first.rule and first.rule != "fallback"
    same = same and {r: id(p) for r, p in trainable.items()} == {r: id(first.tensor(r)) for r in first.parameters}
    if not same:
        raise ValueError(
            f"module '{name}' ({type(module).__name__}) shares a parameter with '{first.display_name}' "
            f"({type(first.module).__name__}), but not as a layer of the same kind with the same parameters. "
            "Untie them (give each its own parameter) or freeze the shared one with requires_grad_(False)."
        )
    return min(shared)


def _tied(layers: list[Layer], shared: set[int], module: nn.Module, trainable: dict[str, Tensor]) -> Layer:
    first = layers[min(shared)]
    return Layer(first.name, (*first.modules, module), first.rule, first.parameters, first.frozen)


def _check_partition(model: nn.Module, layers: Iterable[Layer]) -> None:
    """Raise unless the layers' parameters are exactly the trainable parameters of the model."""
    wanted = {name for name, p in model.named_parameters() if p.requires_grad}
    if not wanted:
        raise ValueError("the model has no trainable parameter: every requires_grad is False")
    found = [full for layer in layers for full in layer.parameters.values()]
    missing, extra = wanted - set(found), set(found) - wanted
    if missing or extra or len(found) != len(set(found)):
        names = ", ".join(sorted(missing | extra)) or "a parameter counted twice"
        raise ValueError(f"not covered by any rule: {names}; freeze them or move them into a module of their own")
