"""Capture a forward pass as one graph of ATen operations with a symbolic batch size.

`torch.compile` with a backend of our own hands over the graph of the whole loss function. Before
each later call it compares what it has assumed: code, closures, globals, attributes, training
flags, hooks and shapes. A call that differs is captured anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    AttributeMutationNew,
    ValueMutationNew,
)
from torch._functorch._aot_autograd.functional_utils import (
    from_fun,
    has_data_mutation,
    to_fun,
)
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves, tree_map_only

from dpkfc.gradients.state import StateChangedError

# Their types lack the function that changes settings for a while.
_dynamo: Any = import_module("torch._dynamo.config")
_shapes: Any = import_module("torch.fx.experimental._config")

_TORCH = Path(torch.__file__).parent
_DYNAMO = _TORCH / "_dynamo"

# The settings under which captures and guards are right.
_SETTINGS = {
    # Otherwise hooks that are added after the first step would be ignored.
    "skip_nnmodule_hook_guards": False,
    "allow_rnn": True,
    "specialize_float": True,
    "accumulated_recompile_limit": 256,
    "side_effect_replay_policy": "silent",
}
# It logs what a program raises, which the program raises again when it runs uncaptured.
_errors_of_programs = logging.getLogger("torch._subclasses.fake_tensor")

# What torch raises where it cannot capture a program; the last three say that a size or a value is
# read from data.
_FAILURES = (
    torch._dynamo.exc.TorchDynamoException,
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)

MOST_GRAPHS = 16
"""Captures of one session that are kept. A program that needs more takes the other way."""


class NotCapturedError(Exception):
    """Says that a pass cannot be captured or proved.

    Attributes:
        operation: the first operation that is the reason.
        reason: what it does.
    """

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: {reason}")
        self.operation = operation
        self.reason = reason


@dataclass(frozen=True)
class Input:
    """An input of a captured graph.

    Attributes:
        kind: "parameter" (trainable), "batch", "outer" (buffers, frozen parameters, closures) or
            "size".
        name: of a trainable parameter in the model; elsewhere where the program reads it.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Capture:
    """A forward pass as a graph without writes: inputs to the losses `[n]`.

    Attributes:
        module: the graph.
        inputs: what its placeholders are.
        fakes: their values without data, with symbolic sizes.
    """

    module: fx.GraphModule
    inputs: Sequence[Input]
    fakes: Sequence[Any]

    @property
    def batch_symbols(self) -> set[Any]:
        """Return the symbols that stand for the number of examples."""
        pairs = zip(self.inputs, self.fakes, strict=True)
        return {x.shape[0].node.expr for given, x in pairs if given.kind == "batch"}


def _call(loss_fn: Callable[..., Tensor], model: Any, batch: Any) -> Tensor:
    return loss_fn(model, batch)


def is_symbol(size: Any) -> bool:
    """Return whether a size is a symbol, and not a number or something computed."""
    return not isinstance(size, int) and size.node.expr.is_Symbol


class FrontEnd:
    """Captures loss functions of one model.

    Args:
        parameters: the trainable parameters by name.
        make_runner: makes the function that runs in the place of a captured graph.
        data: tensors of the private data set, which a program may read from its batch alone.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        make_runner: Callable[[Capture], Callable[..., Tensor]],
        data: Iterable[Tensor] = (),
    ) -> None:
        self._parameters = {id(p): name for name, p in parameters.items()}
        self._data = {x.untyped_storage().data_ptr() for x in data} - {0}
        self._make_runner = make_runner
        self._batch: set[int] = set()
        # The compiler counts captures for each code object, and each session has its own.
        own = FunctionType(_call.__code__.replace(), globals())
        options: dict[str, Any] = {"fullgraph": True, "dynamic": True}
        self._compiled: Any = torch.compile(own, backend=self._compile, **options)
        self.captures = 0

    def call(self, loss_fn: Callable[..., Tensor], model: Any, batch: Any) -> Tensor:
        """Return the losses of a batch from the captured graph, captured now if it is new.

        Raises:
            NotCapturedError: it cannot be.
            StateChangedError: it reads the private data set.
        """
        leaves = tree_leaves(batch)
        for x in leaves:
            if x is not None and not isinstance(x, Tensor):
                raise NotCapturedError("batch", "it holds values that are not tensors")
        self._batch = set(map(id, leaves))
        is_silent, _errors_of_programs.disabled = _errors_of_programs.disabled, True
        try:
            with (
                _dynamo.patch(recompile_limit=MOST_GRAPHS, **_SETTINGS),
                _shapes.patch(use_duck_shape=False),
            ):
                losses: Tensor = self._compiled(loss_fn, model, batch)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            why = f"the program differs at every step, and {MOST_GRAPHS} graphs are kept"
            raise NotCapturedError("loss_fn", why) from error
        except _FAILURES as error:
            raise _refusal(error) from error
        finally:
            _errors_of_programs.disabled = is_silent
        return losses

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Tensor]:
        self.captures += 1
        tx: Any = InstructionTranslator.current_tx()
        if _has_side_effects(tx.output.side_effects):
            raise NotCapturedError("side effect", "the program changes a variable or an attribute")
        if tx.output.random_calls:
            raise NotCapturedError("random", "it draws numbers of Python's random module")
        capture = self._lower(module)
        return self._make_runner(capture)

    def _lower(self, module: fx.GraphModule) -> Capture:
        """Return the capture of a graph of the compiler's, in ATen operations."""
        placeholders = module.graph.find_nodes(op="placeholder")
        inputs = [self._input(node) for node in placeholders]
        mode = TracingContext.get().fake_mode
        assert mode is not None and mode.shape_env is not None
        fakes = [_fake(node.meta["example_value"], mode) for node in placeholders]
        (results,) = module.graph.output_node().args
        if not isinstance(results, Sequence) or len(results) != 1:
            raise NotCapturedError("output", "the program keeps more than its losses")
        function = _Lowering(module).losses
        with mode, enable_python_dispatcher(), torch.enable_grad():
            traced = make_fx(function, _COPIES, _allow_non_fake_inputs=True)(*fakes)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        for given, x in zip(inputs, fakes, strict=True):
            if given.kind == "batch" and not (x.dim() and is_symbol(x.shape[0])):
                raise NotCapturedError("batch size", "the program works for one number of examples")
        capture = Capture(traced, inputs, fakes)
        _check_decisions(mode.shape_env.guards, capture.batch_symbols)
        return capture

    def _input(self, node: fx.Node) -> Input:
        given = node.meta.get("grapharg")
        example = node.meta["example_value"]
        if not isinstance(example, Tensor):
            return Input("size", node.name)
        real = None if given is None else given.example
        name = node.name if given is None else str(given.source.name)
        if id(real) in self._parameters:
            return Input("parameter", self._parameters[id(real)])
        if id(real) in self._batch:
            return Input("batch", name)
        assert isinstance(real, Tensor)
        if real.layout is torch.strided and real.untyped_storage().data_ptr() in self._data:
            raise StateChangedError(
                f"loss_fn reads the private data set by '{name[:60]}', outside of its batch; every "
                "example would depend on all of it. Compute such values from public data"
            )
        return Input("outer", name)


def _check_decisions(guards: Iterable[Any], batch_symbols: set[Any]) -> None:
    """Refuse a program that decides in Python by the number of examples.

    Operations of torch decide by it too, between ways to compute the same.

    Raises:
        NotCapturedError: naming the decision.
    """
    one = next(iter(batch_symbols), None)
    for guard in guards:
        # Tensors of one batch may be compared in length with each other.
        decided = guard.expr.xreplace(dict.fromkeys(batch_symbols, one))
        if one not in decided.free_symbols:
            continue
        place = guard.sloc.framework_loc
        parents = Path(getattr(place, "filename", "")).parents
        # An end of a slice comes from the program, and so does a fraction.
        is_end = "_compute_slice_index" in str(place)
        is_whole = all(side.is_integer for side in decided.args)
        if is_end or not is_whole or _DYNAMO in parents or _TORCH not in parents:
            raise NotCapturedError(str(decided), "the program decides by the number of examples")


def _fake(x: Any, mode: Any) -> Any:
    """Return a tensor without data, with the symbolic sizes of another; a size as it is."""
    if not isinstance(x, Tensor):
        return x
    with mode:
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return y.requires_grad_(x.requires_grad)


def _has_side_effects(effects: Any) -> bool:
    """Return whether a program changes anything that was there before it ran."""
    if effects.tensor_hooks or effects.save_for_backward:
        return True
    for variable in effects.id_to_variable.values():
        is_new = isinstance(variable.mutation_type, (AttributeMutationNew, ValueMutationNew))
        is_restored = variable in effects.ignore_mutation_on_these_variables
        if not (is_new or is_restored) and effects.is_modified(variable):
            if not _has_old_values(variable, effects.store_attr_mutations.get(variable, {})):
                return True
    return False


def _has_old_values(variable: Any, written: Mapping[str, Any]) -> bool:
    """Return whether all that was written to the attributes of an object is what they held."""
    owner = getattr(variable, "value", None)
    if (
        owner is None
        or not written
        or type(variable.mutation_type) is not AttributeMutationExisting
    ):
        return False
    for name, value in written.items():
        if not isinstance(value, ConstantVariable) or name not in vars(owner):
            return False
        before = vars(owner)[name]
        if type(before) is not type(value.value) or before != value.value:
            return False
    return True


def _refusal(error: Exception) -> NotCapturedError | StateChangedError:
    """Return why a program is not captured, from an error of the compiler."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (NotCapturedError, StateChangedError)):
            return cause
        cause = cause.__cause__ or cause.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return NotCapturedError(type(error).__name__, " ".join(lines)[:160])


def _copy(x: Tensor, y: Tensor, non_blocking: bool = False) -> Tensor:
    """Return `x.copy_(y)` without the write; the operation has no derivative."""
    values = torch.ops.aten._to_copy.default(y, dtype=x.dtype)
    return torch.ops.aten.expand.default(values, x.shape)


_COPIES = {torch.ops.aten.copy.default: _copy}


class _Lowering(fx.Interpreter):
    """Runs a graph of the compiler's; what is computed without gradients is detached."""

    def losses(self, *args: Any) -> Tensor:
        """Return the losses, without a write to any tensor.

        Raises:
            NotCapturedError: a tensor that the program is given is written.
        """
        above = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        with torch._C._ExcludeDispatchKeyGuard(above), FunctionalTensorMode():
            own = [to_fun(x) for x in args]
            (losses,) = self.run(*own)
            if any(isinstance(x, Tensor) and has_data_mutation(x) for x in own):
                raise NotCapturedError("buffer", "the program writes into a tensor it is given")
            result: Any = from_fun(losses)
        assert isinstance(result, Tensor)
        return result

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if n.op == "call_function" and isinstance(n.target, HigherOrderOperator):
            raise NotCapturedError(n.target.name(), "its backward pass is not in the graph")
        if "inference_mode" in n.name:
            raise NotCapturedError("inference_mode", "it is not followed")
        if "multilabel_margin_loss" in str(n.target):
            # Where an example has fewer labels than classes (2.13).
            raise NotCapturedError("multilabel_margin_loss", "torch computes something else")
        result = super().run_node(n)
        if torch.is_grad_enabled() or n.op not in ("call_function", "call_method"):
            return result
        if str(n.target).rstrip(">").endswith("_"):
            raise NotCapturedError(str(n.target), "it writes where gradients are disabled")
        return tree_map_only(Tensor, torch.ops.aten.detach.default, result)
