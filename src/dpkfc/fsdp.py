"""A model that the user has divided over the processes with FSDP2 (`torch.distributed.fsdp.fully_shard`).

Between passes every parameter is a DTensor, of which a process holds one part; FSDP2 gathers the parameters of a module before
it runs and lets them go afterwards. Everything that reads or writes parameters elsewhere does it through this module. Gathering
is an exchange: all processes must do it, equally often and in the same order, so each of them makes as many passes as any other.

Of a model that is not divided, all of this is the identity.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from dpkfc.gradients.layers import Layer

_FIX = (
    "A session takes fully_shard over one mesh with all processes in it (`fully_shard(module)` as it is), parameters cut along "
    "their first axis, without mixed precision and CPU offload; or leave the model whole on every process"
)
_VALUES_OF = ("", "before.", "average.")  # names in a state dict, in the state of a filter that looks ahead, in an average
_gathered_as = WeakIdKeyDictionary()  # a divided parameter to the tensor that stands in its place while a module runs
_held_by: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()  # a module to the one that gathers its parameters


def is_divided(x: Any) -> bool:
    """Whether a tensor is a DTensor or, of a model between passes, one of its parameters is."""
    if isinstance(x, nn.Module):
        return any(is_divided(p) for p in x.parameters())
    return isinstance(x, Tensor) and hasattr(x, "placements")


def _units(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was applied to, outer ones first."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not kind.__subclasses__():  # fully_shard makes one of every class that it is applied to
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters: after a forward pass without a backward pass, FSDP2 keeps those of the outermost module."""
    for unit in _units(model):
        unit.reshard()


@contextmanager
def resharded(model: nn.Module, work: AbstractContextManager[None]) -> Iterator[None]:
    """A context that writes parameters when it is entered and left, each time into parts that FSDP2 gathers anew."""
    reshard(model)
    try:
        with work:
            yield
    finally:
        reshard(model)


def prepare(model: nn.Module, world_size: int, *, automatic: bool = False) -> bool:
    """Look how a model is divided, and note what stands for its parameters while its modules run.

    Args:
        model: as `fully_shard` has left it.
        world_size: processes of the run.
        automatic: the size of micro-batches is to be found by trying.

    Returns:
        Whether it is divided.

    Raises:
        ValueError: it is divided in another way than is known to work, by name, with the fix.
    """
    units = _units(model)
    reshard(model)
    for name, p in model.named_parameters():
        if is_divided(p):
            _check_placement(name, p, world_size, bool(units))
    if not is_divided(model):
        return False
    if automatic:
        raise ValueError(
            "max_physical_batch_size='auto' tries again on the process that runs out of memory, but of a model that fully_shard "
            "has divided all processes must make the same passes: give max_physical_batch_size as a number"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    for unit in units:
        before = [(m, leaf, p) for m in unit.modules() for leaf, p in m._parameters.items() if is_divided(p)]
        unit.unshard()
        try:
            for module, leaf, p in before:
                now = module._parameters[leaf]
                if now is None or now is p:
                    continue  # an inner unit gathers it
                if now.dtype != p.dtype:
                    raise _refusal(names[id(p)], f"is computed with in {now.dtype} and kept in {p.dtype} (MixedPrecisionPolicy)")
                _gathered_as[p], _held_by[module] = now, ref(unit)
        finally:
            unit.reshard()
    for name, p in model.named_parameters():
        if is_divided(p) and p not in _gathered_as:
            raise _refusal(name, "is a DTensor that no fully_shard gathers (tensor parallelism?)")
    return True


def _check_placement(name: str, p: Any, world_size: int, sharded: bool) -> None:
    mesh = p.device_mesh
    if not sharded:
        raise _refusal(name, "is a DTensor that no fully_shard gathers (tensor parallelism?)")
    if mesh.ndim != 1 or mesh.size() != world_size:
        raise _refusal(name, f"is divided over a mesh of shape {tuple(mesh.shape)}, and the run has {world_size} processes")
    if not all(x.is_shard(0) for x in p.placements):
        raise _refusal(name, f"is divided as {p.placements}")
    if local(p).device.type != mesh.device_type:
        raise _refusal(name, f"is kept on {local(p).device.type} and computed with on {mesh.device_type} (an offload policy)")


def _refusal(name: str, what: str) -> ValueError:
    return ValueError(f"parameter '{name}' {what}, which has not been tested under a session. {_FIX}")


def refuse_layers(layers: Iterable[Layer]) -> None:
    """Raise where a module would have to run for single examples and FSDP2 would gather parameters inside of that.

    Raises:
        ValueError: naming the module.
    """
    for layer in layers:
        inside = [unit for module in layer.modules for unit in _units(module)] if _runs_again(layer) else []
        if inside:
            raise ValueError(
                f"fully_shard was applied to the module '{layer.display_name}' ({type(layer.module).__name__}) or to one inside, "
                "which owns parameters directly and is run once more for the gradients of single examples. Apply fully_shard to "
                "modules around it, or move those parameters into a module of their own"
            )


def _runs_again(layer: Layer) -> bool:
    return layer.rule in ("fallback", "recurrent", "computed", "custom") or bool(layer.paths)


@contextmanager
def gathered(layer: Layer) -> Iterator[None]:
    """The parameters of a layer whose module is run again after the pass; an exchange where they are divided."""
    units: list[Any] = []
    if _held_by and _runs_again(layer):
        inside = (m for module in layer.modules for m in module.modules())
        units = list(dict.fromkeys(_held_by[m]() for m in inside if m in _held_by))
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()


def refuse_let_go(layer: Layer, inputs: Any) -> None:
    """Raise where a layer was called with a parameter itself, of which FSDP2 has let go when its gradient is taken.

    Raises:
        ValueError: naming the layer.
    """
    for x in tree_flatten(inputs)[0] if _held_by else ():
        if isinstance(x, Tensor) and x.numel() and not x.untyped_storage().nbytes():
            raise ValueError(
                f"layer '{layer.display_name}' is called with a parameter as its input, which fully_shard gathers for a pass "
                "alone: hand on a copy (parameter.clone()), or leave it out with fully_shard(ignored_params={parameter})"
            )


def in_graph(p: Tensor) -> Tensor:
    """What autograd reaches where a parameter is used: the gathered tensor of a divided one."""
    found: Tensor = _gathered_as.get(p, p) if _gathered_as else p
    return found


# -- values ------------------------------------------------------------------------------------------------------------


def local(x: Tensor) -> Tensor:
    """The part of a tensor that this process holds (it may be empty), sharing its memory; no exchange."""
    held: Any = x.detach()
    part: Tensor = held.to_local() if is_divided(x) else held
    return part


def whole(tree: Any, keep: bool = True) -> Any:
    """Dicts, lists and tuples with whole tensors, on the CPU, in place of divided ones. An exchange for each of these.

    Args:
        tree: the same structure on every process.
        keep: whether this process wants them; others hold one at a time.
    """
    if not _gathered_as:  # no model is
        return tree

    def of(x: Any) -> Any:
        if not is_divided(x):
            return x
        full = x.detach().full_tensor()
        return full.cpu() if keep else torch.empty(0, dtype=x.dtype)

    return tree_map(of, tree)


def divided_as(full: Tensor, like: Any) -> Tensor:
    """A whole tensor divided as another one of its shape is: each process takes its part, nothing is sent."""
    if not is_divided(like) or is_divided(full):
        return full
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    size = -(-full.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * size, full.shape[0])
    part = full[start : start + size].to(local(like).device, copy=True)  # the whole one can be let go
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a divided model, tied parameters under their first name alone."""
    reshard(model)
    first: dict[int, str] = {}
    others = {name for name, p in model.named_parameters(remove_duplicate=False) if first.setdefault(id(p), name) != name}
    return {name: x for name, x in model.state_dict().items() if name not in others and isinstance(x, Tensor)}


def divided_state(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Named whole tensors, divided where they are values of a divided parameter: its own, an earlier one, an average."""
    parameters = {of + name: p for name, p in model.named_parameters() if is_divided(p) for of in _VALUES_OF}
    return {name: divided_as(x, parameters[name]) if name in parameters else x for name, x in state.items()}


def divided_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with what has a divided parameter's shape divided in the same way.

    Raises:
        KeyError, IndexError: the state of an optimizer of other parameters.
    """
    if not any(is_divided(p) for group in optimizer.param_groups for p in group["params"]):
        return dict(state)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [i for group in state["param_groups"] for i in group["params"]]
    parameters = dict(zip(numbers, own, strict=False))

    def of(i: Any, x: Any) -> Any:
        p = parameters.get(i)
        return divided_as(x, p) if isinstance(x, Tensor) and p is not None and x.shape == p.shape else x

    held = {i: {name: of(i, x) for name, x in values.items()} for i, values in state["state"].items()}
    return {**state, "state": held}
