"""Passes over a captured graph: the blocks of every layer from one replay.

A replay runs the graph, differentiates the losses at the outputs of the sites alone, and hands
every layer its blocks. No gradient of a weight is computed, and no operation is intercepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import _has_any_global_hook

from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.autograd_graph import pull_rows
from dpkfc.gradients.layer_matrices import add_blocks, add_gradients
from dpkfc.gradients.layers import Calls, Layer
from dpkfc.gradients.rules import tie_uses
from dpkfc.graph.capture import Capture, FrontEnd, NotCapturedError
from dpkfc.graph.compilation import compile_graph
from dpkfc.graph.image_pooling import choose_pooling
from dpkfc.graph.planner import Planner
from dpkfc.graph.proof import fill_memory, prove
from dpkfc.graph.sites import AnySite, Convolution, Embedding, Operand, Pass, Product
from dpkfc.linalg.blocks import join_uses
from dpkfc.tensors import Tensors
from dpkfc.tracking.states import Unknown

MOST_SIZES = 64
"""Sets of sizes, such as lengths of sequences, for which the proof of a graph is kept."""
MOST_COMPILED = 4
"""The first sets, for which a graph is compiled too; each may take a minute."""


@dataclass(frozen=True)
class _Program:
    """A graph that is proved and runs.

    Attributes:
        run: maps the inputs to (losses, kept tensors, edges).
        sites: of the graph.
        kept: the nodes of the kept tensors.
        ended: the nodes of the edges.
        whole: layer name to the sites that make up its blocks.
        parts: operands whose gradients are formed, with their sites.
    """

    run: Callable[..., Any]
    kept: Sequence[fx.Node]
    ended: Sequence[fx.Node]
    whole: dict[str, list[AnySite]]
    parts: list[tuple[AnySite, Operand]]


class GraphPasses:
    """Runs a loss function on a model by captured graphs.

    Args:
        model: that is trained.
        layers: of it.
        data: tensors of the private data set.
        compiles: inductor compiles the graphs.

    Attributes:
        refusal: why no further pass is captured, None at the beginning.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        data: Iterable[Tensor] = (),
        *,
        compiles: bool = False,
    ) -> None:
        self._model = model
        self._compiles = compiles
        self._layers = layers
        self._parameters = trainable_tensors(model)
        self._front = FrontEnd(self._parameters, self._make_runner, data)
        self._last: Any = None
        self._composed: tuple[Any, Any, Any] = (None, None, None)
        self.refusal: Unknown | None = None

    @property
    def captures(self) -> int:
        """Return how many graphs were captured."""
        return self._front.captures

    def calls(
        self,
        loss_fn: Callable[..., Tensor],
        augment: Callable[[Any], Any] | None,
        batch: Any,
        size: int,
        weigh: Callable[[Tensor], Tensor],
        *,
        copies: bool = False,
    ) -> Calls | None:
        """Return the blocks of all layers for one micro-batch.

        Args:
            loss_fn: maps model and batch to losses `[n]`.
            augment: maps the batch to one with as many rows, None for no change.
            batch: on the device of the model, with the examples in front.
            size: examples n, at least 2.
            weigh: maps the losses to the number that is differentiated.
            copies: the blocks may not share memory with parameters.

        Returns:
            None where the pass cannot be captured or proved; `refusal` says why.
        """
        if self.refusal is not None:
            return None
        try:
            program, losses, tensors, edges = self._replay(loss_fn, augment, batch, size)
        except NotCapturedError as error:
            self.refusal = Unknown(error.operation, error.reason)
            return None
        pairs = zip(program.ended, edges, strict=True)
        wanted = {node: edge for node, edge in pairs if edge is not None}
        total = weigh(losses)
        with torch.autocast(losses.device.type, enabled=False):
            arrived = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
        gradients: dict[fx.Node, Tensor | None] = dict.fromkeys(program.ended)
        gradients.update(zip(wanted, arrived, strict=True))
        kept = dict(zip(program.kept, tensors, strict=True))
        if copies:
            kept = self._copy_parameters(kept)
        # Norms and sums are not differentiated: they keep no graph alive.
        values = {node: x.detach() for node, x in kept.items()}
        return self._blocks(program, Pass(values, gradients, size), kept)

    def _replay(self, loss_fn: Any, augment: Any, batch: Any, size: int) -> Any:
        """Return (program, losses, kept tensors, edges) of one replay.

        Raises:
            NotCapturedError: the pass cannot be captured or proved.
        """
        if _has_any_global_hook():
            raise NotCapturedError("global module hook", "it may change what a layer returns")
        if any(type(p) not in (nn.Parameter, Tensor) for p in self._parameters.values()):
            raise NotCapturedError("parameter", "parameters of this type are not captured")
        function = self._compose(loss_fn, augment)
        try:
            with torch.enable_grad():
                losses = self._front.call(function, self._model, batch)
            if self._last is None or losses is not self._last[1]:
                raise NotCapturedError("loss_fn", "its losses are not the output of a graph")
            if len(losses) != size:
                raise NotCapturedError("loss_fn", "it returns another number of losses")
            if not losses.requires_grad:
                raise NotCapturedError("loss", "it depends on no trainable parameter")
            return self._last
        finally:
            self._last = None

    def _compose(self, loss_fn: Any, augment: Any) -> Any:
        """Return the function from a model and a batch to losses; one for equal arguments."""
        if augment is None:
            return loss_fn
        if self._composed[0] is not loss_fn or self._composed[1] is not augment:

            def function(model: Any, batch: Any) -> Tensor:
                losses: Tensor = loss_fn(model, augment(batch))
                return losses

            self._composed = loss_fn, augment, function
        return self._composed[2]

    def _copy_parameters(self, kept: dict[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
        storages = {p.untyped_storage().data_ptr() for p in self._parameters.values()}
        copies = {}
        for node, x in kept.items():
            is_shared = x.grad_fn is None and x.untyped_storage().data_ptr() in storages
            copies[node] = x.clone() if is_shared else x
        return copies

    def _make_runner(self, capture: Capture) -> Callable[..., Any]:
        programs: dict[Any, _Program] = {}
        sizes_of = _size_reader(capture)

        def run(*args: Any) -> Any:
            sizes = sizes_of(args)
            key = tuple(sizes.values())
            program = programs.get(key)
            if program is None:
                if len(programs) >= MOST_SIZES:
                    programs.clear()
                compiles = self._compiles and len(programs) < MOST_COMPILED
                program = programs[key] = _program(capture, sizes, self._layers, compiles=compiles)
            losses, tensors, edges = program.run(*args)
            self._last = (program, losses, tensors, edges)
            return (losses,)

        return run

    # -- blocks ------------------------------------------------------------------------------------

    def _blocks(self, program: _Program, run: Pass, kept: dict[fx.Node, Tensor]) -> Calls:
        """Return the blocks; gradients are pulled back through the graph of kept tensors."""
        calls: Calls = {}
        for layer in self._layers:
            sites = program.whole.get(layer.name, ())
            used = [site for site in sites if run.gradients[site.output] is not None]
            if used:
                calls[layer.name] = [_block(layer, used, run)]
        gradients: Tensors = {}
        sources: list[Tensor] = []
        rows: list[Tensor] = []
        for site, operand in program.parts:
            if run.gradients[site.output] is None:
                continue
            gradient = site.gradient(run, operand)
            if operand.parameter is None:
                # It is computed from parameters.
                source = kept[operand.node]
                sources.append(source)
                rows.append(gradient.to(source.dtype))
            else:
                add_gradients(gradients, {operand.parameter: operand.orient(gradient)})
        pulled = pull_rows(sources, rows, [*self._parameters.values()], run.size)
        for name, own in zip(self._parameters, pulled, strict=True):
            if own is not None:
                add_gradients(gradients, {name: own})
        gradients = {name: g.detach() for name, g in gradients.items()}
        add_blocks(self._layers, gradients, calls)
        return calls


def _block(layer: Layer, sites: Sequence[Any], run: Pass) -> Any:
    """Return the block of a layer, all its uses joined."""
    if layer.rule == "tied":
        lookups = [x.lookup(run) for x in sites if isinstance(x, Embedding)]
        outers = [x.outer(run, has_bias=False) for x in sites if isinstance(x, Product)]
        return tie_uses(layer, lookups, outers, run.size)
    has_weight = "weight" in layer.parameters
    has_bias = "bias" in layer.parameters
    blocks: list[Any] = []
    for site in sites:
        if isinstance(site, Product):
            blocks.append(site.outer(run, has_bias=has_bias and has_weight))
        elif isinstance(site, Convolution):
            blocks.append(site.block(run, weight=has_weight, bias=has_bias))
        else:
            blocks.append(site.lookup(run))
    return join_uses(blocks)


# --------------------------------------------------------------------------------------------------


def _size_reader(capture: Capture) -> Callable[[Sequence[Any]], dict[Any, int]]:
    """Return a function from inputs to its sizes that do not count examples."""
    batch = capture.batch_symbols
    places: dict[Any, tuple[int, int]] = {}
    for i, x in enumerate(capture.fakes):
        sizes = x.shape if isinstance(x, Tensor) else [x]
        for dim, size in enumerate(sizes):
            if isinstance(size, int):
                continue
            symbol = size.node.expr
            if symbol.is_Symbol and symbol not in batch:
                places.setdefault(symbol, (i, dim))

    def read(args: Sequence[Any]) -> dict[Any, int]:
        found = {}
        for symbol, (i, dim) in places.items():
            x = args[i]
            found[symbol] = int(x.shape[dim]) if isinstance(x, Tensor) else int(x)
        return found

    return read


def _program(
    capture: Capture, sizes: dict[Any, int], layers: Sequence[Layer], *, compiles: bool
) -> _Program:
    """Prove a graph at some sizes and return it with the outputs that its sites need."""
    graph = fx.Graph()
    results = graph.graph_copy(capture.module.graph, {})
    graph.output(results)
    own = Capture(fx.GraphModule(capture.module, graph), capture.inputs, capture.fakes)
    graph = own.module.graph
    fill_memory(graph)
    proof = prove(own, sizes)
    sites = Planner(own, proof).sites()
    whole, parts = _assign(layers, sites)
    kept: dict[fx.Node, None] = {}
    ended: dict[fx.Node, None] = {}
    used = [site for site, _ in parts]
    for several in whole.values():
        used += several
    for site in used:
        outputs = getattr(site, "outputs", {0: site.output})
        kept.update(dict.fromkeys(site.needs))
        ended.update(dict.fromkeys(outputs.values()))
    computed = dict.fromkeys(operand.node for _, operand in parts if operand.parameter is None)
    kept.update(computed)
    tensors = list(kept)
    ends = list(ended)
    if compiles:
        run = compile_graph(own, tensors, ends, list(computed), proof.values)
    else:
        choose_pooling(graph)
        edges = []
        for node in ends:
            with graph.inserting_after(node):
                edges.append(graph.call_function(find_edge, (node,)))
        output = graph.output_node()
        (losses,) = output.all_input_nodes
        output.args = ((losses, tensors, edges),)
        own.module.recompile()
        run = own.module.forward
    return _Program(run, tensors, ends, whole, parts)


def find_edge(x: Tensor) -> Any:
    """Return where the gradients of a tensor arrive, None where none can."""
    return get_gradient_edge(x) if x.requires_grad else None


def _assign(
    layers: Sequence[Layer], sites: Sequence[AnySite]
) -> tuple[dict[str, list[AnySite]], list[tuple[AnySite, Operand]]]:
    """Divide the uses of parameters into whole blocks of layers and single operands."""
    uses: dict[str, list[tuple[AnySite, Operand]]] = {}
    parts: list[tuple[AnySite, Operand]] = []
    computed: set[str] = set()
    for site in sites:
        for operand in site.operands:
            if operand.parameter is None:
                parts.append((site, operand))
                computed |= _sources(operand.node)
            else:
                uses.setdefault(operand.parameter, []).append((site, operand))
    whole: dict[str, list[AnySite]] = {}
    for layer in layers:
        own = {role: uses.get(name, []) for role, name in layer.parameters.items()}
        names = computed.intersection(layer.parameters.values())
        if not names and _makes_block(layer, own):
            first = next(iter(own.values()))
            whole[layer.name] = [site for site, _ in first]
        else:
            for several in own.values():
                parts += several
    return whole, parts


def _sources(node: fx.Node) -> set[str]:
    """Return the names of the placeholders that a node is computed from."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            waiting += source.all_input_nodes
    return {source.meta["parameter"] for source in found if "parameter" in source.meta}


def _makes_block(layer: Layer, uses: dict[str, list[tuple[AnySite, Operand]]]) -> bool:
    """Return whether all uses of a layer's parameters are of the form of its block."""
    numbers: list[int] = []
    sites: list[Any] = []
    for several in uses.values():
        sites = [site for site, _ in several]
        own = [*map(id, sites)]
        # Weight and bias belong to the same operations, and each operation reads them once.
        if not own or len(set(own)) < len(own) or (numbers and own != numbers):
            return False
        numbers = own
    if layer.rule == "linear":
        if not all(isinstance(x, Product) and (x.bias is None or x.is_left) for x in sites):
            return False
        if "weight" not in uses:
            return all(x.weight is None for x in sites)
        return all(x.reads_parameter(transposed=layer.transposed) for x in sites)
    if layer.rule == "conv":
        return all(isinstance(x, Convolution) for x in sites)
    if layer.rule == "embedding":
        return all(map(_reads_rows, sites))
    if layer.rule == "tied" and [*uses] == ["weight"]:
        products = [x for x in sites if not _reads_rows(x)]
        return all(isinstance(x, Product) and x.reads_parameter(transposed=False) for x in products)
    return False


def _reads_rows(site: Any) -> bool:
    """Return whether a site looks up rows of a weight."""
    return isinstance(site, Embedding) and not site.weight.crosswise
