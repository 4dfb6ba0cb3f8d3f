"""Which parameter is covered by which rule, decided once from the model's modules.

Every trainable parameter belongs to exactly one layer. A layer with a rule never has its weight gradient computed by
autograd; any other module that owns parameters directly is covered by the per-module fallback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

from dpkfc.gradients.attention import IN, OUT, is_attention
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.parametrized import has_computed_weight

# --------------------------------------------------------------------------------------------------
# Which module answers for a parameter: the one whose forward function uses it.
#
# That is the module that holds it, except where children are read instead of called: attention with
# a projection that it applies itself, parametrized weights, and containers without a forward
# function.

_OPAQUE = (nn.MultiheadAttention,)
_PLAIN = {"weight", "bias"}
_CELL = {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward function at all; ParameterList, ModuleDict and other containers have none."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def owned_parameters(module: nn.Module) -> tuple[dict[str, Tensor], set[nn.Module]]:
    """Parameters that a module answers for.

    Args:
        module: any module.

    Returns:
        Path below the module to parameter, and the modules below it that need no answer of their own.
    """
    if isinstance(module, _OPAQUE) or is_parametrized(module):
        return dict[str, Tensor](module.named_parameters()), set(module.modules()) - {module}
    parameters: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    below: set[nn.Module] = set()
    for path, child in _uncalled(module, "") if is_called(module) else ():
        parameters.update({f"{path}.{role}": p for role, p in child.named_parameters(recurse=False)})
        below.add(child)
    return parameters, below


def _uncalled(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not is_called(child):
            yield prefix + name, child
            yield from _uncalled(child, f"{prefix}{name}.")


def weights_are_computed(module: nn.Module, roles: Iterable[str]) -> bool:
    """Whether a module of a known kind computes its weights from other parameters (weight norm, pruning, parametrizations).

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

    How many passes a step makes depends on how many examples were sampled, and gradients of single examples would be taken
    of other weights than the batch has seen.

    Raises:
        ValueError: naming the module and the fix.
    """
    hooked = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    if module.training and (hooked or isinstance(module, parametrizations._SpectralNorm) and hasattr(module, "_u")):
        raise ValueError(
            f"module '{name}' ({type(module).__name__}) takes a step of its power iteration in every forward pass, and the "
            "number of passes depends on the sampled batch. Put it in eval mode before training (for example "
            "layer.parametrizations.weight.eval()) and, if the estimate is to follow the weights, run it once between steps: "
            "layer.parametrizations.weight.train(); layer.weight; layer.parametrizations.weight.eval()"
        )


# --------------------------------------------------------------------------------------------------

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ALONE = ("fallback", "computed")  # rules of layers that share no parameter with another
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)


def find_layers(model: nn.Module) -> list[Layer]:
    """Assign every trainable parameter of a model to a layer.

    Args:
        model: any module; it is only read.

    Returns:
        Layers in module order; their `parameters` partition the trainable parameters.

    Raises:
        ValueError: nothing is trainable; a BatchNorm in training mode; a module whose forward pass mixes examples or
            writes private statistics into a buffer; a parameter shared by modules of different kinds; a lazy layer
            that has not seen an input yet.
    """
    _refuse_unshaped(model)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    owners = list(_owners(model))
    users: dict[Tensor, list[tuple[_Owner, str]]] = {}
    for owner in owners:
        for role, p in owner.trainable.items():
            users.setdefault(p, []).append((owner, role))
    layers: dict[str, Layer] = {}
    done: set[Tensor] = set()
    for owner in owners:
        groups: dict[tuple[_Owner, ...], list[str]] = {}
        for role, p in owner.trainable.items():
            if p not in done:
                groups.setdefault(_sharers(role, users[p]), []).append(role)
        for sharers, roles in groups.items():
            if owner in sharers:  # otherwise it only holds what one of its children uses
                layer = _layer(owner, sharers, roles, names, taken=layers)
                layers[layer.name] = layer
                done.update(owner.trainable[role] for role in roles)
    _check_partition(model, layers.values())
    return list(layers.values())


@dataclass(frozen=True, eq=False)
class _Owner:
    """A module that answers for trainable parameters, its own or those of modules below it that are never called."""

    name: str
    module: nn.Module
    rule: str
    parameters: dict[str, Tensor]
    paths: dict[str, str] = field(default_factory=dict)

    @property
    def trainable(self) -> dict[str, Tensor]:
        return {role: p for role, p in self.parameters.items() if p.requires_grad}

    @property
    def described(self) -> str:
        return f"'{self.name}' ({type(self.module).__name__})"


def _owners(model: nn.Module) -> Iterator[_Owner]:
    """Every module with trainable parameters, each parameter object perhaps in several of them."""
    answered: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=True):
        refuse_mixing(name, module)
        refuse_power_iteration(name, module)
        if module in answered:
            continue
        parameters, below = owned_parameters(module)
        answered |= below
        roles = [role for role, p in parameters.items() if p.requires_grad]
        if roles and not is_called(module):
            raise ValueError(
                f"parameter '{name + '.' if name else ''}{roles[0]}' is held by {type(module).__name__}, which has no forward "
                "function, in a model that has none either: nothing shows which examples it is used for. Give the model a "
                "forward function that uses it, or freeze it"
            )
        if roles and is_attention(module):
            for paths, own in ((IN, name), (OUT, f"{name}.out_proj" if name else "out_proj")):
                held = {role: parameters[path] for role, path in paths.items() if path in parameters}
                if any(p.requires_grad for p in held.values()):
                    yield _Owner(own, module, "linear", held, paths)
        elif roles:
            yield _Owner(name, module, _rule_of(module, roles), parameters)


def _sharers(role: str, users: list[tuple[_Owner, str]]) -> tuple[_Owner, ...]:
    """Return the modules that use one parameter, embeddings first; the rule of the first holds for all where they agree."""
    ruled = [(owner, as_role) for owner, as_role in users if owner.rule not in _ALONE]
    # A module without a rule that holds the parameter of a child (the bias of a BERT or RoBERTa head) does not use it.
    holding = [o for o, _ in users if o.rule in _ALONE and any(r.module in set(o.module.modules()) for r, _ in ruled)]
    using = [(owner, as_role) for owner, as_role in users if owner not in holding]
    return tuple(sorted((owner for owner, _ in using), key=lambda owner: owner.rule != "embedding"))


def _shared_rule(sharers: Sequence[_Owner], roles: Sequence[str]) -> str:
    """Return the rule for parameters of several modules: fallback where their gradients have no common form."""
    first, rules = sharers[0], {owner.rule for owner in sharers}
    if len(sharers) == 1:
        return first.rule
    own = {role: id(p) for role, p in first.trainable.items()}
    alike = all(owner.paths == first.paths and _is_transposed(owner.module) == _is_transposed(first.module) for owner in sharers)
    same_roles = all(id(owner.parameters.get(role)) == id(first.parameters[role]) for owner in sharers for role in roles)
    if not alike or not same_roles or rules & set(_ALONE):
        return "fallback"
    if rules == {"embedding", "linear"}:
        return "tied" if list(roles) == ["weight"] else "fallback"
    if len(rules) > 1:
        return "fallback"
    whole = all({role: id(p) for role, p in owner.trainable.items()} == own for owner in sharers)
    return first.rule if whole or first.rule not in ("conv", "recurrent") else "fallback"


def _layer(
    owner: _Owner, sharers: Sequence[_Owner], roles: Sequence[str], names: dict[Tensor, str], taken: Iterable[str]
) -> Layer:
    rule = _shared_rule(sharers, roles)
    first = owner if rule == "fallback" else sharers[0]
    name = first.name
    if name in taken:  # a module whose weight is shared and whose bias is its own belongs to two layers
        name = ".".join([*([name] if name else []), *roles])
    modules = [first.module, *(sharer.module for sharer in sharers if sharer is not first)]
    return Layer(
        name=name,
        modules=tuple(modules),
        rule=rule,
        parameters={role: names[first.parameters[role]] for role in roles},
        frozen=tuple(role for role, p in first.parameters.items() if not p.requires_grad),
        paths=first.paths,
        transposed=_is_transposed(first.module),
        is_hooked=rule != "fallback" or (len(sharers) == 1 and _is_leaf(first.module, roles)),
    )


def _is_leaf(module: nn.Module, roles: Sequence[str]) -> bool:
    """Return whether a module answers for all trainable parameters below it, so that it can be run for each example alone."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    below = {id(p) for p in module.parameters() if p.requires_grad}
    return len(below) == len(roles)


def _rule_of(module: nn.Module, roles: list[str]) -> str:
    if not weights_are_computed(module, roles):
        return _rule(module)
    ordinary = isinstance(module, (nn.Linear, *_CONVS)) and _rule(module) in ("linear", "conv")
    return "computed" if ordinary and has_computed_weight(module, roles) else "fallback"


def _rule(module: nn.Module) -> str:
    """The rule of a module by its forward function, so that a subclass with its own forward takes the fallback."""
    if isinstance(module, torch.jit.ScriptModule):
        return "fallback"
    forward = type(module).forward
    if "forward" in vars(module):  # replaced on this one object
        return "fallback"
    if forward is nn.Linear.forward or forward is _transposed_linear():
        return "linear"
    if any(
        forward is c.forward and type(module)._conv_forward is c._conv_forward for c in _CONVS if isinstance(module, c)
    ):
        return "conv"
    if forward is nn.Embedding.forward:
        return "embedding"
    if any(forward is c.forward for c in _NORMS + _BATCH_NORMS if isinstance(module, c)):
        return "norm"
    return "recurrent" if any(forward is c.forward for c in _RECURRENT if isinstance(module, c)) else "fallback"


def _transposed_linear() -> Callable[..., Any] | None:
    """The forward function of transformers' Conv1D, `x W + b` with W `[d_in, d_out]`; None where it is not loaded."""
    return getattr(getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None), "forward", None)


def _is_transposed(module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule) and type(module).forward is _transposed_linear()


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


def _refuse_unshaped(model: nn.Module) -> None:
    """Refuse lazy layers (`nn.LazyLinear`) before their first input: their parameters have no shape yet."""
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ValueError(
                f"parameter '{name}' has no shape yet: its layer is lazy and takes it from the first input. Run one forward "
                "pass first, on an input without private data (zeros of the right shape: model(torch.zeros(2, ...)))"
            )


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


def check_covered(model: nn.Module, layers: Iterable[Layer]) -> None:
    """Raise unless the trainable parameters of a model are still exactly those of its layers; cheap enough for a step.

    It notices an adapter that was added, a layer that was unfrozen, frozen or replaced after `find_layers`.

    Raises:
        RuntimeError: naming the first parameter that no layer covers, or that has left the model or was frozen.
    """
    covered = {id(p): full for layer in layers for full, p in _present(layer)}
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    for key, name in trainable.items():
        if key not in covered:
            raise RuntimeError(
                f"parameter '{name}' is trainable but belongs to no covered layer: it was added, replaced or unfrozen after "
                "the model was made private; add adapters, move, cast or unfreeze before that, or freeze it"
            )
    for key, full in covered.items():
        if key not in trainable:
            raise RuntimeError(
                f"parameter '{full}' was frozen or taken out of the model after it was made private; do so before"
            )


def _present(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    for role, full in layer.parameters.items():
        try:
            yield full, layer.tensor(role)
        except AttributeError as error:
            raise RuntimeError(
                f"parameter '{full}' was taken out of its module after the model was made private (a parametrization, a "
                "quantised or replaced layer?); do so before"
            ) from error
