"""Train in bfloat16: norms, sums and noise stay in float32 and float64."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpkfc.release_pipeline
from dpkfc.gradients.one_pass import example_gradient
from dpkfc.session import Session
from tests.gradients.cases import Scaled, sum_examples
from tests.sessions import assert_refused, open_session
from tests.test_session import N, data, plan


class Mix(nn.Module):
    """A raw matrix: covered by the fallback, which leaves it differentiable, so that autocast keeps
    its cast.
    """

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x):
        return F.linear(x, self.matrix)


class Block(nn.Module):
    """One of everything: embedding, norm, convolution, attention with a key bias, raw
    parameters.
    """

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.conv, self.gain, self.head = nn.Conv1d(8, 8, 3, padding=1), Scaled(8), nn.Linear(8, 3)
        self.mix = Mix()

    def forward(self, ids):
        x = self.norm(self.table(ids))
        x = x + F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2).tanh()
        return self.head(self.gain(self.mix(x)).mean(1))


def block(dtype=torch.float32):
    torch.manual_seed(0)
    return Block().to(dtype)


def sentences():
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 12, (N, 5), generator=generator), torch.randint(
        0, 3, (N,), generator=generator
    )


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")


def autocast_loss(dtype):
    def loss(model, batch):
        with torch.autocast("cpu", dtype=dtype):
            return loss_fn(model, batch)

    return loss


def sum_in_float32(model, loss=loss_fn):
    sums, norms = sum_examples(model, sentences(), 0.5, loss)
    assert {x.dtype for x in sums.values()} == {torch.float32}
    assert norms.dtype == torch.float64
    return torch.cat([sums[n].flatten() for n, _ in model.named_parameters()]), norms


@pytest.mark.parametrize("precision", ["bfloat16 weights", "bfloat16 autocast", "float16 autocast"])
def test_norms_and_sums_are_those_of_float32_up_to_the_rounding_of_the_model(precision):
    """Stated bound: 4 roundings of the type in which the model computes; what follows the model
    adds none of that size.
    """
    exact, exact_norms = sum_in_float32(block())
    dtype = getattr(torch, precision.split()[0])
    if "weights" in precision:
        found, norms = sum_in_float32(block(dtype))
    else:
        found, norms = sum_in_float32(block(), autocast_loss(dtype))
    bound = 4 * torch.finfo(dtype).eps
    assert float((found - exact).norm() / exact.norm()) < bound
    assert float(((norms - exact_norms) / exact_norms).abs().max()) < bound


class Spy:
    """Stands between the clipped sum and the mechanism, and keeps both sides."""

    def __init__(self, monkeypatch):
        self.sums = []
        self.releases = []
        real = dpkfc.release_pipeline.release

        def release(clipped, *rest):
            self.sums.append(clipped)
            self.releases.append(real(clipped, *rest))
            return self.releases[-1]

        monkeypatch.setattr(dpkfc.release_pipeline, "release", release)


@pytest.mark.parametrize(
    "loss", [loss_fn, autocast_loss(torch.bfloat16)], ids=["weights", "autocast"]
)
def test_the_noise_is_float32_and_is_rounded_only_for_the_optimizer(monkeypatch, loss):
    spy, handed = Spy(monkeypatch), []
    model = nn.Sequential(nn.Embedding(12, 400), nn.Flatten(), nn.Linear(2000, 3))
    model = model.bfloat16() if loss is loss_fn else model

    class Handed(torch.optim.SGD):
        def step(self, closure=None):
            handed.append({p.grad.dtype for p in model.parameters()})
            super().step()

    p = plan(1.5, steps=2, max_grad_norm=0.1)
    with Session(p, model, Handed(model.parameters(), 0.1), sentences()) as s:
        for batch in s.batches():
            s.step(batch, lambda m, b: 0 * loss(m, b))
    assert handed == [{next(model.parameters()).dtype}] * 2
    for clipped, released in zip(spy.sums, spy.releases, strict=True):
        assert {x.dtype for x in clipped.tensors.values()} == {torch.float32}
        assert {x.dtype for x in released.gradients.values()} == {torch.float32}
        noise = (
            torch.cat([g.flatten() for g in released.gradients.values()]).double()
            * p.expected_batch_size
            / p.stddev
        )
        rounded = noise.float().bfloat16().double()
        # not drawn in, or rounded to, bfloat16
        assert float((noise == rounded).double().mean()) < 0.01


def gradient_of_one(model, batch, loss):
    return example_gradient(model, loss, tuple(part[:1] for part in batch), 1.0)


def sum_of_batch(model, batch, loss):
    return sum_examples(model, batch, 0.5, loss)[0]


@pytest.mark.parametrize("gradients_of", [gradient_of_one, sum_of_batch])
def test_gradients_are_not_cast_by_an_autocast_around_the_loop(gradients_of):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = data(dtype=torch.float32)

    def exact(m, rows):
        with torch.autocast("cpu", enabled=False):
            return loss_fn(m, rows)

    expected = gradients_of(deepcopy(model).double(), (batch[0].double(), batch[1]), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients_of(model, batch, exact)
    for name, gradient in expected.items():
        assert torch.allclose(found[name].double(), gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("where", ["weights", "autocast"])
def test_mixed_examples_are_still_found(where):
    """As far as eight bits allow: a statistic of the batch is, a change of the loss by a few
    percent is not.
    """

    def mix(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "autocast"):
            scores = model(batch[0])
            return F.cross_entropy((scores - scores.mean(0)).float(), batch[1], reduction="none")

    model = block(torch.bfloat16 if where == "weights" else torch.float32)
    assert_refused(open_session(model, sentences()), "mixes examples", mix)


def test_a_grad_scaler_is_refused():
    """Its scale follows the size of un-noised gradients, and a step that it skips shows that one
    was not finite.
    """
    model, scaler = block(), torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match=r"GradScaler cannot step a private run.*bfloat16"):
        open_session(model, sentences(), optimizer=scaler)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.scaler = scaler  # as accelerate's optimizer holds one
    with pytest.raises(ValueError, match="GradScaler cannot step a private run"):
        open_session(model, sentences(), optimizer=optimizer)
    with pytest.raises(ValueError, match="must be a torch.optim.Optimizer, got dict"):
        open_session(model, sentences(), optimizer={"lr": 0.1})
