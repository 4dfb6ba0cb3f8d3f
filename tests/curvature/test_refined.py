import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from dpkfc import (
    KFAC,
    DeadLeaves,
    PinkNoise,
    PublicData,
    Refined,
    TokenNoise,
)
from dpkfc.curvature.likelihood import ProbeRandomness
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.private_oracle import PrivateOracle
from dpkfc.curvature.probe_pass import ProbeSpec, public_generator, run_probe
from dpkfc.curvature.probes import Probe
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from tests.models import stream

SHAPE = (2, 6, 5)


def _model(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(36, 4)
        ).to(dtype)


def _run(probe, size=7, chunk=3, likelihood="categorical", loss=None):
    return ProbeSpec(
        probe=probe,
        size=size,
        chunk=chunk,
        labels="model",
        likelihood=likelihood,
        loss=loss,
        seed=1,
        step=4,
    )


def _record_inputs(model, run):
    """The inputs that the first layer has read, in the order of the probe."""
    seen = []

    def capture_inputs(model, loss):
        handle = model[0].register_forward_pre_hook(
            lambda module, args: seen.append(args[0].detach().clone())
        )
        try:
            return capture(model, find_layers(model), loss)
        finally:
            handle.remove()

    with preserve_model(model):
        pieces = [piece.rows for piece in run_probe(model, capture_inputs, run)]
    order = sorted(range(len(pieces)), key=lambda i: pieces[i].start)
    return torch.cat([seen[i] for i in order])


def test_every_second_example_moves_as_in_a_loop():
    """One example at a time, by plain autograd in float64; the smoothing by a loop over
    positions.
    """
    model, inner, steps, size = _model(), PinkNoise(SHAPE), 3, 0.3
    # labels drawn from the model would be others than uniform ones
    model[-1].bias.data += torch.tensor([3.0, 0.0, 0.0, 0.0])
    found = _record_inputs(model, _run(Refined(inner, steps, size, smoothing=1)))
    drawn = inner.sample(7, public_generator(1, 4))[0].double()
    uniform = torch.rand(7, generator=public_generator(1, 4, "refine"), dtype=torch.float64)
    model.eval()
    for i, x in enumerate(drawn):
        mean, std, target = x.mean(), x.std(correction=0), int(uniform[i // 2] * 4)
        for _ in range(steps if i % 2 else 0):
            leaf = x.clone().requires_grad_(True)
            (-F.log_softmax(model(leaf.unsqueeze(0)), 1)[0, target]).backward()
            g = leaf.grad
            smooth = torch.empty_like(g)
            for c in range(2):
                for r in range(6):
                    for k in range(5):
                        smooth[c, r, k] = g[c, max(0, r - 1) : r + 2, max(0, k - 1) : k + 2].mean()
            x = x - size * std * smooth / smooth.square().mean().sqrt()
            x = mean + (x - x.mean()) * std / x.std(correction=0)
        assert i % 2 or torch.equal(found[i], x)
        assert_close(found[i], x)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_the_chunk_changes_nothing(chunk):
    run = _run(Refined(DeadLeaves(SHAPE), 2))
    assert_close(_record_inputs(_model(), replace(run, chunk=chunk)), _record_inputs(_model(), run))


def test_examples_without_a_gradient_or_without_contrast_stay():
    x = torch.randn(6, *SHAPE, generator=stream(), dtype=torch.float64)
    x[1] = 0.0
    weight = torch.tensor([1.0, 0.0, 1.0])
    refined = Refined(PinkNoise(SHAPE), 2).refine(
        x, lambda x, _: x.flatten(1).pow(4).sum(1) * weight, slice(0, 6)
    )
    assert_close(refined[:5], x[:5])
    assert not torch.allclose(refined[5], x[5])


def test_other_numbers_of_the_probe_stay_what_they_are(monkeypatch):
    """Inputs are those of the other probe, and labels come from the same draws with it and
    without.
    """
    inner = PinkNoise(SHAPE)
    assert torch.equal(Refined(inner).sample(5, stream())[0], inner.sample(5, stream())[0])
    public_data = PublicData(
        torch.randn(6, *SHAPE), torch.zeros(6, dtype=torch.long), provenance="made up"
    )
    assert Refined(public_data).sample(5, stream())[1] is None
    seen = []
    original = ProbeRandomness.rows
    monkeypatch.setattr(
        ProbeRandomness, "rows", lambda self, *of: seen.append(original(self, *of)) or seen[-1]
    )
    _record_inputs(_model(), _run(inner, chunk=7))
    plain = seen[-1]
    _record_inputs(_model(), _run(Refined(inner, 2), chunk=7))
    assert torch.equal(seen[-1], plain) and not torch.equal(seen[-2], plain)


def test_its_description_names_the_other_probe_and_the_model():
    probe = Refined(DeadLeaves((1, 8, 8)), 5)
    assert isinstance(probe, Probe)
    described = json.loads(json.dumps(KFAC(sides="both", probe=probe).describe()))
    assert described["curvature_source"] == "synthetic, refined by the released model"
    assert described["probe"]["kind"] == "DeadLeaves" and described["probe"]["refine_steps"] == 5
    assert not described["uses_private_data"]
    public = PublicData(
        torch.randn(6, *SHAPE), torch.zeros(6, dtype=torch.long), provenance="made up"
    )
    description = Refined(public).describe()
    assert (
        description["provenance"] == "made up"
        and description["examples"] == 6
        and not description["labelled"]
    )


def test_an_oracle_stays_one():
    x = torch.randn(40, *SHAPE, generator=stream(9))
    oracle = KFAC(
        sides="both", probe=Refined(PrivateOracle((x, torch.zeros(40, dtype=torch.long))))
    )
    assert oracle.describe()["uses_private_data"]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"probe": "pink"}, "probe must be another probe"),
        ({"probe": Refined(PinkNoise(SHAPE))}, "probe must be another probe"),
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"smoothing": -1}, "smoothing"),
        ({"step_size": 0.0}, "step_size"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, what):
    with pytest.raises(ValueError, match=what):
        Refined(**{"probe": PinkNoise(SHAPE), **settings})


def test_inputs_and_losses_that_have_no_classes_to_move_to_are_refused():
    model = _model()
    with pytest.raises(ValueError, match="has none; give its probe itself"):
        _record_inputs(model, _run(Refined(PinkNoise(SHAPE)), likelihood="gaussian"))
    with pytest.raises(ValueError, match="a loss of your own has none"):
        _record_inputs(
            model, _run(Refined(PinkNoise(SHAPE)), loss=lambda output, generator: output.sum(1))
        )
    with pytest.raises(ValueError, match="TokenNoise gives others, such as token ids"):
        _record_inputs(model, _run(Refined(TokenNoise(vocab_size=11, length=4, min_length=4))))
    with pytest.raises(ValueError, match="cannot be called on what the probe Refined gives it"):
        _record_inputs(model, _run(Refined(PinkNoise((3, 6, 5)))))
