"""The preconditioner as a value: its state, the model it belongs to, and the configuration that
describes it.
"""

import dataclasses
import json
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkfc.curvature import FeatureNoise, PreconditionerState
from dpkfc.curvature.probe_pass import public_generator
from dpkfc.linalg.metric import Eigenbasis, Elementwise, Entry, Kronecker
from dpkfc.linalg.sides import Dense, Diagonal, Identity, LowRank, Side
from tests.curvature.toys import (
    Text,
    capture,
    dense_matrix,
    make_kfac,
    mlp,
    rules_of,
    token_ids,
)

# -- the state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_state_restores_every_bit(dtype, tmp_path):
    model = Text().to(dtype)
    built = make_kfac(probe=token_ids(), max_factor_size=6).build(
        model, capture, 7, rules=rules_of(model) | {"x": "linear"}
    )
    again = PreconditionerState.from_state_dict(built.state_dict())
    assert again.digest == built.digest and again.step == 7 and again.scale == built.scale
    assert again.report == built.report
    for name, entry in built.metric.items():
        assert type(again.metric[name]) is type(entry)
    for name, sides in built.spectra.items():
        assert all(torch.equal(values, again.spectra[name][side]) for side, values in sides.items())
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(
        {k: v.contiguous() for k, v in built.state_dict().items()}, tmp_path / "p.safetensors"
    )
    assert (
        PreconditionerState.from_state_dict(
            safetensors.load_file(tmp_path / "p.safetensors")
        ).digest
        == built.digest
    )


_NUMBERS = st.floats(1e-3, 1e3)
_SIDES = st.one_of(
    st.builds(Identity, _NUMBERS),
    st.builds(lambda x: Diagonal(torch.full((3,), x)), _NUMBERS),
    st.builds(lambda x, norm: Dense(torch.full((3, 3), x), norm), _NUMBERS, _NUMBERS),
    st.builds(
        lambda x, tail: LowRank(torch.full((3, 2), x), torch.full((2,), x), tail),
        _NUMBERS,
        _NUMBERS,
    ),
)
_BASES = st.none() | st.builds(lambda x: torch.full((3, 2), x, dtype=torch.float64), _NUMBERS)
_SCALES = st.builds(lambda x: torch.full((3, 2), x), _NUMBERS)
_ENTRIES = st.one_of(
    st.builds(Kronecker, _SIDES, _SIDES),
    st.builds(Eigenbasis, _SCALES, _BASES, _BASES, st.none() | _NUMBERS),
    st.builds(lambda scale: Elementwise({"weight": scale, "bias": scale[0]}), _SCALES),
)


def _values(x):
    """The value of an entry, field by field, with tensors as their dtype and numbers."""
    if dataclasses.is_dataclass(x):
        return type(x), [_values(getattr(x, field.name)) for field in dataclasses.fields(x)]
    if isinstance(x, dict):
        return {key: _values(value) for key, value in x.items()}
    return (x.dtype, x.tolist()) if isinstance(x, torch.Tensor) else x


@settings(max_examples=60, deadline=None)
@given(st.lists(_ENTRIES, max_size=4))
def test_every_field_of_every_kind_of_entry_survives_the_state(entries):
    built = PreconditionerState(
        metric={f"layer{i}": entry for i, entry in enumerate(entries)}, step=3
    )
    again = PreconditionerState.from_state_dict(built.state_dict())
    assert again.digest == built.digest
    assert _values(dict(again.metric)) == _values(dict(built.metric))


def test_the_property_covers_every_kind_of_entry():
    assert set(get_args(Entry)) == {Kronecker, Eigenbasis, Elementwise}
    assert set(get_args(Side)) == {Identity, Diagonal, Dense, LowRank}


def test_the_rest_of_an_eigenbasis_is_part_of_the_digest():
    entry = Eigenbasis(torch.ones(3, 2), torch.eye(3)[:, :2], rest=0.5)
    other = dataclasses.replace(entry, rest=0.25)
    digests = {PreconditionerState(metric={"fc": x}, step=0).digest for x in (entry, other)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"meta": torch.zeros(4, dtype=torch.uint8)},
        {"meta": torch.tensor([123, 125], dtype=torch.uint8)},
    ],
)
def test_a_state_of_something_else_is_an_error(state):
    with pytest.raises(ValueError, match="not the state of a preconditioner"):
        PreconditionerState.from_state_dict(state)


def test_a_state_without_one_of_its_tensors_is_an_error():
    state = make_kfac().build(mlp(), capture, 0).state_dict()
    state.pop(next(key for key in state if key != "meta"))
    with pytest.raises(ValueError, match="damaged"):
        PreconditionerState.from_state_dict(state)


# -- the configuration


def test_the_description_is_json_and_states_the_source():
    assert make_kfac(layer_rules=["linear"]) == make_kfac(layer_rules=("linear",))
    described = json.loads(json.dumps(make_kfac(layer_rules=["linear"]).describe()))
    assert described["uses_private_data"] is False and described["curvature_source"] == "synthetic"
    assert described["layer_rules"] == ["linear"] and described["probe"]["kind"] == "FeatureNoise"
    public = make_kfac(probe=token_ids()).describe()
    assert (
        public["curvature_source"] == "public: random ids" and public["uses_private_data"] is False
    )
    assert make_kfac(damping=0.2).describe() != make_kfac().describe()
    assert "_sum_of_outputs" in make_kfac(loss=_sum_of_outputs).describe()["loss"]
    assert make_kfac() == make_kfac() and hash(make_kfac()) == hash(make_kfac())


def _sum_of_outputs(output, generator):
    return output.square().sum(1)


def test_a_loss_of_ones_own_is_used_and_checked():
    model = mlp().double()
    built = make_kfac(loss=_sum_of_outputs, scale="raw").build(model, capture, 0)
    x, _ = FeatureNoise(12).sample(40, public_generator(0, 0))
    b = 2 * model(x.double()).detach()
    assert float(built.spectra["2"]["G"].sum()) == pytest.approx(
        float(b.square().sum(1).mean()), rel=1e-9
    )
    with pytest.raises(ValueError, match="one loss an example"):
        make_kfac(loss=lambda output, generator: output.sum()).build(model, capture, 0)
    with pytest.raises(ValueError, match="loss contains NaN"):
        make_kfac(loss=lambda output, generator: output.sum(1) * float("nan")).build(
            model, capture, 0
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"probe": "pink"}, "probe must derive from"),
        ({"labels": "true"}, "labels must be one of model, uniform, given"),
        ({"likelihood": "poisson"}, "likelihood must be one of categorical"),
        ({"sides": "a"}, "sides must be one of both, input, output"),
        ({"scale": "unit"}, "scale must be one of probe, trace, balanced, raw"),
        ({"sharing": "sum"}, "sharing must be one of expand, reduce"),
        ({"oversize": "dense"}, "oversize must be one of diagonal, identity"),
        ({"damping_mode": "none"}, "damping_mode must be one of relative, absolute"),
        ({"every": 0}, "every must be an integer >= 1"),
        ({"probe_size": 2.5}, "probe_size must be an integer"),
        ({"chunk": True}, "chunk must be an integer"),
        ({"layer_rules": ("linear", "attention")}, "layer_rules must name some of linear, conv"),
        ({"layer_rules": ()}, "layer_rules must name"),
        ({"seed": "a"}, "seed must be an integer"),
        ({"rows_per_dim": 0.5}, r"rows_per_dim must lie in \[1, inf\)"),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        make_kfac(**fields)


# -- layers that read one tensor, and weights stored the other way round


class _Attention(torch.nn.Module):
    def __init__(self, d=6, second=None):
        super().__init__()
        self.query, self.key = torch.nn.Linear(d, d), torch.nn.Linear(d, second or d)
        self.value = torch.nn.Linear(d, d, bias=False)

    def forward(self, x):
        return self.query(x) + self.key(x) + self.value(x.tanh())


def test_layers_that_read_the_same_tensor_share_their_side():
    model = _Attention()
    for size in (4, 40):  # kept as rows, and folded into a covariance
        built = make_kfac(probe=FeatureNoise(6), probe_size=size, chunk=2 + size // 4).build(
            model, capture, 0
        )
        query, key, value = (built.metric[name].input for name in ("query", "key", "value"))
        assert query is key and query is not value
        state = built.state_dict()
        held = [t.data_ptr() for t in state.values() if t.numel()]
        assert len(held) == len(set(held))  # safetensors refuses a tensor that stands in it twice
        again = PreconditionerState.from_state_dict(state)
        assert again.digest == built.digest and again.metric["key"].input is not None
        x = torch.randn(3, 7)
        assert torch.equal(again.metric["key"].input.apply(x), query.apply(x))


def test_inputs_that_differ_in_a_later_micro_batch_are_told_apart():
    """Two layers that read the same tensor at first, and different ones for the last examples of
    the probe.
    """

    class Sometimes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            other = torch.where(x[:, :1] > 1.0, -2 * x, x)
            return self.first(x) + self.second(other)

    class Probe(FeatureNoise):
        def sample(self, n, generator):
            x, _ = super().sample(n, generator)
            x[:, 0] = torch.arange(n) >= n // 2
            x[:, 0] *= 3
            return x, None

    model = Sometimes().double()
    kfac = make_kfac(probe=Probe(4), probe_size=40, chunk=10)
    factors = kfac.factors(model, capture)
    x, _ = kfac.probe.sample(40, public_generator(0, 0))
    x = torch.cat([x.double(), torch.ones(40, 1)], 1)
    y = torch.cat([torch.where(x[:, :1] > 1.0, -2 * x[:, :4], x[:, :4]), torch.ones(40, 1)], 1)
    for name, rows in (("first", x), ("second", y)):
        assert torch.allclose(
            dense_matrix(factors[name].sides["input"]), (rows.T @ rows / 40).double(), atol=1e-9
        )
