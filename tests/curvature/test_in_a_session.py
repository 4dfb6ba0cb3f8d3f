"""Preconditioners beside KFAC through the whole loop: every release against a float64 loop over
single examples.
"""

import copy
import functools

import pytest
import torch
from torch import nn

from dpkfc.config import PrivacyConfig
from dpkfc.curvature import KFAC, NGD, AdaDPS, PinkNoise, PrivateOracle, PublicData
from dpkfc.gradients.discovery import find_layers
from dpkfc.linalg.metric import Eigenbasis, Elementwise, Kronecker
from dpkfc.privacy.mechanism import gaussian_release
from dpkfc.session import Session
from tests.gradients.whitened import clip_in_library, example_rows, explicit, loop_gradients, matrix
from tests.sessions import cross_entropy as loss_fn

F64, N, B, STEPS, LR = torch.float64, 24, 6, 5, 0.01
SHAPE = (2, 4, 5)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 2, groups=2, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))).mean((2, 3)))


class Tokens(nn.Module):
    """An MLP over the mean of embeddings, with a LayerNorm."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 5)
        self.norm = nn.LayerNorm(5)
        self.hidden = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(torch.tanh(self.hidden(self.norm(self.table(ids).mean(1)))))


def model(kind):
    torch.manual_seed(0)
    return (ConvNet() if kind == "conv" else Tokens()).double()


def inputs(kind, n, seed):
    generator = torch.Generator().manual_seed(seed)
    if kind == "conv":
        return torch.randn(n, *SHAPE, generator=generator, dtype=F64)
    return torch.randint(0, 9, (n, 4), generator=generator)


def labels(n, seed):
    return torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(seed + 100))


def data(kind):
    return inputs(kind, N, 1), labels(N, 1)


def public(kind):
    return PublicData(inputs(kind, 30, 3), labels(30, 3), provenance="other rows")


SETTINGS = {
    "ngd": (
        lambda k: NGD(probe=public(k), lambda_safe=0.05, lambda_base=1e-3, steps=STEPS, every=2),
        "natural",
    ),
    "ngd after": (
        lambda k: NGD(probe=public(k), lambda_safe=0.05, steps=STEPS, every=2, order="after"),
        "whitened",
    ),
    "ngd before": (
        lambda k: NGD(probe=public(k), lambda_safe=0.05, steps=STEPS, every=2, order="before"),
        "inverse",
    ),
    "adadps": (
        lambda k: AdaDPS(probe=public(k), batch_size=10, every=2),
        "whitened",
    ),
    "oracle": (
        lambda k: KFAC(
            sides="both", probe=PrivateOracle(data(k)), labels="given", probe_size=24, every=2
        ),
        "whitened",
    ),
    "hybrid": (
        lambda k: KFAC(
            sides="both",
            probe=PinkNoise(SHAPE)
            if k == "conv"
            else PublicData(inputs(k, 20, 3), provenance="ids"),
            output_probe=public(k),
            labels="given",
            probe_size=24,
            every=2,
        ),
        "whitened",
    ),
    "control": (
        lambda k: KFAC(sides="both", probe=public(k), probe_size=24, every=2, control="random"),
        "whitened",
    ),
    "inputs, natural": (
        lambda k: KFAC(probe=public(k), probe_size=24, every=2, sides="input"),
        "natural",
    ),
}


def plan_of(name, kind, noise=0.5):
    make, readout = SETTINGS[name]
    config = PrivacyConfig(
        expected_batch_size=B,
        steps=STEPS,
        max_grad_norm=0.4,
        test_mode_seed=7,
        preconditioner=make(kind),
        readout=readout,
    )
    return config.with_noise(noise, 1e-3, N)


def session(p, net, kind, **options):
    return Session(p, net, torch.optim.SGD(net.parameters(), LR), data(kind), **options)


# -- the loop, with every map as one explicit matrix -----------------------------------------------


def form_matrix(entry, d_out, d_in):
    """The map on the row-major vec of `[d_out, d_in]`."""
    if isinstance(entry, Kronecker):
        return torch.kron(
            explicit(entry.output, d_out).contiguous(), explicit(entry.input, d_in).contiguous()
        )
    assert isinstance(entry, Eigenbasis)
    eye = [torch.eye(d, dtype=F64) for d in (d_out, d_in)]
    q_out, q_in = (
        e if q is None else q for q, e in zip((entry.output, entry.input), eye, strict=True)
    )
    q = torch.kron(q_out.contiguous(), q_in.contiguous())
    even = entry.rest or 0.0  # of what is orthogonal to the columns of Q_in, where those are few
    return q @ torch.diag(entry.scale.flatten() - even) @ q.T + even * torch.eye(len(q), dtype=F64)


def map_gradients(layers, metric, tensors):
    """Every parameter's part of z = P g, by explicit matrices."""
    out = dict(tensors)
    for layer in layers:
        entry = metric.get(layer.name)
        if entry is None or (isinstance(entry, Kronecker) and entry.is_identity):
            continue
        own = {role: tensors[full] for role, full in layer.parameters.items()}
        if isinstance(entry, Elementwise):
            out.update({layer.parameters[r]: entry.scale[r] * g for r, g in own.items()})
            continue
        g = own["weight"].T if layer.rule == "embedding" else matrix(layer, own)
        groups = getattr(layer.module, "groups", 1)
        d_out, d_in = g.shape[0] // groups, g.shape[1]
        z = (g.reshape(groups, -1) @ form_matrix(entry, d_out, d_in).T).view(g.shape)
        if layer.rule == "embedding":
            out[layer.parameters["weight"]] = z.T
            continue
        if "bias" in own:
            out[layer.parameters["bias"]], z = z[:, -1], z[:, :-1]
        out[layer.parameters["weight"]] = z.reshape(own["weight"].shape)
    return out


def compute_update(net, p, metric, indices, kind, step):
    """The update of a step by a loop over its examples."""
    layers = find_layers(net)
    total = {name: torch.zeros_like(q) for name, q in net.named_parameters()}
    batch = example_rows(data(kind), list(indices))
    for grads in loop_gradients(net, batch, loss_fn):
        z = map_gradients(layers, metric, grads)
        norm = torch.sqrt(sum(x.square().sum() for x in z.values()))
        total = {
            name: t + min(1.0, p.max_grad_norm / max(float(norm), 1e-300)) * z[name]
            for name, t in total.items()
        }
    order = clip_in_library(net, layers, example_rows(data(kind), [0]), loss_fn, 1.0, metric)[1]
    noise = p.noise_stream()
    noisy = gaussian_release(
        {name: total[name] for name in order},
        p.stddev,
        p.expected_batch_size,
        lambda size, dtype: torch.from_numpy(noise.normal(size, step, "float64")),
    )
    if p.config.readout == "natural":
        noisy = map_gradients(layers, metric, noisy)
    elif p.config.readout == "inverse":
        noisy = map_gradients(
            layers, {name: entry.inverse() for name, entry in metric.items()}, noisy
        )
    return noisy


@pytest.mark.quick(
    "hybrid-conv",
    "adadps decay-tokens",
    "inputs, natural-tokens",
    "ngd-conv",
    "ngd before-tokens",
    "ngd after-conv",
)
@pytest.mark.parametrize("kind", ["conv", "tokens"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_release_equals_a_loop_over_examples(name, kind, monkeypatch):
    p, net = plan_of(name, kind), model(kind)
    built = []
    own = type(p.config.preconditioner)
    original = own.build

    @functools.wraps(original)
    def build(self, *args, **more):
        built.append(args[2])
        return original(self, *args, **more)

    monkeypatch.setattr(own, "build", build)
    with session(p, net, kind) as s:
        for step, batch in enumerate(s.batches()):
            before = copy.deepcopy(net)
            s.step(batch, loss_fn)
            metric = s._pipeline.preconditioning.metric
            update = compute_update(before, p, metric, batch.indices, kind, step)
            size = float(torch.sqrt(sum(u.square().sum() for u in update.values())))
            for (full, q), held in zip(net.named_parameters(), before.parameters(), strict=True):
                moved, where = (held - q) / LR, f"{full}, step {step}"
                torch.testing.assert_close(
                    moved,
                    update[full],
                    rtol=1e-8,
                    atol=1e-9 * size,
                    msg=lambda m, w=where: f"{w}: {m}",
                )
            assert metric
    assert built == [0, 2, 4]


def test_schedules_and_readouts_that_do_not_go_with_the_plan_are_refused():
    def make_plan(ngd, readout):
        config = PrivacyConfig(
            expected_batch_size=B, steps=STEPS, preconditioner=ngd, readout=readout
        )
        return config.with_noise(1.0, 1e-3, N)

    probe = public("tokens")
    with pytest.raises(ValueError, match=r"NGD\(steps=6\) is longer than the 5 steps of the plan"):
        make_plan(NGD(probe=probe, lambda_safe=1.0, steps=STEPS + 1), "natural")
    with pytest.raises(ValueError, match="order='before'.*readout='inverse'"):
        make_plan(NGD(probe=probe, lambda_safe=1.0, steps=STEPS, order="before"), "natural")
    with pytest.raises(ValueError, match="order='after'.*readout='whitened'"):
        make_plan(NGD(probe=probe, lambda_safe=1.0, steps=STEPS, order="after"), "natural")
    assert make_plan(NGD(probe=probe, lambda_safe=1.0, steps=3), "natural").certified
