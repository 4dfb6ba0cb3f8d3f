"""Which parameter is covered by which rule, decided once from the model's modules.

Every trainable parameter belongs to exactly one layer. A layer with a rule never has its weight
gradient computed by autograd. Any other module that owns parameters directly is covered by the
per-module fallback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

from dpkfc.gradients.fallback import has_computed_weight
from dpkfc.gradients.internals import IN, OUT, is_attention
from dpkfc.gradients.layers import MATRICES, Layer
from dpkfc.gradients.rules import has_layer_rule
from dpkfc.linalg.metric import NamedTensors

# --------------------------------------------------------------------------------------------------
# The owner of a parameter: the module whose forward function uses it.
#
# That is the module that holds the parameter, except where children are read instead of called:
# attention with a projection that it applies itself, parametrized weights, and containers without a
# forward function.

_PLAIN = {"weight", "bias"}
_CELL = {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}


def _class_forward(module: nn.Module) -> Any:
    """Return the forward function of a module's class, None where the module has its own.

    A scripted module has. A forward function may be replaced on one object alone.
    """
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return None
    return type(module).forward


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward function. ParameterList, for example, has none."""
    return _class_forward(module) is not nn.Module.forward


def owned_parameters(module: nn.Module) -> tuple[NamedTensors, set[nn.Module]]:
    """Return the parameters that a module answers for.

    Returns:
        Path below the module to parameter, and the modules below it that need no owner.
    """
    parameters: NamedTensors = dict(module.named_parameters(recurse=False))
    below: set[nn.Module] = set()
    if isinstance(module, nn.MultiheadAttention) or is_parametrized(module):
        parameters = dict(module.named_parameters())
        below.update(module.modules())
        below.remove(module)
    elif is_called(module):
        for path, child in _uncalled_children(module, ""):
            for role, p in child.named_parameters(recurse=False):
                parameters[f"{path}.{role}"] = p
            below.add(child)
    return parameters, below


def _uncalled_children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not is_called(child):
            yield prefix + name, child
            yield from _uncalled_children(child, f"{prefix}{name}.")


def weights_are_computed(module: nn.Module, roles: Iterable[str]) -> bool:
    """Return whether a module of a known kind computes its weights from other parameters.

    Weight norm, pruning and parametrizations do.

    Args:
        module: any module.
        roles: the trainable parameters that it answers for.
    """
    plain = _PLAIN
    if isinstance(module, nn.RNNBase):
        plain = set(module._flat_weights_names)
    elif isinstance(module, nn.RNNCellBase):
        plain = _CELL
    return is_parametrized(module) or not set(roles) <= plain


def refuse_power_iteration(name: str, module: nn.Module) -> None:
    """Refuse a spectral norm that moves its estimate in every forward pass.

    The number of passes of a step depends on the sampled batch. Gradients of single examples would
    be taken of other weights than those of the batch.

    Raises:
        ValueError: naming the module and the fix.
    """
    if not module.training:
        return
    hooks = module._forward_pre_hooks.values()
    is_iterated = isinstance(module, parametrizations._SpectralNorm) and hasattr(module, "_u")
    if is_iterated or any(isinstance(x, SpectralNorm) for x in hooks):
        raise ValueError(
            f"module '{name}' ({type(module).__name__}) takes a step of its power iteration in "
            "every forward pass; call its eval() before training"
        )


# --------------------------------------------------------------------------------------------------

_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ALONE = ("fallback", "computed", "custom")  # share no parameter
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)


def find_layers(model: nn.Module) -> list[Layer]:
    """Assign every trainable parameter of a model to a layer.

    Args:
        model: any module, which is only read.

    Returns:
        Layers in module order. Their `parameters` partition the trainable parameters.

    Raises:
        ValueError: nothing is trainable; a BatchNorm in training mode; a module whose forward pass
            mixes examples or writes private statistics into a buffer; a lazy layer without input; a
            matrix without entries.
    """
    _refuse_lazy(model)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    owners = list(_owners(model))
    users: dict[Tensor, list[_Owner]] = {}
    for owner in owners:
        for p in owner.trainable.values():
            users.setdefault(p, []).append(owner)
    layers: dict[str, Layer] = {}
    covered: set[Tensor] = set()
    for owner in owners:
        groups: dict[tuple[_Owner, ...], list[str]] = {}
        for role, p in owner.trainable.items():
            if p not in covered:
                groups.setdefault(_sharers(users[p]), []).append(role)
        for sharers, roles in groups.items():
            # An owner that is no sharer only holds what one of its children uses.
            if owner in sharers:
                layer = _layer(owner, sharers, roles, names, used_names=layers)
                _refuse_empty(layer)
                layers[layer.name] = layer
                covered.update(owner.trainable[role] for role in roles)
    _check_partition(model, layers.values())
    return list(layers.values())


@dataclass(frozen=True, eq=False)
class _Owner:
    """A module that answers for trainable parameters.

    They are its own, or those of modules below it that are never called.
    """

    name: str
    module: nn.Module
    rule: str
    parameters: NamedTensors
    paths: dict[str, str] = field(default_factory=dict)

    @property
    def trainable(self) -> NamedTensors:
        """Return the trainable parameters by role."""
        return {role: p for role, p in self.parameters.items() if p.requires_grad}


def _owners(model: nn.Module) -> Iterator[_Owner]:
    """Yield every owner of trainable parameters. A parameter may have several owners."""
    answered: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=True):
        refuse_mixing(name, module)
        refuse_power_iteration(name, module)
        if module in answered:
            continue
        parameters, below = owned_parameters(module)
        answered |= below
        roles = [role for role, p in parameters.items() if p.requires_grad]
        if not roles:
            continue
        if not is_called(module):
            path = roles[0]
            if name:
                path = f"{name}.{path}"
            raise ValueError(
                f"parameter '{path}' is held by {type(module).__name__}, and never used. Give the"
                " model a forward function that uses it, or freeze it (docs/errors.md#not-covered)"
            )
        if is_attention(module):
            yield from _attention_owners(name, module, parameters)
        else:
            yield _Owner(name, module, _rule_of(module, roles), parameters)


def _attention_owners(name: str, module: nn.Module, parameters: NamedTensors) -> Iterator[_Owner]:
    output_name = "out_proj"
    if name:
        output_name = f"{name}.out_proj"
    for paths, own_name in ((IN, name), (OUT, output_name)):
        own = {}
        for role, path in paths.items():
            if path in parameters:
                own[role] = parameters[path]
        owner = _Owner(own_name, module, "linear", own, paths)
        if owner.trainable:
            yield owner


def _sharers(users: list[_Owner]) -> tuple[_Owner, ...]:
    """Return the owners that use one parameter, embeddings first.

    The rule of the first owner holds for all where they agree.
    """
    ruled = [owner.module for owner in users if owner.rule not in _ALONE]
    using = []
    for owner in users:
        # A module without a rule that holds the parameter of a child (the bias of a BERT or RoBERTa
        # head) does not use it.
        only_holds = False
        if owner.rule in _ALONE:
            below = set(owner.module.modules())
            only_holds = any(module in below for module in ruled)
        if not only_holds:
            using.append(owner)
    return tuple(sorted(using, key=lambda owner: owner.rule != "embedding"))


def _shared_rule(sharers: Sequence[_Owner], roles: Sequence[str]) -> str:
    """Return the rule for parameters of several owners.

    It is fallback where their gradients have no common form.
    """
    first = sharers[0]
    rules = {owner.rule for owner in sharers}
    if len(sharers) == 1:
        return first.rule
    if rules & set(_ALONE) or not all(_is_alike(owner, first, roles) for owner in sharers):
        return "fallback"
    if rules == {"embedding", "linear"} and list(roles) == ["weight"]:
        return "tied"
    if len(rules) > 1:
        return "fallback"
    if first.rule not in ("conv", "recurrent"):
        return first.rule
    # Tensors are compared by their ids: they have no truth value of their own.
    trained = [{role: id(p) for role, p in owner.trainable.items()} for owner in sharers]
    if all(ids == trained[0] for ids in trained):
        return first.rule
    return "fallback"


def _is_alike(owner: _Owner, first: _Owner, roles: Sequence[str]) -> bool:
    """Return whether two owners use the same parameters in the same roles and orientation."""
    if owner.paths != first.paths:
        return False
    if _is_transposed(owner.module) != _is_transposed(first.module):
        return False
    return all(owner.parameters.get(role) is first.parameters[role] for role in roles)


def _layer(
    owner: _Owner,
    sharers: Sequence[_Owner],
    roles: Sequence[str],
    names: dict[Tensor, str],
    used_names: Iterable[str],
) -> Layer:
    rule = _shared_rule(sharers, roles)
    first = owner if rule == "fallback" else sharers[0]
    name = first.name
    if name in used_names:
        # A module whose weight is shared and whose bias is its own belongs to two layers.
        parts = [name, *roles]
        name = ".".join(filter(None, parts))
    others = [sharer.module for sharer in sharers if sharer is not first]
    is_hooked = rule != "fallback"
    if len(sharers) == 1 and _is_leaf(first.module, roles):
        is_hooked = True
    return Layer(
        name=name,
        modules=(first.module, *others),
        rule=rule,
        parameters={role: names[first.parameters[role]] for role in roles},
        frozen=tuple(role for role, p in first.parameters.items() if not p.requires_grad),
        paths=first.paths,
        transposed=_is_transposed(first.module),
        is_hooked=is_hooked,
    )


def _is_leaf(module: nn.Module, roles: Sequence[str]) -> bool:
    """Return whether a module answers for all trainable parameters below it.

    Then it can be run for each example alone.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    below = {id(p) for p in module.parameters() if p.requires_grad}
    return len(below) == len(roles)


def _rule_of(module: nn.Module, roles: list[str]) -> str:
    if has_layer_rule(module) and "forward" not in vars(module):
        return "custom"
    if not weights_are_computed(module, roles):
        return _rule(module)
    is_known = isinstance(module, (nn.Linear, *_CONVS)) and _rule(module) != "fallback"
    return "computed" if is_known and has_computed_weight(module, roles) else "fallback"


def _rule(module: nn.Module) -> str:
    """Return the rule of a module by its forward function.

    A subclass with its own forward function takes the fallback.
    """
    forward = _class_forward(module)
    if forward is None:
        return "fallback"
    if forward is nn.Linear.forward or _is_transposed(module):
        return "linear"
    if forward is nn.Embedding.forward:
        return "embedding"
    for kind in _CONVS:
        if isinstance(module, kind) and forward is kind.forward:
            if type(module)._conv_forward is kind._conv_forward:
                return "conv"
    for rule, kinds in (("norm", _NORMS + _BATCH_NORMS), ("recurrent", _RECURRENT)):
        if any(isinstance(module, kind) and forward is kind.forward for kind in kinds):
            return rule
    return "fallback"


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D: `x W + b` with W `[d_in, d_out]`."""
    loaded = sys.modules.get("transformers.pytorch_utils")
    kind = getattr(loaded, "Conv1D", nn.Module)
    forward = kind.forward
    return forward is not nn.Module.forward and forward is _class_forward(module)


def refuse_mixing(name: str, module: nn.Module) -> None:
    """Refuse modules that mix examples or store statistics of private data.

    Raises:
        ValueError: naming the module and the ways out.
    """
    where = f"module '{name}' ({type(module).__name__})"
    if isinstance(module, _BATCH_NORMS) and (module.training or not module.track_running_stats):
        raise ValueError(
            f"{where} mixes the examples of a batch; replace it by nn.GroupNorm, or freeze its "
            "statistics with .eval() (docs/errors.md#mixes-examples)"
        )
    is_instance_norm = isinstance(module, nn.modules.instancenorm._InstanceNorm)
    if is_instance_norm and module.track_running_stats and module.training:
        raise ValueError(
            f"{where} would write running statistics of private data into a buffer; use "
            "track_running_stats=False or .eval()"
        )
    if not isinstance(module, nn.Embedding):
        return
    if module.max_norm is not None:
        raise ValueError(
            f"{where}: max_norm rewrites rows chosen by private data outside the mechanism; use "
            "max_norm=None"
        )
    if module.scale_grad_by_freq and module.weight.requires_grad:
        raise ValueError(
            f"{where}: scale_grad_by_freq mixes the examples of a batch; use "
            "scale_grad_by_freq=False"
        )


def _refuse_lazy(model: nn.Module) -> None:
    """Refuse lazy layers (`nn.LazyLinear`) before their first input."""
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ValueError(
                f"parameter '{name}' has no shape yet: its layer is lazy; run one forward pass "
                "first, on public input (model(torch.zeros(2, ...)))"
            )


def _refuse_empty(layer: Layer) -> None:
    """Refuse a matrix or a bias without entries, which has no gradient to clip."""
    for role, name in layer.parameters.items():
        if layer.rule in MATRICES and not layer.tensor(role).numel():
            raise ValueError(
                f"parameter '{name}' has no entries, so there is nothing to train; remove its layer"
                " or freeze it with requires_grad_(False)"
            )


def _check_partition(model: nn.Module, layers: Iterable[Layer]) -> None:
    """Raise unless the layers' parameters are exactly the trainable parameters of the model."""
    expected = {name for name, p in model.named_parameters() if p.requires_grad}
    if not expected:
        raise ValueError("the model has no trainable parameter: every requires_grad is False")
    covered: list[str] = []
    for layer in layers:
        covered += layer.parameters.values()
    differing = expected ^ set(covered)
    if differing or len(covered) != len(set(covered)):
        names = ", ".join(sorted(differing)) or "a parameter counted twice"
        raise ValueError(
            f"not covered by any rule: {names}; freeze them or move them into a module of their own"
            " (docs/errors.md#not-covered)"
        )
