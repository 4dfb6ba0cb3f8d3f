"""DP² against its recursion written out, and its state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkfc.curvature import DP2
from dpkfc.gradients.clipped_sum import diagonal_metric
from dpkfc.gradients.discovery import find_layers
from dpkfc.linalg.metric import Metric
from dpkfc.privacy.mechanism import Released

F64 = torch.float64
PHI = 0.04


def no_capture(*_: object) -> dict[str, object]:
    raise AssertionError("past releases are all that DP² reads")


def releases(model: nn.Module, steps: int) -> list[Released]:
    torch.manual_seed(1)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return [
        Released(
            gradients={n: torch.randn(s, dtype=F64) for n, s in shapes.items()},
            noise_variance=PHI,
            step=t,
            release=t + 1,
        )
        for t in range(steps)
    ]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)).double()


def run(config: DP2, net: nn.Module, steps: int) -> list[Metric]:
    """The metric of every step, its metric and state handed on as `Coordinates` does."""
    layers, past, metrics = find_layers(net), {}, []
    rules = {layer.name: layer.rule for layer in layers}
    for released in releases(net, steps):
        if config.is_due(released.step):
            built = config.build(
                net,
                no_capture,
                released.step,
                rules,
                past=past,
                diagonal=lambda s: diagonal_metric(layers, s),
            )
        metrics.append(built.metric)
        past = config.observe(released, past)
    return metrics


def by_hand(config: DP2, net: nn.Module, steps: int) -> dict[int, dict[str, Tensor]]:
    """First step of every adaptive phase to D of every parameter."""
    s, v, noise, found, updates = config.phase, {}, 0.0, {}, 0
    all_releases = releases(net, steps)
    for start in range(0, steps - s, 2 * s):
        for name, _ in net.named_parameters():
            mean = sum(all_releases[t].gradients[name] for t in range(start, start + s)) / s
            v[name] = config.decay * v.get(name, 0.0) + (1 - config.decay) * mean.square()
        noise, updates = config.decay * noise + (1 - config.decay) * PHI / s, updates + 1
        bias = 1 - config.decay**updates if config.corrected else 1.0
        flat = torch.cat([x.flatten() / bias for x in v.values()])
        least = config.floor * flat.mean()
        subtracted = noise / bias if config.corrected else 0.0
        moments = {name: (x / bias - subtracted).clamp(min=least) for name, x in v.items()}
        unit = (
            torch.cat([m.flatten() for m in moments.values()]).mean().sqrt()
            if config.scale == "unit"
            else 1.0
        )
        found[start + s] = {name: m.sqrt() / unit for name, m in moments.items()}
    return found


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("scale", ["unit", "raw"])
@pytest.mark.parametrize("phase", [1, 3])
def test_metrics_equal_the_recursion(phase: int, scale: str, corrected: bool) -> None:
    net, config = (
        model(),
        DP2(phase=phase, scale=scale, corrected=corrected, clip_ratio=2.5, floor=0.05),
    )
    steps = 7 * phase
    metrics, exact = run(config, net, steps), by_hand(config, net, steps)
    for t, metric in enumerate(metrics):
        if not config.is_adaptive(t):
            assert metric == {}
            continue
        roots = exact[t // phase * phase]
        whole = torch.cat([roots["0.weight"], roots["0.bias"].unsqueeze(1)], 1)
        torch.testing.assert_close(metric["0"].scale, 1 / whole / 2.5, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            metric["1"].scale["weight"], 1 / roots["1.weight"] / 2.5, rtol=1e-12, atol=0
        )
        torch.testing.assert_close(
            metric["2"].scale, 1 / roots["2.weight"] / 2.5, rtol=1e-12, atol=0
        )


def test_phases_and_learning_rates() -> None:
    config = DP2(phase=3, ratio=30.0, clip_ratio=10.0)
    assert [t for t in range(13) if config.is_due(t)] == [0, 3, 6, 9, 12]
    assert [config.is_adaptive(t) for t in range(9)] == [False] * 3 + [True] * 3 + [False] * 3
    assert [config.learning_rate_factor(t) for t in (0, 3)] == [1.0, 300.0]


def test_correction_takes_the_noise_out_of_the_second_moments() -> None:
    """Releases of nothing but noise: v estimates Φ/s, and what is left of it is at the floor."""
    net = nn.Linear(60, 60, bias=False).double()
    config = DP2(phase=5, decay=0.5, corrected=True, floor=1e-6)
    past: dict[str, Tensor] = {}
    for t in range(200):
        gradients = {"weight": torch.randn(60, 60, dtype=F64) * PHI**0.5}
        past = config.observe(
            Released(gradients=gradients, noise_variance=PHI, step=t, release=t + 1), past
        )
    bias = 1 - 0.5 ** float(past["updates"])
    assert float(past["noise"]) / bias == pytest.approx(PHI / 5, rel=1e-12)
    assert float(past["v/weight"].mean()) / bias == pytest.approx(PHI / 5, rel=0.1)
    layers = find_layers(net)
    built = config.build(
        net, no_capture, 5, {"": "linear"}, past=past, diagonal=lambda s: diagonal_metric(layers, s)
    )
    share = float(built.report[0]["note"].split(";")[1].split("%")[0]) / 100
    assert 0.4 < share < 0.8


def test_a_metric_of_other_layers_has_their_layout() -> None:
    """Embeddings lie crosswise; the groups of a convolution share the mean of their factors."""
    net = nn.ModuleDict(
        {"table": nn.Embedding(5, 3), "conv": nn.Conv1d(4, 6, 2, groups=2)}
    ).double()
    layers = find_layers(net)
    scales = {name: torch.rand(p.shape, dtype=F64) + 0.1 for name, p in net.named_parameters()}
    metric = diagonal_metric(layers, scales)
    torch.testing.assert_close(metric["table"].scale, scales["table.weight"].T)
    whole = torch.cat([scales["conv.weight"].flatten(1), scales["conv.bias"].unsqueeze(1)], 1)
    torch.testing.assert_close(metric["conv"].scale, (whole[:3] + whole[3:]) / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phase": 0}, "phase must be an integer"),
        ({"phase": 2, "decay": 1.0}, "decay must lie in"),
        ({"phase": 2, "floor": 0.0}, "floor must be positive"),
        ({"phase": 2, "clip_ratio": -1.0}, "clip_ratio must be positive"),
        ({"phase": 2, "scale": "mine"}, "scale must be one of"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DP2(**settings)
