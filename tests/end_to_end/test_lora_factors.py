"""A LoRA adapter starts with B = 0: no gradient reaches A, and its factor is zero. Does the metric
survive that?
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.curvature import KFAC, TokenNoise
from dpkfc.gradients import clipped_sum
from dpkfc.gradients.discovery import find_layers
from dpkfc.linalg.metric import Identity, Kronecker, LowRank

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

V, T, RANK = 31, 7, 4
PROBE = TokenNoise(V, T, cls_id=1, sep_id=2, pad_id=0)


def _captured(layers, model, loss):
    return clipped_sum.capture(model, layers, loss)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)
    lora = peft.LoraConfig(
        r=RANK, target_modules=["query", "value"], modules_to_save=["classifier"], lora_dropout=0.1
    )
    return peft.get_peft_model(model, lora).train()


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=V,
        n_embd=24,
        n_layer=2,
        n_head=2,
        n_positions=12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.GPT2LMHeadModel(config)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, target_modules=["c_attn"], fan_in_fan_out=True)
    ).train()


MODELS = {"bert": _bert, "gpt2": _gpt2}


def _build(model: nn.Module, step: int = 0, **fields):
    layers = find_layers(model)
    kfac = KFAC(**{"sides": "both", "probe": PROBE, "probe_size": 32, "chunk": 16, **fields})
    capture = partial(_captured, layers)
    return kfac.build(model, capture, step, {layer.name: layer.rule for layer in layers})


def _side(name: str) -> str:
    return "A" if ".lora_A." in name else "B" if ".lora_B." in name else ""


def _finite(built) -> bool:
    return all(
        bool(torch.isfinite(t).all()) for t in built.state_dict().values() if t.is_floating_point()
    )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scale", ["balanced", "trace", "probe", "raw"])
def test_a_zero_factor_leaves_its_side_a_multiple_of_the_identity(kind, scale):
    model = MODELS[kind]()
    built = _build(model, scale=scale)
    assert _finite(built)
    adapters = {name: entry for name, entry in built.metric.items() if _side(name)}
    assert {_side(name) for name in adapters} == {"A", "B"}
    notes = {(row["layer"], row["side"]): row["note"] for row in built.report}
    for name, entry in adapters.items():
        dead = "no signal" in notes[name, "output"]
        assert isinstance(entry, Kronecker) and dead == (_side(name) == "A")
        if dead:
            assert isinstance(entry.output, Identity)
    # The side that says nothing is in the units of the others, so no adapter is drowned or blown up
    # by it.
    (dead,) = {e.output.factor for n, e in adapters.items() if _side(n) == "A"}
    alive = [
        e.output.operator_norm
        for n, e in built.metric.items()
        if isinstance(e, Kronecker) and _side(n) != "A"
    ]
    # a bound is that of the least direction, up to (1.1/0.1)^(1/2) the usual one
    assert min(alive) / 4 <= dead <= max(alive)
    assert scale in ("probe", "raw") or max(alive) < 5 * dead


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_have_no_homogeneous_row(kind):
    model = MODELS[kind]()
    built = _build(model)
    widths = {(row["layer"], row["side"]): row["dim"] for row in built.report}
    for layer in find_layers(model):
        if _side(layer.name):
            d_out, d_in = layer.tensor("weight").shape
            assert (widths[layer.name, "input"], widths[layer.name, "output"]) == (d_in, d_out)
            assert RANK in (d_in, d_out) and set(layer.parameters) == {"weight"}


@pytest.mark.parametrize("kind", MODELS)
def test_the_next_refresh_sees_the_gradient_once_b_has_moved(kind):
    model = MODELS[kind]()
    first = _build(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=1e-5)  # what one small step leaves
    second = _build(model, step=50)
    assert _finite(second) and not [row for row in second.report if "no signal" in row["note"]]
    for name in first.metric:
        if _side(name) == "A":
            assert isinstance(first.metric[name].output, Identity)
            assert not isinstance(second.metric[name].output, Identity)
            assert (
                second.metric[name].output.operator_norm
                < 30 * first.metric[name].output.operator_norm
            )


@pytest.mark.parametrize("kind", MODELS)
def test_whitening_has_a_sane_scale(kind):
    """On other examples than the probe's, the norms with the metric are of the size of those
    without it.
    """
    model = MODELS[kind]().eval()
    layers = find_layers(model)
    inputs, _ = PROBE.sample(24, torch.Generator().manual_seed(99))

    def losses(m):
        logits = m(**inputs).logits
        logits = (
            logits
            if logits.dim() == 2
            else (logits * inputs["attention_mask"].unsqueeze(-1)).mean(1)
        )
        return F.cross_entropy(logits, torch.arange(24) % 3, reduction="none")

    from dpkfc.curvature.layer_factors import probe_norms

    for moved in (False, True):
        if moved:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if ".lora_B." in name:
                        p.normal_(std=0.02)
        built = _build(model)
        assert 0.05 < built.scale < 20
        plain, mapped = probe_norms(clipped_sum.capture(model, layers, losses), {}, built.metric)
        ratio = mapped / plain
        assert (
            bool(torch.isfinite(ratio).all())
            and 0.1 < float(ratio.min())
            and float(ratio.max()) < 10
        )


@pytest.mark.parametrize(("d_in", "d_out"), [(768, 16), (16, 768)])
@pytest.mark.parametrize("dead", [True, False])
def test_real_widths_stay_finite_and_bounded(d_in, d_out, dead):
    """An adapter of BERT's size, its factors of rank 20 (ten texts, one direction each twice) or
    zero.
    """

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(d_in, d_out, bias=False)
            self.head = nn.Linear(d_out, 3)
            if dead:
                nn.init.zeros_(self.head.weight)

        def forward(self, x):
            return self.head(self.inner(x))

    from dpkfc.curvature import WhiteNoise

    model = Adapter()
    for scale in ("balanced", "probe"):
        built = _build(
            model,
            probe=WhiteNoise((2, d_in)),
            probe_size=10,
            chunk=10,
            scale=scale,
            likelihood="gaussian",
        )
        assert _finite(built)
        sides = [built.metric["inner"].input, built.metric["inner"].output]
        assert [isinstance(side, Identity) for side in sides] == [False, dead]
        assert isinstance(sides[0 if d_in == 768 else 1], LowRank | Identity)
        for side, d in zip(sides, (d_in, d_out), strict=True):
            # (v + ρ m)^(−1/2) with eigenvalues v from 0 to d m: no direction is scaled sqrt((d +
            # ρ)/ρ) times another.
            x = torch.linalg.qr(torch.randn(d, min(d, 64))).Q.T
            gains = side.apply(x).norm(dim=1)
            assert (
                float(gains.max() / gains.min()) < ((d + 0.1) / 0.1) ** 0.5
                and float(gains.min()) > 0
            )


@pytest.mark.parametrize("kind", MODELS)
def test_a_metric_of_multiples_of_the_identity_trains_as_plain_clipping_does(kind):
    """Nothing improves by magic: where a probe says nothing at all, the metric is one number, and
    that number is one.
    """
    model = MODELS[kind]()

    def silent(output, generator):
        return 0.0 * output.logits.flatten(1).sum(1)

    built = _build(model, loss=silent, sides="output", layer_rules=("linear",))
    assert built.scale == 1.0 and _finite(built)
    adapters = [entry for name, entry in built.metric.items() if _side(name)]
    assert adapters and all(entry.output == Identity() for entry in adapters)
