"""Compile a proved graph by inductor: forward pass, and backward pass to the outputs of its sites.

Each of these outputs is added to zeros that are an input, so the gradients at the zeros are the
gradients at the outputs. What is computed from parameters stays uncompiled where gradients are
pulled back through it, and its results are inputs too. The compiler sees the rest of the program
that was proved, and nothing else.
"""

from __future__ import annotations

import operator
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx

from dpkfc.graph.capture import Capture, is_symbol
from dpkfc.graph.proof import P, counts_examples

# Its type lacks the function that changes settings for a while.
_functorch: Any = import_module("torch._functorch.config")

# Inductor draws random numbers as torch does without it. Its own loops run in one thread: in
# several, an index out of bounds, as of a wrong label, would end the process instead of raising.
_OPTIONS: dict[str, Any] = {"fallback_random": True, "cpp.threads": 1}


def find_compiler_fault() -> str:
    """Return why nothing can be compiled here, "" where it can."""
    from torch._inductor import codecache, cpp_builder, exc

    # Inductor of torch 2.13 does not quote the paths in the command of its compiler.
    for path in (torch.__file__, codecache.cache_dir(), tempfile.gettempdir()):
        if len(path.split()) > 1:
            return f"torch compiles only where no path has a space: {path}"
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
        shape = list(self.shape)
        of_examples = [dim for dim, n in enumerate(shape) if counts_examples(n)]
        for dim in of_examples:
            shape[dim] = size * (shape[dim] // P)
        zeros = torch.zeros((), dtype=self.like.dtype, device=self.like.device).expand(shape)
        for dim in of_examples:
            torch._dynamo.maybe_mark_dynamic(zeros, dim)
        return zeros.requires_grad_()


def compile_graph(
    capture: Capture,
    kept: Sequence[fx.Node],
    ended: Sequence[fx.Node],
    operands: Sequence[fx.Node],
    values: Mapping[Any, Any],
) -> Callable[..., Any]:
    """Return a function that runs a graph compiled.

    Args:
        capture: the graph, whose output are the losses; it is changed.
        kept: nodes whose tensors are returned.
        ended: nodes at which gradients are asked for.
        operands: nodes of `kept` that are computed from parameters, with their graph.
        values: node to a tensor without data, of the proof.

    Returns:
        A function from the inputs of the graph to (losses, kept tensors, zeros), where the
        gradients at the zeros are the gradients at `ended`, in their order.

    The first call takes seconds to minutes. A compiler that fails leaves the graph uncompiled, with
    a warning that names its error and no value.
    """
    module = capture.module
    zeros = [_Zeros(values[node].shape, values[node]) for node in ended]
    batch = next(i for i, given in enumerate(capture.inputs) if given.kind == "batch")
    taken = _find_taken(module.graph, operands, values)
    compute_taken = _take_out(module, taken)
    _read_sizes(capture)
    summed = _add_zeros(module.graph, ended)
    for node in taken:
        node.replace_all_uses_with(_add_input(module.graph, f"computed_{node.name}"))
    inputs = module.graph.find_nodes(op="placeholder")
    computed = [node for node in kept if node.op != "placeholder" and node not in taken]
    _add_outputs(module.graph, [summed.get(node, node) for node in computed])
    module.recompile()
    compiled = torch.compile(module, backend="inductor", fullgraph=True, options=_OPTIONS)
    is_compiled = True

    def run(*args: Any) -> Any:
        nonlocal is_compiled
        added = [x.make(len(args[batch])) for x in zeros]
        outside = compute_taken(*args)
        given_outside = [x.detach() for x in outside]
        given = [x.detach() if isinstance(x, Tensor) else x for x in args]
        for x, what in zip(given, capture.inputs, strict=True):
            if what.kind == "batch":
                torch._dynamo.maybe_mark_dynamic(x, 0)
        fault: Exception | None = None
        if is_compiled:
            try:
                # The backward pass too is compiled here, and not where its gradients are asked for.
                with _functorch.patch(force_non_lazy_backward_lowering=True):
                    losses, found = compiled(*given, *added, *given_outside)
            except Exception as error:
                fault = error
        if fault is not None or not is_compiled:
            losses, found = module(*given, *added, *given_outside)
        if fault is not None:
            # What a record raises is raised by the line above: this is a fault of the compiler,
            # which may follow the size of a batch.
            is_compiled = False
            if isinstance(fault, torch._dynamo.exc.BackendCompilerFailed):
                fault = fault.inner_exception
            warnings.warn(
                "PRIVATE, for your eyes only: the graph is not compiled"
                f" ({type(fault).__name__}); it runs uncompiled",
                stacklevel=2,
            )
        known = dict(zip(inputs, given, strict=False))
        known |= zip(computed, found, strict=True)
        known |= zip(taken, outside, strict=True)
        return losses, [known[node] for node in kept], added

    return run


def _add_input(graph: fx.Graph, name: str) -> fx.Node:
    """Add an input behind the others."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        return graph.placeholder(name)


def _add_zeros(graph: fx.Graph, ended: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Add an input to each of some nodes, and return the sums by the nodes."""
    sums: dict[fx.Node, fx.Node] = {}
    for node in ended:
        added = _add_input(graph, f"zeros_at_site_{len(sums)}")
        with graph.inserting_after(node):
            total = graph.call_function(torch.ops.aten.add.Tensor, (node, added))
        node.replace_all_uses_with(total, partial(operator.is_not, total))
        sums[node] = total
    return sums


def _add_outputs(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Return the tensors of some nodes, without a graph, beside the losses."""
    output = graph.output_node()
    (losses,) = output.all_input_nodes
    with graph.inserting_before(output):
        tensors = [graph.call_function(torch.ops.aten.detach.default, (node,)) for node in nodes]
    output.args = ((losses, tensors),)


def _find_taken(
    graph: fx.Graph, operands: Sequence[fx.Node], values: Mapping[Any, Any]
) -> list[fx.Node]:
    """Return the tensors that are handed over by the part of a graph that computes the operands.

    They are the operands, and what the rest of the graph reads of this part: a mask that is drawn
    for a weight and for its inputs is drawn once.
    """
    apart = set(operands)
    for node in reversed(graph.nodes):
        if node in apart:
            apart.update(node.all_input_nodes)
    taken = []
    for node in graph.nodes:
        # A size is computed where it is read: as an input it would be a constant.
        is_tensor = node in apart and isinstance(values[node], Tensor)
        if is_tensor and node.op != "placeholder" and not apart.issuperset(node.users):
            taken.append(node)
    return taken


def _take_out(module: fx.GraphModule, taken: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the part of a graph that computes some nodes, a function of all inputs."""
    apart = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    apart.graph_copy(module.graph, copies)
    apart.output([copies[node] for node in taken])
    # Random numbers of the rest are not drawn here.
    apart.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return fx.GraphModule(module, apart)


def _read_sizes(capture: Capture) -> None:
    """Read each size from a tensor that has it, instead of an input, which would be a constant."""
    graph = capture.module.graph
    nodes = graph.find_nodes(op="placeholder")
    sources: dict[Any, tuple[fx.Node, int]] = {}
    for node, x in zip(nodes, capture.fakes, strict=True):
        shape: Sequence[Any] = x.shape if isinstance(x, Tensor) else ()
        for dim, size in enumerate(shape):
            if is_symbol(size):
                sources.setdefault(size.node.expr, (node, dim))
    last = nodes[-1]
    for node, given, x in zip(nodes, capture.inputs, capture.fakes, strict=True):
        if given.kind != "size" or isinstance(x, int) or x.node.expr not in sources:
            continue
        with graph.inserting_after(last):
            read = graph.call_function(torch.ops.aten.sym_size.int, sources[x.node.expr])
        node.replace_all_uses_with(read)
