"""DP-AdamBC: what is taken off v is the noise and nothing else, and both ends of its floor are
known optimizers.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from dpkfc.linalg.metric import Elementwise, Kronecker
from dpkfc.linalg.sides import Diagonal
from dpkfc.postprocess import EMA, AdamBC, DiSK, LowPass
from dpkfc.postprocess.pipeline import PostprocessPipeline
from tests.postprocess.cases import make_released, run, several_layers

PHI = 2.05e-4


def run_on_noise(adam, steps, size=4000):
    state = {}
    for t in range(steps):
        value, state = adam.apply(
            make_released({"w": math.sqrt(PHI) * torch.randn(size).double()}, PHI, t), state
        )
    return value, state


def test_on_pure_noise_v_estimates_its_variance_with_the_stated_resolution():
    adam, steps = AdamBC(floor=1e-12 * PHI), 3000
    value, state = run_on_noise(adam, steps)
    v = state["v/w"] / (1 - 0.999**steps)
    assert float(v.mean()) / PHI == pytest.approx(1, abs=0.005)
    r = math.sqrt(2 * 0.001 / 1.999 * (1 + 0.999**steps) / (1 - 0.999**steps))
    assert r == pytest.approx(0.0332, abs=2e-4)  # 0.0316 in the end
    assert float(v.std()) / PHI == pytest.approx(r, rel=0.06)
    assert value.notes["adam_bc/floor_fraction"] == pytest.approx(0.51, abs=0.03)
    assert value.noise_variance is None


def test_the_automatic_floor_is_the_resolution_and_leaves_few_entries_above_it():
    adam = AdamBC(betas=(0.9, 0.99), resolution=2.0)
    value, _ = run_on_noise(adam, 700)
    floor = 2 * math.sqrt(2 * 0.01 / 1.99) * PHI
    assert float(adam._floor(torch.tensor(PHI).double(), 100_000)) == pytest.approx(floor, rel=1e-6)
    # 0.977 of a normal lie below two deviations
    assert 0.955 < value.notes["adam_bc/floor_fraction"] < 0.985
    assert float(value.gradients["w"].abs().max()) <= 6 * math.sqrt(PHI) / math.sqrt(floor)
    assert float(adam._floor(torch.tensor(PHI).double(), 1)) == pytest.approx(
        2 * math.sqrt(2) * PHI
    )


def test_a_signal_far_above_the_noise_gives_adam_without_epsilon():
    inputs = [torch.randn(3, 4).double() for _ in range(12)]
    w, mine = torch.nn.Parameter(torch.zeros(3, 4).double()), torch.zeros(3, 4).double()
    optimizer = torch.optim.Adam([w], lr=0.1, eps=0.0)
    for g, value in zip(inputs, run(AdamBC(floor=1e-30), inputs, variance=1e-28), strict=True):
        w.grad = g.clone()
        optimizer.step()
        mine -= 0.1 * value.gradients["w"]
        assert_close(mine, w.detach(), rtol=1e-9, atol=1e-12)
    assert value.notes["adam_bc/floor_fraction"] == 0


def test_the_noise_is_taken_off_after_the_correction_of_the_bias():
    """One step, by hand: v̂ = g², so the step is g / √max(g² − Φ, γ')."""
    g = torch.tensor([2.0, 0.3, -1.0]).double()
    (value,) = run(AdamBC(floor=1e-4), [g], variance=0.25)
    assert_close(value.gradients["w"], g / torch.tensor([3.75, 1e-4, 0.75]).double().sqrt())
    assert value.notes["adam_bc/floor_fraction"] == pytest.approx(1 / 3)


@pytest.mark.quick("*-whitened", "None-natural", "DiSK*inverse")
@pytest.mark.parametrize("readout", ["whitened", "natural", "inverse"])
@pytest.mark.parametrize(
    "filter_", [None, DiSK(0.3), EMA(0.3, "zero"), LowPass.butterworth(2, 0.4)], ids=str
)
def test_what_is_subtracted_is_the_mean_of_v_on_pure_noise(filter_, readout):
    """Behind any read-out and filter, from the first steps on and across a metric that is rebuilt:
    E[v − φ] = 0.
    """
    model, layers = several_layers()
    metrics = []
    for _ in range(2):
        metrics.append(
            {
                n: Kronecker(output=Diagonal(torch.rand(w).double() + 0.3))
                for n, w in (("linear", 3), ("bare", 2))
            }
        )
        metrics[-1]["norm"] = Elementwise({"weight": torch.rand(3).double() + 0.3})
    runs, steps = 1500, 5
    adam = AdamBC(betas=(0.9, 0.9), floor=1e-9)
    total = {}
    # 50 independent runs at a time would need another model; entries are pooled instead
    for _ in range(runs // 50):
        chain = PostprocessPipeline([s for s in (filter_, adam) if s is not None], readout)
        for t in range(steps):
            noise = {n: 0.5 * torch.randn_like(p) for n, p in model.named_parameters()}
            chain.apply(make_released(noise, 0.25, t), metrics[t // 3], layers)
        held = {key.split(".", 1)[1]: x for key, x in chain.state_dict().items()}
        for name, _ in model.named_parameters():
            ratio = held[f"v/{name}"] / held[f"phi/{name}"]
            total[name] = total.get(name, 0.0) + ratio.mean() / (runs // 50)
    sizes = torch.tensor([p.numel() for p in model.parameters()], dtype=torch.float64)
    mean = float((torch.stack([*total.values()]) * sizes).sum() / sizes.sum())
    assert 0.85 < mean < 1.15  # it would be 0.3 to 3 with the variance of a release


def test_values_outside_their_range_are_refused_by_name():
    for floor in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="floor of AdamBC must be positive and finite"):
            AdamBC(floor=floor)
    with pytest.raises(ValueError, match="floor of AdamBC must be a positive number or 'auto'"):
        AdamBC(floor="none")
    with pytest.raises(ValueError, match="betas of AdamBC"):
        AdamBC(betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="resolution of AdamBC"):
        AdamBC(resolution=0.0)
