"""Read and write models that the user has sharded with FSDP2 (torch's `fully_shard`).

Between passes every parameter is a DTensor, of which a process holds one part. FSDP2 gathers the
parameters of a module before it runs and frees them afterwards. All other code reads and writes
parameters through the functions below. Gathering is an exchange: all processes must do it equally
often and in the same order, so each of them makes as many passes as any other.

For a model that is not sharded, everything here is the identity.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from dpkfc.tensors import NamedTensors, Tensors

if TYPE_CHECKING:
    from dpkfc.gradients.layers import Layer


_FIX = "use plain fully_shard(module) over all processes, or leave the model whole on every process"
# Prefixes of names of parameters: in a state dict, in the state of a filter, in an average.
_PREFIXES = ("", "before.", "average.")
# A sharded parameter to the tensor that takes its place while a module runs.
_gathered = WeakIdKeyDictionary()
# A module to the module that gathers its parameters.
_gathered_by: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()


def is_divided(x: Any) -> bool:
    """Return whether a tensor, or a parameter of a model between passes, is sharded."""
    if isinstance(x, nn.Module):
        return any(is_divided(p) for p in x.parameters())
    return isinstance(x, Tensor) and hasattr(x, "placements")


def _units(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was applied to, outer ones first."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    # fully_shard makes a subclass of every class that it is applied to.
    if kind is None or not kind.__subclasses__():
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters.

    After a forward pass without a backward pass, FSDP2 keeps the full parameters of the outermost
    module.
    """
    for unit in _units(model):
        unit.reshard()


@contextmanager
def run_resharded(model: nn.Module, work: AbstractContextManager[None]) -> Iterator[None]:
    """Run a context that writes parameters, each time into parts that FSDP2 gathers anew."""
    reshard(model)
    try:
        with work:
            yield
    finally:
        reshard(model)


def prepare(model: nn.Module, world_size: int, *, automatic: bool = False) -> bool:
    """Check how a model is sharded, and record the tensors that replace its parameters in a pass.

    Args:
        model: as `fully_shard` has left it.
        world_size: the processes of the run.
        automatic: the size of micro-batches is to be found by trying.

    Returns:
        Whether the model is sharded.

    Raises:
        ValueError: the model is sharded in a way that is not known to work, by name of a parameter.
    """
    units = _units(model)
    reshard(model)
    divided: dict[str, Any] = {n: p for n, p in model.named_parameters() if is_divided(p)}
    for name, p in divided.items():
        _check_placement(name, p, world_size, bool(units))
    if not divided:
        return False
    if automatic:
        raise ValueError(
            "max_physical_batch_size='auto' tries again on one process, but processes of a sharded"
            " model must make the same passes; give max_physical_batch_size as a number"
        )
    names = {id(p): name for name, p in divided.items()}
    for unit in units:
        _record_gathered(unit, names)
    for n, p in divided.items():
        if p not in _gathered:
            raise ValueError(_describe_refusal(n, _NOT_GATHERED))
    return True


def _record_gathered(unit: Any, names: Mapping[int, str]) -> None:
    """Gather the parameters of a unit once, and record the tensors that replace them.

    Args:
        unit: a module that `fully_shard` was applied to.
        names: of the sharded parameters, by their id.
    """
    sharded = []
    for module in unit.modules():
        for leaf, p in module._parameters.items():
            if is_divided(p):
                sharded.append((module, leaf, p))
    unit.unshard()
    try:
        for module, leaf, p in sharded:
            full = module._parameters[leaf]
            if full is p:
                continue  # an inner unit gathers it
            if full.dtype != p.dtype:
                what = f"is computed with in {full.dtype} and kept in {p.dtype} (mp_policy)"
                raise ValueError(_describe_refusal(names[id(p)], what))
            _gathered[p] = full
            _gathered_by[module] = ref(unit)
    finally:
        unit.reshard()


def _check_placement(name: str, p: Any, world_size: int, sharded: bool) -> None:
    mesh = p.device_mesh
    shape = tuple(mesh.shape)
    stored = to_local(p).device.type
    used = mesh.device_type
    fault = ""
    if not sharded:
        fault = _NOT_GATHERED
    elif shape != (world_size,):
        fault = f"is divided over a mesh of shape {shape} in {world_size} processes"
    elif not all(x.is_shard(0) for x in p.placements):
        fault = f"is divided as {p.placements}"
    elif stored != used:
        fault = f"is kept on {stored} and computed with on {used} (an offload policy)"
    if fault:
        raise ValueError(_describe_refusal(name, fault))


_NOT_GATHERED = "is a DTensor that no fully_shard gathers (tensor parallelism?)"


def _describe_refusal(name: str, what: str) -> str:
    return f"parameter '{name}' {what}, which a session does not take; {_FIX}"


def refuse_layers(layers: Iterable[Layer]) -> None:
    """Refuse a sharded module that runs again for single examples, where FSDP2 would gather inside.

    Raises:
        ValueError: naming the module.
    """
    for layer in layers:
        if not layer.runs_again:
            continue
        if any(_units(module) for module in layer.modules):
            kind = type(layer.module).__name__
            raise ValueError(
                f"fully_shard was applied to the module '{layer.display_name}' ({kind}), which runs"
                " again for single examples; apply fully_shard to modules around it"
            )


@contextmanager
def gather_layer(layer: Layer) -> Iterator[None]:
    """Gather the parameters of a layer whose module runs again after the pass.

    This is an exchange if the parameters are sharded.
    """
    units: dict[Any, None] = {}
    if _gathered_by and layer.runs_again:
        for module in layer.modules:
            units |= {_gathered_by[x](): None for x in module.modules() if x in _gathered_by}
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()


def check_not_freed(layer: Layer, inputs: Any) -> None:
    """Refuse a layer that was called with a parameter, which FSDP2 has freed before the gradient.

    Raises:
        ValueError: naming the layer.
    """
    if not _gathered_by:
        return
    for x in tree_flatten(inputs)[0]:
        if isinstance(x, Tensor) and x.numel() and not x.untyped_storage().nbytes():
            raise ValueError(
                f"layer '{layer.display_name}' is called with a parameter as its input, which "
                "fully_shard frees after the pass; pass parameter.clone(), or use ignored_params="
            )


def find_graph_tensor(p: Tensor) -> Tensor:
    """Return the tensor of a parameter in the graph of autograd: the gathered one if sharded."""
    tensor: Tensor = _gathered.get(p, p) if _gathered else p
    return tensor


def trainable_tensors(model: nn.Module) -> Tensors:
    """Return name to tensor of every trainable parameter, as a forward pass reads it."""
    named = model.named_parameters()
    return {name: find_graph_tensor(p) for name, p in named if p.requires_grad}


def list_group_members(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of an optimizer's groups, or their numbers in its state."""
    return [member for group in groups for member in group["params"]]


# -- values ----------------------------------------------------------------------------------------


def to_local(x: Tensor) -> Tensor:
    """Return the part of a tensor on this process, without a copy or an exchange; may be empty."""
    detached: Any = x.detach()
    part: Tensor = detached.to_local() if is_divided(x) else detached
    return part


def gather_tree(tree: Any, keep: bool = True) -> Any:
    """Return dicts, lists and tuples with whole tensors on the CPU in place of sharded ones.

    Each sharded tensor is an exchange.

    Args:
        tree: the same structure on every process.
        keep: whether this process keeps the tensors. Others hold one at a time.
    """
    if not _gathered:  # no model is sharded
        return tree

    def gather(x: Any) -> Any:
        if not is_divided(x):
            return x
        full = x.detach().full_tensor()
        return full.cpu() if keep else torch.empty(0, dtype=x.dtype)

    return tree_map(gather, tree)


def shard_like(full: Tensor, like: Any) -> Tensor:
    """Return a whole tensor sharded like another one of its shape; no tensor is sent."""
    if not is_divided(like) or is_divided(full):
        return full
    from torch.distributed.tensor import DTensor

    mesh = like.device_mesh
    placements = like.placements
    size = math.ceil(full.shape[0] / mesh.size())
    start = min(mesh.get_local_rank() * size, full.shape[0])
    # A copy lets the whole tensor be freed.
    part = full[start : start + size].to(
        to_local(like).device, copy=True, memory_format=torch.contiguous_format
    )
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def model_state(model: nn.Module) -> Tensors:
    """Return the state dict of a sharded model; tied parameters keep their first name only."""
    reshard(model)
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    repeated = names - dict(model.named_parameters()).keys()
    state = model.state_dict().items()
    return {name: x for name, x in state if name not in repeated and isinstance(x, Tensor)}


def divided_state(state: NamedTensors, model: nn.Module) -> Tensors:
    """Return named whole tensors, sharded if they are values of a sharded parameter.

    The value may be the parameter's own, an earlier one or an average.
    """
    parameters: dict[str, Any] = {}
    for name, p in model.named_parameters():
        parameters |= {prefix + name: p for prefix in _PREFIXES}
    return {name: shard_like(x, parameters.get(name)) for name, x in state.items()}


def divided_optimizer_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of an optimizer, with tensors of a parameter's shape sharded like it.

    Raises:
        KeyError, IndexError: the state of an optimizer of other parameters.
    """
    own_parameters = list_group_members(optimizer.param_groups)
    if not any(is_divided(p) for p in own_parameters):
        return dict(state)
    numbers = list_group_members(state["param_groups"])
    parameters = dict(zip(numbers, own_parameters, strict=False))

    states = {}
    for i, values in state["state"].items():
        parameter = parameters.get(i)
        shape = getattr(parameter, "shape", None)
        own_state = dict(values)
        for name, x in values.items():
            if isinstance(x, Tensor) and x.shape == shape:
                own_state[name] = shard_like(x, parameter)
        states[i] = own_state
    return {**state, "state": states}
