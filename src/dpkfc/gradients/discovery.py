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

from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.attention import IN, OUT, is_attention
from dpkfc.gradients.layers import MATRICES, Layer, class_forward, join_names
from dpkfc.gradients.rules import has_layer_rule
from dpkfc.tensors import Tensors

# --------------------------------------------------------------------------------------------------
# The owner of a parameter: the module whose forward function uses it.
#
# That is the module that holds the parameter, except where children are read instead of called:
# attention with a projection that it applies itself, parametrized weights, and containers without a
# forward function.

_PLAIN = {"weight", "bias"}
_CELL = {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward function, which ParameterList, for example, lacks."""
    return class_forward(module) is not nn.Module.forward


def owned_parameters(module: nn.Module) -> tuple[Tensors, set[nn.Module]]:
    """Return the parameters that a module answers for.

    Returns:
        Path below the module to parameter, and the modules below it that need no owner.
    """
    parameters: Tensors = dict(module.named_parameters(recurse=False))
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
_ALONE = ("fallback", "custom")  # share no parameter
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_RULE_OF_CLASS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Embedding: "embedding",
    **dict.fromkeys(_CONVS, "conv"),
    **dict.fromkeys(_NORMS + _BATCH_NORMS, "norm"),
    **dict.fromkeys(_RECURRENT, "recurrent"),
}


def find_layers(model: nn.Module) -> list[Layer]:
    """Assign every trainable parameter of a model to a layer.

    Args:
        model: any module, which is only read.

    Returns:
        Layers in module order. Their `parameters` partition the trainable parameters.

    Raises:
        ValueError: nothing is trainable; a BatchNorm in training mode; a module whose forward pass
            mixes examples or writes private statistics into a buffer; a lazy layer without input; a
            matrix without entries; a traced module.
    """
    _refuse_lazy(model)
    _refuse_traced(model)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    owners = list(_owners(model))
    users: dict[Tensor, list[_Owner]] = {}
    for owner in owners:
        for p in owner.trainable.values():
            users.setdefault(p, []).append(owner)
    layers: dict[str, Layer] = {}
    for owner in owners:
        groups: dict[tuple[_Owner, ...], list[str]] = {}
        for role, p in owner.trainable.items():
            sharers = _sharers(users[p])
            if owner is sharers[0]:
                groups.setdefault(sharers, []).append(role)
        for sharers, roles in groups.items():
            layer = _layer(sharers, roles, names, used_names=layers)
            _refuse_empty(layer)
            layers[layer.name] = layer
    _check_partition(model, layers.values())
    return list(layers.values())


@dataclass(frozen=True, eq=False)
class _Owner:
    """A module that answers for trainable parameters.

    They are its own, or belong to modules below it that are never called.
    """

    name: str
    module: nn.Module
    rule: str
    parameters: Tensors
    paths: dict[str, str] = field(default_factory=dict)

    @property
    def trainable(self) -> Tensors:
        """Return the trainable parameters by role."""
        return {role: p for role, p in self.parameters.items() if p.requires_grad}

    def identify(self, roles: Iterable[str]) -> tuple[Any, ...]:
        """Return a key that is equal for modules whose gradients of these roles can be added.

        It is the paths, the orientation and the parameters. Tensors are identified by their ids,
        since they have no truth value of their own.
        """
        if self.rule in ("conv", "recurrent"):
            roles = self.trainable
        parameters = {role: id(self.parameters.get(role)) for role in roles}
        return self.paths, _is_transposed(self.module), parameters


def _owners(model: nn.Module) -> Iterator[_Owner]:
    """Yield every owner of trainable parameters. A parameter may have several owners."""
    answered: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=True):
        _check_module(name, module)
        if module in answered:
            continue
        parameters, below = owned_parameters(module)
        answered |= below
        roles = [role for role, p in parameters.items() if p.requires_grad]
        if not roles:
            continue
        if not is_called(module):
            raise ValueError(
                f"parameter '{join_names(name, roles[0])}' is held by {type(module).__name__}, and "
                "never used. Give the model a forward function that uses it, or freeze it "
                "(docs/errors.md#not-covered)"
            )
        if is_attention(module):
            yield from _attention_owners(name, module, parameters)
        else:
            yield _Owner(name, module, _rule_of(module, roles), parameters)


def _attention_owners(name: str, module: nn.Module, parameters: Tensors) -> Iterator[_Owner]:
    for paths, own_name in ((IN, name), (OUT, join_names(name, "out_proj"))):
        present = paths.items()
        own = {role: parameters[path] for role, path in present if path in parameters}
        yield _Owner(own_name, module, "linear", own, paths)


def _sharers(users: list[_Owner]) -> tuple[_Owner, ...]:
    """Return the owners that use one parameter.

    A module without a rule that holds the parameter of a child (the bias of a BERT or RoBERTa head)
    does not use it.
    """
    ruled = {owner.module for owner in users if owner.rule not in _ALONE}
    return tuple(
        owner
        for owner in users
        if owner.rule not in _ALONE or ruled.isdisjoint(owner.module.modules())
    )


def _shared_rule(sharers: Sequence[_Owner], roles: Sequence[str]) -> str:
    """Return the rule for parameters of one or several owners.

    It is fallback where their gradients have no common form.
    """
    rules = {owner.rule for owner in sharers}
    if len(sharers) == 1:
        return sharers[0].rule
    forms = [owner.identify(roles) for owner in sharers]
    is_one_form = all(form == forms[0] for form in forms)
    if not is_one_form or not rules.isdisjoint(_ALONE):
        return "fallback"
    if len(rules) == 1:
        return sharers[0].rule
    if rules == {"embedding", "linear"} and list(roles) == ["weight"]:
        return "tied"
    return "fallback"


def _layer(
    sharers: Sequence[_Owner],
    roles: Sequence[str],
    names: dict[Tensor, str],
    used_names: Iterable[str],
) -> Layer:
    rule = _shared_rule(sharers, roles)
    if rule == "tied":
        # Embeddings are first.
        sharers = sorted(sharers, key=lambda owner: owner.rule)
    first = sharers[0]
    name = first.name
    if name in used_names:
        # A module whose weight is shared and whose bias is its own belongs to two layers.
        name = join_names(name, *roles)
    is_hooked = rule != "fallback"
    if len(sharers) == 1 and _is_leaf(first.module, roles):
        is_hooked = True
    return Layer(
        name=name,
        modules=tuple(sharer.module for sharer in sharers),
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
    return len(trainable_tensors(module)) == len(roles)


def _rule_of(module: nn.Module, roles: list[str]) -> str:
    if has_layer_rule(module) and "forward" not in vars(module):
        return "custom"
    return "fallback" if weights_are_computed(module, roles) else _rule(module)


def _rule(module: nn.Module) -> str:
    """Return the rule of a module by its forward function.

    A subclass with its own forward function takes the fallback.
    """
    if _is_transposed(module):
        return "linear"
    code = (class_forward(module), getattr(type(module), "_conv_forward", None))
    for kind, rule in _RULE_OF_CLASS.items():
        known = (kind.forward, getattr(kind, "_conv_forward", None))
        if isinstance(module, kind) and code == known:
            return rule
    return "fallback"


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D: `x W + b` with W `[d_in, d_out]`."""
    loaded = sys.modules.get("transformers.pytorch_utils")
    kind = getattr(loaded, "Conv1D", nn.Module)
    forward = kind.forward
    return forward is not nn.Module.forward and forward is class_forward(module)


def _check_module(name: str, module: nn.Module) -> None:
    """Refuse a module that mixes examples, stores statistics of private data or moves its weights.

    The number of passes of a step depends on the sampled batch. Spectral norm changes the weights
    at each pass, so per-example gradients would use different weights.
    """
    where = f"module '{name}' ({type(module).__name__})"
    is_batch_norm = isinstance(module, _BATCH_NORMS)
    if is_batch_norm and (module.training or not module.track_running_stats):
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
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            raise ValueError(
                f"{where}: max_norm rewrites rows chosen by private data outside the mechanism; "
                "use max_norm=None"
            )
        if module.scale_grad_by_freq and module.weight.requires_grad:
            raise ValueError(
                f"{where}: scale_grad_by_freq mixes the examples of a batch; use "
                "scale_grad_by_freq=False"
            )
    hooks = module._forward_pre_hooks.values()
    is_iterated = isinstance(module, parametrizations._SpectralNorm) and hasattr(module, "_u")
    is_iterated = is_iterated or any(isinstance(x, SpectralNorm) for x in hooks)
    if is_iterated and module.training:
        raise ValueError(
            f"{where} takes a step of its power iteration in every forward pass; call its eval() "
            "before training"
        )


def _refuse_lazy(model: nn.Module) -> None:
    """Refuse lazy layers (`nn.LazyLinear`) before their first input."""
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ValueError(
                f"parameter '{name}' has no shape yet: its layer is lazy; run one forward pass "
                "first, on public input (model(torch.zeros(2, ...)))"
            )


def _refuse_traced(model: nn.Module) -> None:
    """Refuse modules of `torch.jit.trace`, which hide their parameters and buffers."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.TopLevelTracedModule):
            raise ValueError(
                f"module '{name}' was traced by torch.jit, which hides its layers; pass the module"
                " that was traced"
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
    expected = trainable_tensors(model)
    if not expected:
        raise ValueError(
            "the model has no trainable parameter: every requires_grad is False; set it where the"
            " model trains, or load an adapter with is_trainable=True"
        )
    covered = [name for layer in layers for name in layer.parameters.values()]
    if sorted(covered) != sorted(expected):
        differing = sorted(expected.keys() ^ set(covered))
        names = ", ".join(differing) or "a parameter counted twice"
        raise ValueError(
            f"not covered by any rule: {names}; freeze them or move them into a module of their own"
            " (docs/errors.md#not-covered)"
        )
