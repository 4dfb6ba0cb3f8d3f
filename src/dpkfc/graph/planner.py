"""From the sites of a proof to their kinds, and what the graph has to keep for them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from dpkfc.gradients.shared_uses import expand_rows
from dpkfc.graph.capture import Capture, NotCapturedError
from dpkfc.graph.proof import P, Proof, Site, counts_examples
from dpkfc.graph.sites import (
    AnySite,
    Convolution,
    Embedding,
    Norm,
    Operand,
    Other,
    Product,
    Rows,
)
from dpkfc.tracking.batch_rules import arguments_of
from dpkfc.tracking.states import BatchAxis

# Operations whose result is their first argument, and such that may transpose it.
_SAME = {"aten._to_copy.default", "aten.alias.default", "aten.clone.default"}
_TRANSPOSING = {"aten.t.default", "aten.transpose.int", "aten.permute.default"}


class Planner:
    """Makes the sites of one proof, and notes what the graph has to keep for them.

    Args:
        capture: the graph.
        proof: of it.
    """

    def __init__(self, capture: Capture, proof: Proof) -> None:
        self._proof = proof
        self._names: dict[fx.Node, str] = {}
        placeholders = capture.module.graph.find_nodes(op="placeholder")
        for node, given in zip(placeholders, capture.inputs, strict=True):
            if given.kind == "parameter":
                self._names[node] = given.name
                node.meta["parameter"] = given.name

    def sites(self) -> list[AnySite]:
        """Return the sites."""
        found: list[AnySite] = []
        for site in self._proof.sites:
            found += self._site(site)
        return found

    def _operand(self, node: Any) -> Operand | None:
        """Return an operand, None for a value that depends on no parameter."""
        if node is None or node not in self._trained:
            return None
        shape = tuple(self._proof.values[node].shape)
        source, crosswise = node, False
        while source not in self._names:
            target = str(source.target)
            if target in _TRANSPOSING and len(shape) == 2 and self._is_crossed(source):
                crosswise = not crosswise
            elif target not in _SAME:
                return Operand(node, None, False, shape)
            source = source.args[0]
        return Operand(node, self._names[source], crosswise, shape)

    def _is_crossed(self, node: fx.Node) -> bool:
        """Return whether an operation on a matrix gives its transpose, and not the matrix."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        matrix = self._proof.values[source]
        result = self._proof.values[node]
        if matrix.dim() != 2:
            return False
        return result.shape == matrix.T.shape and result.stride() == matrix.T.stride()

    def _site(self, site: Site) -> list[AnySite]:
        self._trained = set(site.operands)
        results = tree_leaves([self._proof.values[x] for x in (site.node, *site.axes)])
        if any(isinstance(x, Tensor) and x.is_complex() for x in results):
            raise NotCapturedError(str(site.function), "it meets parameters with complex numbers")
        name = site.function.overloadpacket.__name__
        if "batch_norm" in name:
            raise NotCapturedError(str(site.function), "its weights have no rule")
        made: AnySite | None = None
        if name in ("mm", "addmm"):
            made = self._product(site, name)
        elif name == "convolution":
            made = self._convolution(site)
        elif name == "embedding":
            made = self._embedding(site)
        elif name in ("native_layer_norm", "native_group_norm"):
            made = self._norm(site)
        elif name == "expand":
            made = self._plan_expanded(site)
        elif site.is_pointwise:
            return self._rows(site)
        return [made or self._plan_other(site)]

    def _product(self, site: Site, name: str) -> Product | None:
        arguments = _name_arguments(site)
        addend = None
        one, two = site.args[:2]
        if name == "addmm":
            addend = arguments.get("input", arguments.get("self"))
            one, two = site.args[1:3]
        scales = (arguments.get("alpha", 1), arguments.get("beta", 1))
        if scales != (1, 1) or {one, two} <= self._trained:
            return None
        has_examples = one in site.axes, two in site.axes
        if sum(has_examples) != 1:
            return None
        is_left = has_examples[0]
        x, factor = (one, two) if is_left else (two, one)
        x_axis = site.axes[x]
        axis = _first(site.outputs)
        # Rows of the left factor are rows of the product, columns of the right one its columns.
        kept_dim = 0 if is_left else 1
        if x_axis.dim != kept_dim or axis.dim != kept_dim:
            return None
        bias = self._operand(addend)
        if bias is not None and (not is_left or not _is_row(bias.shape)):
            return None
        return Product(site.node, x, x_axis, axis, is_left, self._operand(factor), bias)

    def _convolution(self, site: Site) -> Convolution | None:
        x, weight, bias, stride, padding, dilation, transposed, _, groups = site.args
        if transposed or x not in site.axes:
            return None
        kernel = tuple(self._proof.values[weight].shape[2:])
        settings = {"kernel": kernel, "groups": groups}
        for key, value in (("stride", stride), ("padding", padding), ("dilation", dilation)):
            lengths = tuple(value)
            settings[key] = lengths * len(kernel) if len(lengths) == 1 else lengths
        return Convolution(
            site.node,
            x,
            site.axes[x],
            _first(site.outputs),
            self._operand(weight),
            self._operand(bias),
            settings,
        )

    def _embedding(self, site: Site) -> Embedding | None:
        arguments = _name_arguments(site)
        weight = self._operand(arguments["weight"])
        ids = arguments["indices"]
        padding = arguments.get("padding_idx", -1)
        if arguments.get("scale_grad_by_freq", False):
            raise NotCapturedError("aten.embedding.default", "scale_grad_by_freq mixes examples")
        if weight is None or ids not in site.axes:
            return None
        # An index below zero means that no row is padding.
        row = padding if padding >= 0 else None
        axes = site.axes[ids], _first(site.outputs)
        return Embedding(site.node, ids, *axes, weight, row)

    def _norm(self, site: Site) -> Norm | None:
        given = _name_arguments(site)
        x = given["input"]
        if x not in site.axes:
            return None
        axis = _first(site.outputs)
        has_channels = "group" in given
        if has_channels and axis.dim != 0:
            return None
        if has_channels:
            normalise: Any = partial(F.group_norm, num_groups=given["group"])
        else:
            normalise = partial(F.layer_norm, normalized_shape=given["normalized_shape"])
        return Norm(
            _output(site.node, 0),
            x,
            axis,
            self._operand(given["weight"]),
            self._operand(given["bias"]),
            partial(normalise, eps=given["eps"]),
            has_channels,
        )

    def _plan_expanded(self, site: Site) -> Rows | None:
        operand = self._operand(site.operands[0])
        assert operand is not None
        axis = _first(site.outputs)
        shape = list(self._proof.values[site.node].shape)
        entries = math.prod(shape) // shape[axis.dim]
        # A repetition of other dimensions too, or of several entries, is differentiated again.
        is_alone = entries == math.prod(operand.shape)
        return Rows(site.node, axis, [operand]) if is_alone else None

    def _rows(self, site: Site) -> list[AnySite]:
        """Give every operand of an elementwise operation a row for each example."""
        graph = site.node.graph
        axis = _first(site.outputs)
        found: list[AnySite] = []
        batched, own = next(iter(site.axes.items()))
        values = self._proof.values
        for node in site.operands:
            operand = self._operand(node)
            assert operand is not None
            with graph.inserting_before(site.node):
                length = graph.call_function(torch.ops.aten.sym_size.int, (batched, own.dim))
                rows = graph.call_function(expand_rows, (node, site.rank, axis.dim, length))
            size = values[batched].shape[own.dim]
            values[rows] = expand_rows(values[node], site.rank, axis.dim, size)
            site.node.replace_input_with(node, rows)
            found.append(Rows(rows, axis, [operand]))
        return found

    def _plan_other(self, site: Site) -> Other:
        values = self._proof.values
        arguments = (list(site.args), dict(site.kwargs))
        inputs = [x for x in site.node.all_input_nodes if isinstance(values[x], Tensor)]
        public = [x for x in inputs if x not in site.axes and x not in site.operands]

        def take_one(x: Any) -> Any:
            if isinstance(x, fx.Node) and not isinstance(values[x], Tensor):
                x = values[x]
            return x // P if type(x) is int and counts_examples(x) else x

        args = tree_map(take_one, arguments, is_leaf=lambda x: isinstance(x, fx.Node))
        has_several = isinstance(values[site.node], (list, tuple))
        outputs = {}
        axes = {}
        results = values[site.node] if has_several else [values[site.node]]
        for place, (axis, y) in enumerate(zip(site.outputs, results, strict=False)):
            if axis is not None and y.is_floating_point():
                outputs[place] = _output(site.node, place) if has_several else site.node
                axes[place] = axis
        trained = [x for x in map(self._operand, site.operands) if x is not None]
        return Other(outputs, site.function, args, site.axes, axes, trained, public)


def _name_arguments(site: Site) -> dict[str, Any]:
    names = list(arguments_of(site.function))
    return {**dict(zip(names, site.args, strict=False)), **site.kwargs}


def _first(axes: Sequence[BatchAxis | None]) -> BatchAxis:
    axis = axes[0]
    assert axis is not None
    return axis


def _is_row(shape: tuple[int, ...]) -> bool:
    """Return whether an addend of a product has no rows of its own."""
    return len(shape) < 2 or shape[0] == 1


def _output(node: fx.Node, place: int) -> fx.Node:
    """Return the node of one of several outputs."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == place:
            return user
    with node.graph.inserting_after(node):
        return node.graph.call_function(operator.getitem, (node, place))
