"""From settings to plan, preconditioner and optimizer."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dpkfc.app.assembly import make_optimizer
from dpkfc.app.curvature_settings import Facts, make_kfac
from dpkfc.app.models import digits_cnn
from dpkfc.app.optimizers import SGD, AdamW
from dpkfc.app.plan_settings import make_plan, make_privacy_config
from dpkfc.app.run_config import make_config
from dpkfc.app.toml import ConfigError
from dpkfc.curvature import DeadLeaves, FeatureNoise, PinkNoise, PublicData, Refined, WhiteNoise
from dpkfc.postprocess import AdamBC

CONFIG = make_config(
    recipe="digits",
    preconditioner="kfac",
    expected_batch_size=32,
    steps=4,
    accountant="rdp",
    epsilon=8.0,
)
SHAPE = (1, 8, 8)
FACTS = Facts(SHAPE, 200)


def test_settings_reach_the_preconditioner():
    built = make_kfac(
        CONFIG.change(sides="input", damping=0.3, every=9, scale="trace", labels="uniform", seed=4),
        FACTS,
    )
    assert (built.sides, built.damping, built.every, built.scale, built.labels, built.seed) == (
        "input",
        0.3,
        9,
        "trace",
        "uniform",
        4,
    )
    assert built.probe == PinkNoise(SHAPE) and built.layer_rules is None
    assert make_kfac(CONFIG.change(layer_rules="linear, conv"), FACTS).layer_rules == (
        "linear",
        "conv",
    )
    assert make_kfac(CONFIG.change(source="white"), FACTS).probe == WhiteNoise(SHAPE)
    assert make_kfac(CONFIG.change(power_exponent=2.0), FACTS).probe == PinkNoise(
        SHAPE, power_exponent=2.0
    )
    assert make_kfac(CONFIG, Facts((7,))).probe == FeatureNoise(7)
    assert isinstance(make_kfac(CONFIG, FACTS, torch.zeros(3, *SHAPE)).probe, PublicData)


def test_images_of_the_source_are_refined_and_those_of_the_other_are_not():
    refined = CONFIG.change(source="dead-leaves", output_source="dead-leaves", refine=3)
    built = make_kfac(refined, FACTS)
    assert built.probe == Refined(DeadLeaves(SHAPE), 3) and built.output_probe == DeadLeaves(SHAPE)
    of_ngd = refined.change(output_source="", preconditioner="ngd", readout="natural")
    ngd = make_privacy_config(of_ngd, FACTS)
    assert ngd.preconditioner.probe == Refined(DeadLeaves(SHAPE), 3)
    unused = refined.change(preconditioner="none")
    assert make_plan(unused, FACTS).hash == make_plan(unused.change(refine=0), FACTS).hash


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"source": "tokens"}, "refine moves images, and source = 'tokens'"),
        ({"source": "private-oracle"}, "refine moves images, and source = 'private-oracle'"),
        ({"labels": "given"}, "labels = 'given' do not fit"),
        ({"likelihood": "gaussian"}, "'gaussian' has none"),
    ],
)
def test_what_cannot_be_refined_is_said_before_training(changed, what):
    with pytest.raises(ConfigError, match=what):
        make_plan_of(CONFIG.change(refine=3, **changed))


def make_plan_of(config):
    private = (torch.randn(200, *SHAPE), torch.zeros(200, dtype=torch.long))
    facts = Facts(SHAPE, 200, probe=lambda config: FeatureNoise(64), private=private)
    return make_plan(config, facts)


def test_a_public_probe_comes_from_a_file(tmp_path):
    path = tmp_path / "public.safetensors"
    save_file({"inputs": torch.randn(5, *SHAPE), "labels": torch.arange(5)}, path)
    probe = make_kfac(CONFIG.change(source="public", public_data=str(path)), FACTS).probe
    assert (
        probe.describe()["examples"] == 5 and "public.safetensors" in probe.describe()["provenance"]
    )
    with pytest.raises(ConfigError, match="expected `inputs`"):
        make_kfac(CONFIG.change(source="public", public_data=str(path)), Facts((3, 8, 8)))
    path.write_bytes(b"junk")
    for name in (path, tmp_path / "none.safetensors"):
        with pytest.raises(ConfigError, match="cannot be read as safetensors|does not exist"):
            make_kfac(CONFIG.change(source="public", public_data=str(name)), FACTS)


def test_the_plan_is_that_of_the_settings():
    plan = make_plan(CONFIG.change(clipping="normalised", max_grad_norm=0.5), FACTS)
    assert (plan.steps, plan.expected_batch_size, plan.dataset_size, plan.accountant) == (
        4,
        32,
        200,
        "rdp",
    )
    assert plan.epsilon() <= 8.0 and plan.max_grad_norm == 0.5 and not plan.test_mode
    assert make_plan(CONFIG.change(steps=0, epochs=2.0), Facts(SHAPE, 320)).steps == 20
    assert make_plan(CONFIG.change(test_mode=True, seed=5), FACTS).test_mode


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"layer_rules": "dense"}, "layer_rules"),
        ({"gamma": 0.1}, "gamma"),
    ],
)
def test_settings_that_do_not_go_together_are_one_error(changed, what):
    with pytest.raises(ConfigError, match=what):
        make_plan(CONFIG.change(**changed), FACTS)


def test_the_seed_never_seeds_the_noise():
    draws = []
    for _ in range(2):
        plan = make_plan(CONFIG.change(seed=7), FACTS)
        assert plan.config.test_mode_seed is None
        draws.append(plan.draw(0, plan.sampling_stream()).tolist())
    assert draws[0] != draws[1]


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, AdamBC(floor="auto", resolution=2.0)),
        ({"adam_bc_resolution": 7.0}, AdamBC(floor="auto", resolution=7.0)),
        ({"adam_bc_floor": 1e-4}, AdamBC(floor=1e-4)),
    ],
)
def test_settings_reach_adam_bc(settings, expected):
    plan = make_privacy_config(CONFIG.change(optimizer="adam-bc", **settings), FACTS)
    assert plan.postprocess == (expected,)


def test_optimizers():
    model = digits_cnn()
    sgd = make_optimizer(CONFIG.change(optimizer="sgd", lr=0.2, momentum=0.5), model)
    assert (
        isinstance(sgd, torch.optim.SGD)
        and sgd.defaults["lr"] == 0.2
        and sgd.defaults["momentum"] == 0.5
    )
    assert isinstance(make_optimizer(CONFIG.change(optimizer="adam"), model), torch.optim.AdamW)


@pytest.mark.parametrize(
    "ours, torchs, settings",
    [
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (AdamW, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.2}),
    ],
)
def test_optimizers_without_the_compiler_take_the_steps_of_torch(ours, torchs, settings):
    pair = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    optimizers = [kind([p], **settings) for kind, p in zip((ours, torchs), pair, strict=True)]
    for step in range(4):
        for p, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            p.grad = torch.arange(3.0, dtype=torch.float64) - step
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(*pair)


@pytest.mark.parametrize("optimizer, momentum", [("sgd", 0.0), ("adam", 0.9)])
def test_weight_decay_acts_after_the_release(optimizer, momentum):
    model = digits_cnn()
    before = [p.detach().clone() for p in model.parameters()]
    settings = {"optimizer": optimizer, "momentum": momentum, "lr": 0.1, "weight_decay": 0.5}
    made = make_optimizer(CONFIG.change(**settings), model)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        made.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.allclose(p, old * (1 - 0.05) ** 2, atol=1e-7)
