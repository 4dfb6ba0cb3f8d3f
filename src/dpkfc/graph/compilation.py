"""Compile a proved graph by inductor: forward pass, and backward pass to the outputs of its sites.

Each of these outputs is added to zeros that are an input, so the gradients at the zeros are the
gradients at the outputs. The compiler sees the program that was proved, and nothing else.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx

from dpkfc.graph.capture import Capture
from dpkfc.graph.proof import P

# Its type lacks the function that changes settings for a while.
_functorch: Any = import_module("torch._functorch.config")

# Inductor draws random numbers as torch does without it. Its own loops run in one thread: in
# several, an index out of bounds, as of a wrong label, would end the process instead of raising.
_OPTIONS: dict[str, Any] = {"fallback_random": True, "cpp.threads": 1}


def find_compiler_fault() -> str:
    """Return why nothing can be compiled here, "" where it can."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError) as error:
        return f"no C++ compiler was found ({type(error).__name__})"
    return ""


@dataclass(frozen=True)
class _Zeros:
    """Zeros of the size of a node.

    Attributes:
        shape: with `P` for the number of examples.
        like: a tensor without data, of the type and on the device.
    """

    shape: Sequence[int]
    like: Tensor

    def make(self, size: int) -> Tensor:
        """Return zeros for so many examples, which take the memory of one number."""
        shape = [size * (n // P) if n and n % P == 0 else n for n in self.shape]
        zeros = torch.zeros((), dtype=self.like.dtype, device=self.like.device).expand(shape)
        for dim, n in enumerate(self.shape):
            if n and n % P == 0:
                torch._dynamo.maybe_mark_dynamic(zeros, dim)
        return zeros.requires_grad_()


def compile_graph(
    capture: Capture, kept: Sequence[fx.Node], ended: Sequence[fx.Node], values: Mapping[Any, Any]
) -> Callable[..., Any]:
    """Return a function that runs a graph compiled.

    Args:
        capture: the graph, whose output are the losses; it is changed.
        kept: nodes whose tensors are returned, without a graph.
        ended: nodes at which gradients are asked for.
        values: node to a tensor without data, of the proof.

    Returns:
        A function from the inputs of the graph to (losses, kept tensors, zeros), where the
        gradients at the zeros are the gradients at `ended`, in their order.

    The first call takes seconds to minutes. A compiler that fails leaves the graph uncompiled, with
    a warning that names its error and no value.
    """
    module = capture.module
    graph = module.graph
    zeros = [_Zeros(values[node].shape, values[node]) for node in ended]
    batch = next(i for i, given in enumerate(capture.inputs) if given.kind == "batch")
    _read_sizes(capture)
    last = graph.find_nodes(op="placeholder")[-1]
    summed: dict[fx.Node, fx.Node] = {}
    for node in ended:
        with graph.inserting_after(last):
            last = graph.placeholder(f"zeros_at_site_{len(summed)}")
        with graph.inserting_after(node):
            total = graph.call_function(torch.ops.aten.add.Tensor, (node, last))
        node.replace_all_uses_with(total, partial(operator.is_not, total))
        summed[node] = total
    output = graph.output_node()
    (losses,) = output.all_input_nodes
    inputs = graph.find_nodes(op="placeholder")
    computed = [node for node in kept if node.op != "placeholder"]
    with graph.inserting_before(output):
        tensors = [
            graph.call_function(torch.ops.aten.detach.default, (summed.get(node, node),))
            for node in computed
        ]
    output.args = ((losses, tensors),)
    module.recompile()
    compiled = torch.compile(module, backend="inductor", fullgraph=True, options=_OPTIONS)
    is_compiled = True

    def run(*args: Any) -> Any:
        nonlocal is_compiled
        added = [x.make(len(args[batch])) for x in zeros]
        given = [x.detach() if isinstance(x, Tensor) else x for x in args]
        for x, what in zip(given, capture.inputs, strict=True):
            if what.kind == "batch":
                torch._dynamo.maybe_mark_dynamic(x, 0)
        fault: Exception | None = None
        if is_compiled:
            try:
                # The backward pass too is compiled here, and not where its gradients are asked for.
                with _functorch.patch(force_non_lazy_backward_lowering=True):
                    losses, found = compiled(*given, *added)
            except Exception as error:
                fault = error
        if fault is not None or not is_compiled:
            losses, found = module(*given, *added)
        if fault is not None:
            # What a record raises is raised by the line above: this is a fault of the compiler.
            is_compiled = False
            warnings.warn(
                f"the graph is not compiled ({type(fault).__name__}); it runs uncompiled",
                stacklevel=2,
            )
        known = dict(zip(inputs, given, strict=False)) | dict(zip(computed, found, strict=True))
        return losses, [known[node] for node in kept], added

    return run


def _read_sizes(capture: Capture) -> None:
    """Read each size from a tensor that has it, instead of an input, which would be a constant."""
    graph = capture.module.graph
    nodes = graph.find_nodes(op="placeholder")
    sources: dict[Any, tuple[fx.Node, int]] = {}
    for node, x in zip(nodes, capture.fakes, strict=True):
        for dim, size in enumerate(x.shape if isinstance(x, Tensor) else ()):
            if not isinstance(size, int) and size.node.expr.is_Symbol:
                sources.setdefault(size.node.expr, (node, dim))
    last = nodes[-1]
    for node, given, x in zip(nodes, capture.inputs, capture.fakes, strict=True):
        if given.kind != "size" or isinstance(x, int) or x.node.expr not in sources:
            continue
        with graph.inserting_after(last):
            read = graph.call_function(torch.ops.aten.sym_size.int, sources[x.node.expr])
        node.replace_all_uses_with(read)
