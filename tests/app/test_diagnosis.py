"""The doctor: every layer with its rule, norms and factors; frozen, tied and refused ones are
said.
"""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from dpkfc.app.diagnosis import diagnose, layer_table, part_table
from dpkfc.app.models import digits_cnn
from dpkfc.curvature import KFAC, FeatureNoise, PinkNoise, PublicData


def _print(diagnosis, width=160):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(layer_table(diagnosis, "model"))
    return console.file.getvalue()


def test_a_cnn_is_described_layer_by_layer():
    model = digits_cnn()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = diagnose(model, KFAC(sides="both", probe=PinkNoise((1, 8, 8)), probe_size=16))
    assert [layer.rule for layer in found.layers] == ["conv", "conv", "linear", "linear"]
    assert sum(layer.parameters for layer in found.layers) == found.trainable == 13_706
    assert {layer.method for layer in found.layers} <= {"rank-one", "gram", "materialised"}
    assert found.layers[3].method == "rank-one"
    assert [(s["side"], s["dim"]) for s in found.layers[0].sides] == [("input", 10), ("output", 16)]
    assert all(
        s["condition_after"] <= s["condition_before"] for layer in found.layers for s in layer.sides
    )
    assert not found.problem and not found.frozen
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    text = _print(found)
    for part in ("conv", "13,706", "A 10", "rank-one", "∞ →"):
        assert part in text or part == "13,706"
    narrow = _print(found, 80)
    assert "materialised" in narrow and "A 145 lowrank" in narrow and "notes" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80


@pytest.mark.parametrize("axis", [None, 0])
def test_a_proved_batch_axis_is_told_from_another(axis):
    class Head(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out if axis is None else out - out.mean(axis)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), Head(8, 3))
    found = diagnose(model, KFAC(probe=PinkNoise((1, 8, 8)), probe_size=16))
    assert bool(found.unproved) == (axis is not None)
    assert ("one at a time" in _print(found)) == (axis is not None)


def test_frozen_and_tied_layers_are_said():
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
    )
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    model[3].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    found = diagnose(model, KFAC(sides="both", probe=FeatureNoise(6), probe_size=16))
    assert found.frozen == {"3": 42}
    assert found.layers[0].tied == 1 and found.layers[-1].frozen == ("bias",)
    text = _print(found)
    assert "tied: 2 uses" in text and "frozen: bias" in text and "not trained" in text


def test_embeddings_norms_and_fallbacks_have_rows():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.gain

    model = nn.Sequential(
        nn.Embedding(9, 4), nn.LayerNorm(4), Scale(), nn.Flatten(), nn.Linear(20, 3)
    )
    found = diagnose(
        model,
        KFAC(
            sides="both",
            probe=PublicData(torch.randint(9, (8, 5)), provenance="made up"),
            probe_size=8,
        ),
    )
    assert [layer.rule for layer in found.layers] == ["embedding", "norm", "fallback", "linear"]
    assert _print(found, 300).count("no rule of its own: by torch.func, slower") == 1
    assert [layer.method for layer in found.layers] == [
        "lookup",
        "materialised",
        "materialised",
        "rank-one",
    ]


def test_a_layer_that_the_probe_does_not_reach_is_said():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    found = diagnose(Model(), KFAC(sides="both", probe=FeatureNoise(4), probe_size=8))
    assert found.layers[1].method.startswith("none") and "not reached" in _print(found)


EXPERTS = {
    # Names of adapted weights to the ranks that peft gives the two matrices of an expert.
    ("mixtral", ("w1", "w2", "w3")): {"gate_up_proj": 4, "down_proj": 2},
    ("mixtral", ("q_proj", "gate_proj", "up_proj", "down_proj")): {},
    ("qwen3_moe", ("gate_proj", "up_proj", "down_proj")): {"gate_up_proj": 4, "down_proj": 2},
    ("qwen3_moe", ("gate_up_proj", "down_proj")): {"down_proj": 2},
}


@pytest.mark.parametrize("kind, names", EXPERTS, ids=str)
def test_what_trains_of_experts_is_said(kind, names):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 12}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    sizes |= {"num_experts_per_tok": 2}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=16, num_hidden_layers=2, num_experts=3, num_local_experts=3, **sizes
    )
    lora = peft.LoraConfig(r=2, target_modules=list(names))
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config), lora)
    probe = PublicData(torch.randint(16, (8, 5)), provenance="made up")
    found = diagnose(model, KFAC(probe=probe, probe_size=8))
    assert sum(part.numbers for part in found.parts if part.state != "frozen") == found.trainable
    assert sum(part.numbers for part in found.parts) == sum(p.numel() for p in model.parameters())
    experts = {part.name: part for part in found.parts if part.state.endswith(" 3 experts")}
    assert {name.rpartition(".")[2] for name in experts} == set(EXPERTS[kind, names])
    for name, part in experts.items():
        rank = EXPERTS[kind, names][name.rpartition(".")[2]]
        assert name.startswith("model.layers.*.mlp.experts.")
        assert part.state == f"adapter of rank {rank} for each of 3 experts"
        assert part.tensors == 4
    # The matrices are read by the experts, not called.
    methods = {layer.method for layer in found.layers if ".experts." in layer.name}
    assert all(method.startswith("one example at a time") for method in methods)
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(part_table(found))
    assert "frozen" in console.file.getvalue()


@pytest.mark.parametrize(
    "model, what",
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), "mixes the examples"),
        (nn.Linear(4, 3).requires_grad_(False), "no trainable parameter"),
    ],
)
def test_a_model_that_cannot_be_trained_is_a_problem_and_not_a_crash(model, what):
    assert what in diagnose(model, KFAC(sides="both", probe=FeatureNoise(4), probe_size=8)).problem
