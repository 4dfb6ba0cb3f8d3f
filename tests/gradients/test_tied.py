"""One weight as table and head, and weights stored transposed: against a loop, as blocks, and as
upper bounds.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from dpkfc.gradients.discovery import find_layers
from dpkfc.linalg.blocks import Lookup, Outer, Tied
from dpkfc.linalg.metric import Elementwise, Kronecker
from dpkfc.linalg.norm_methods import choose_norm_method
from dpkfc.linalg.norms import per_example_norms
from dpkfc.linalg.sides import Dense, Identity
from tests.gradients.whitened import check, side

V, D, T = 11, 5, 6


class Language(nn.Module):
    """A table and a head with one weight.

    Args:
        bias: of the head: "own", "none", or "held" by the parent as well (BERT).
        head_first: the head is registered before the table.
        tables: modules that share the table (an encoder and a decoder).
        uses: how often the head is applied.
    """

    def __init__(self, bias="own", head_first=False, tables=1, uses=1):
        super().__init__()
        if head_first:
            self.head = nn.Linear(D, V, bias=bias != "none")
        self.tables = nn.ModuleList(
            [nn.Embedding(V, D, padding_idx=2 if i == 0 else None) for i in range(tables)]
        )
        self.mix = nn.Linear(D, D)
        if not head_first:
            self.head = nn.Linear(D, V, bias=bias != "none")
        self.uses = uses
        for table in self.tables:
            table.weight = self.head.weight
        if bias == "held":
            self.bias = self.head.bias

    def forward(self, ids):
        h = sum(table(ids.roll(i, 1)) for i, table in enumerate(self.tables))
        h = torch.tanh(self.mix(h)) + h.mean(1, keepdim=True)
        out = self.head(h)
        for _ in range(1, self.uses):
            out = out + self.head(torch.tanh(self.tables[0](ids[:, :3]))).mean(1, keepdim=True)
        return out


def language(**settings):
    torch.manual_seed(0)
    return Language(**settings).to(torch.float64)


def batch(n=5):
    return torch.randint(0, V, (n, T)), torch.randint(0, V, (n, T))


def loss_fn(model, examples):
    ids, labels = examples
    return F.cross_entropy(model(ids).transpose(1, 2), labels, reduction="none").mean(1)


SHAPES = [
    {},
    {"bias": "none"},
    {"bias": "held"},
    {"head_first": True},
    {"head_first": True, "bias": "held"},
    {"tables": 2, "uses": 2},
]


@pytest.mark.parametrize("kind", [None, "identity", "diagonal", "dense", "lowrank"])
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_the_sum_of_uses_equals_a_loop(settings, kind):
    check(language(**settings), batch(), loss_fn, kind)


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_the_weight_is_one_layer_and_the_bias_another(settings):
    model = language(**settings)
    layers = find_layers(model)
    [tied] = [layer for layer in layers if layer.rule == "tied"]
    names = dict(model.named_parameters())
    assert (
        list(tied.parameters) == ["weight"]
        and names[tied.parameters["weight"]] is model.head.weight
    )
    assert isinstance(tied.module, nn.Embedding)
    biases = [layer for layer in layers if set(layer.parameters) == {"bias"}]
    assert len(biases) == (settings.get("bias") != "none")
    assert sorted(full for layer in layers for full in layer.parameters.values()) == sorted(names)


def random_block(n, s, t, d, v, seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    lookup = Lookup(
        torch.randint(0, v, (n, s), generator=g), torch.randn(n, s, d, generator=g, dtype=dtype), v
    )
    outer = Outer(
        torch.randn(n, t, d, generator=g, dtype=dtype),
        torch.randn(n, t, v, generator=g, dtype=dtype),
    )
    return Tied(lookup, outer)


@given(
    n=st.integers(1, 4),
    s=st.integers(0, 7),
    t=st.integers(0, 7),
    d=st.integers(1, 6),
    v=st.integers(1, 9),
    input_kind=st.sampled_from(["identity", "diagonal", "dense", "lowrank"]),
    output_kind=st.sampled_from(["identity", "diagonal"]),
    method=st.sampled_from(["gram", "materialised", None]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_metric(n, s, t, d, v, input_kind, output_kind, method, seed):
    block = random_block(n, s, t, d, v, seed)
    metric = Kronecker(side(input_kind, d), side(output_kind, v))
    z = metric.apply(block.per_example())
    found = per_example_norms(block, metric, method)
    assert_close(found.norms, z.flatten(1).norm(dim=1), rtol=1e-9, atol=1e-7)
    assert bool((found.norms >= z.flatten(1).norm(dim=1) * (1 - 1e-12)).all())
    weights = torch.rand(n, dtype=torch.float64)
    total = found.block.weighted_sum(weights)
    total = total if found.whitened else metric.apply(total)
    assert_close(total, torch.einsum("n,nvd->vd", weights, z), rtol=1e-9, atol=1e-10)


def test_a_dense_side_over_the_rows_is_refused():
    metric = Kronecker(Identity(), Dense(torch.eye(V, dtype=torch.float64), 1.0))
    with pytest.raises(ValueError, match="output side of a tied embedding"):
        per_example_norms(random_block(2, 3, 3, D, V, 0), metric)
    with pytest.raises(ValueError, match="Kronecker"):
        per_example_norms(random_block(2, 3, 3, D, V, 0), Elementwise({}))


def test_large_vocabularies_take_gram_matrices():
    few, many = random_block(1, 4, 4, 8, 5000, 0), random_block(1, 64, 64, 2, 3, 0)
    assert choose_norm_method(few) == "gram"
    assert choose_norm_method(many) == "materialised"


# -- weights shared by linear layers, and what stays refused ---------------------------------------


class TwoHeads(nn.Module):
    """Two linear layers with one weight and a bias each."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_one_weight_with_two_biases():
    model = TwoHeads().double()
    assert [layer.name for layer in find_layers(model)] == ["first", "first.bias", "second"]
    data = (torch.randn(4, 3, 4).double(), torch.randint(0, 4, (4, 3)))
    check(model, data, loss_fn, "dense")


class OwnHead(nn.Module):
    """A head that reads the table's weight by itself."""

    def __init__(self, table):
        super().__init__()
        self.weight = table.weight

    def forward(self, x):
        return F.linear(x, self.weight)


def untied_in_vain():
    table, norm, convs = (
        nn.Embedding(4, 4),
        nn.LayerNorm(4),
        [nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)],
    )
    linear = nn.Linear(1, 4)
    linear.bias = norm.bias
    convs[1].weight = convs[0].weight
    return [
        nn.Sequential(table, OwnHead(table)),
        nn.Sequential(norm, linear),
        nn.Sequential(*convs),
    ]


@pytest.mark.parametrize(
    "model", untied_in_vain(), ids=["own head", "norm and linear", "convolutions"]
)
def test_other_sharing_takes_the_fallback(model):
    assert {layer.rule for layer in find_layers(model) if len(layer.modules) > 1} == {"fallback"}


# -- a weight stored as [d_in, d_out] --------------------------------------------------------------


@given(
    n=st.integers(1, 4),
    t=st.integers(1, 6),
    d_in=st.integers(1, 6),
    d_out=st.integers(2, 6),
    kind=st.sampled_from([None, "diagonal", "dense"]),
    frozen=st.sampled_from([None, "weight", "bias"]),
)
def test_transposed_linear_layers(n, t, d_in, d_out, kind, frozen):
    module = pytest.importorskip("transformers.pytorch_utils").Conv1D(d_out, d_in).double()
    if frozen:
        module.get_parameter(frozen).requires_grad_(False)
    model = nn.Sequential(nn.Linear(3, d_in), nn.Tanh(), module).double()
    [layer] = [layer for layer in find_layers(model) if layer.name == "2"]
    assert (layer.rule, layer.transposed) == ("linear", True)
    data = (torch.randn(n, t, 3).double(), torch.randint(0, d_out, (n, t)))
    check(model, data, loss_fn, kind)


def test_a_subclass_of_it_with_its_own_forward_takes_the_fallback():
    base = pytest.importorskip("transformers.pytorch_utils").Conv1D

    class Scaled(base):
        def forward(self, x):
            return super().forward(x) * 2

    class Conv1D(nn.Linear):  # only the name is alike
        pass

    model = nn.Sequential(Scaled(4, 3), Conv1D(4, 4)).double()
    assert [(layer.rule, layer.transposed) for layer in find_layers(model)] == [
        ("fallback", False),
        ("linear", False),
    ]
    check(model, (torch.randn(3, 2, 3).double(), torch.randint(0, 4, (3, 2))), loss_fn)
