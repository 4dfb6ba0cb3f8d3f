"""One example more changes the clipped sum by what IT counts, and by nothing that it makes of the
others.

A valid bound for every single example is not enough: a neighbour that pads the others, or that
overflows beside them, may not move their bounds either.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.config import PrivacyConfig
from dpkfc.curvature import GEP, KFAC, NGD, FeatureNoise, PublicData
from dpkfc.session import Session
from dpkfc.step_record import Batch

N = 64


def list_by_position(model, batch):
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def padded(examples):
    length = max(len(x) for x, _ in examples)
    columns = zip(*examples, strict=True)
    inputs, targets = (
        torch.stack([F.pad(x, (0, 0, 0, length - len(x))) for x in column]) for column in columns
    )
    return inputs, targets


def random(width, out, lengths):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(t, width, generator=generator), torch.randn(t, out, generator=generator))
        for t in lengths
    ]


def draw_cancelling(width, out, lengths):
    """Positions that cancel but for a small rest."""
    found = []
    for t in lengths:
        generator = torch.Generator().manual_seed(2)
        u, v = (
            F.normalize(torch.randn(width, generator=generator), dim=0),
            torch.randn(out, generator=generator),
        )
        x = (42 * u).repeat(t, 1)
        x[0] += 0.02 * F.normalize(torch.randn(width, generator=generator), dim=0)
        signs = (-1.0) ** torch.arange(t)
        found.append((x, 100 * signs[:, None] * F.normalize(v, dim=0)))
    return found


def change(session, loss_fn, count=N):
    """How far the sum of the first examples moves when the one behind them joins, over the
    sensitivity of the plan.
    """
    session._pipeline.preconditioning.refresh(0)
    without, _ = session._clipped_sum(Batch(0, np.arange(count)), loss_fn)
    with_it, _ = session._clipped_sum(Batch(0, np.arange(count + 1)), loss_fn)
    moved = sum(
        float((with_it[k].double() - x.double()).square().sum()) for k, x in without.items()
    )
    return moved**0.5 / session.plan.sensitivity


def session_of(model, dataset, collate=None, **settings):
    plan = PrivacyConfig(expected_batch_size=N // 2, steps=9, **settings).with_noise(
        1.0, 1e-9, N + 1
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    return Session(plan, model, optimizer, dataset, collate_fn=collate, verify=False)


class Texts:
    """A dataset of texts of unequal length."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.texts[i]


def probe(width):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, width, generator=generator) * torch.linspace(0.05, 3, width)
    return PublicData(inputs, provenance="random")


METRICS = {
    "plain": lambda width: {},
    "normalised": lambda width: {"clipping": "normalised"},
    "per layer": lambda width: {"clipping": "per_layer"},
    "kfac": lambda width: {
        "preconditioner": KFAC(sides="both", probe=FeatureNoise(width), probe_size=64)
    },
    "ngd": lambda width: {
        "preconditioner": NGD(
            probe=probe(width), probe_size=64, lambda_safe=0.05, lambda_base=1e-3, steps=9
        ),
        "readout": "natural",
    },
    "gep": lambda width: {
        "preconditioner": GEP(probe=probe(width), rank=3, probe_size=64),
        "clipping": "embedding_residual",
    },
}


@pytest.mark.quick("*-draw_cancelling")
@pytest.mark.parametrize("kind", [random, draw_cancelling])
@pytest.mark.parametrize(("width", "out"), [(64, 48), (64, 8)])  # by Gram matrices, and formed
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("lengths", [(16, 64), (1, 5)])
def test_a_longer_neighbour_does_not_move_the_others(kind, width, out, metric, lengths):
    torch.manual_seed(0)
    model = nn.Linear(width, out)
    examples = kind(width, out, [lengths[0]] * N + [lengths[1]])
    session = session_of(model, examples, padded, **METRICS[metric](width))
    assert change(session, list_by_position) <= 1 + N * 2e-6


@pytest.mark.parametrize("value", [1e20, float("nan"), float("inf"), 1e-20])
@pytest.mark.parametrize("metric", METRICS)
def test_a_neighbour_that_overflows_does_not_move_the_others(value, metric):
    torch.manual_seed(0)
    model = nn.Linear(3000, 2, bias=False)
    inputs = torch.cat([torch.randn(3000).repeat(N, 1), torch.full((1, 3000), value)])
    if metric in ("kfac", "ngd", "gep"):
        model, inputs = nn.Linear(60, 2, bias=False), inputs[:, :60].clone()
    session = session_of(model, (inputs,), **METRICS[metric](inputs.shape[1]))
    assert change(session, lambda m, b: 30 * m(b[0])[:, 0]) <= 1 + N * 2e-6


def test_a_longer_text_does_not_move_the_others():
    """An embedding table that is also the output layer, and one that is not."""
    torch.manual_seed(0)
    for tied in (False, True):
        for vocabulary in (40, 900):
            model = nn.ModuleDict(
                {
                    "table": nn.Embedding(vocabulary, 24),
                    "head": nn.Linear(24, vocabulary, bias=False),
                }
            )
            if tied:
                model["head"].weight = model["table"].weight
            model.forward = lambda ids, m=model: m["head"](torch.tanh(m["table"](ids)))  # type: ignore[method-assign]

            def loss_fn(m, batch):
                ids = batch[0]
                losses = F.cross_entropy(
                    m(ids.clamp(min=0)).transpose(1, 2), ids.clamp(min=0), reduction="none"
                )
                return 50 * (losses * (ids >= 0)).sum(1)

            def collate(texts):
                return (nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1),)

            texts = [torch.randint(vocabulary, (7,)) for _ in range(N)] + [
                torch.randint(vocabulary, (90,))
            ]
            assert change(session_of(model, Texts(texts), collate), loss_fn) <= 1 + N * 2e-6, (
                tied,
                vocabulary,
            )


def test_a_neighbouring_unit_with_more_records_does_not_move_the_others():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5))
    units = torch.cat([torch.arange(N), torch.full((3,), N)])
    data = (torch.randn(N + 3, 12), torch.randint(5, (N + 3,)))
    for metric in ("plain", "kfac", "ngd"):
        settings = METRICS[metric](12)
        if "probe" in getattr(settings.get("preconditioner"), "__dict__", {}):
            settings["unit_reduction"] = "sum"
        plan = PrivacyConfig(
            expected_batch_size=N // 2, steps=9, unit="patient", max_records_per_unit=3, **settings
        ).with_noise(1.0, 1e-9, N + 1)
        session = Session(
            plan, model, torch.optim.SGD(model.parameters(), 0.1), data, units=units, verify=False
        )
        session._pipeline.preconditioning.refresh(0)
        rows = np.stack([np.arange(N), np.full(N, -1), np.full(N, -1)], 1)
        more = np.concatenate([rows, [[N, N + 1, N + 2]]])

        def loss_fn(m, batch):
            return 40 * F.cross_entropy(m(batch[0]), batch[1], reduction="none")

        sums = [
            session._clipped_sum(Batch(0, table[:, 0], table), loss_fn)[0]
            for table in (rows[:, :1], more)
        ]
        moved = sum(
            float((sums[1][k].double() - x.double()).square().sum()) for k, x in sums[0].items()
        )
        assert moved**0.5 <= plan.sensitivity * (1 + N * 2e-6), metric


def test_an_example_whose_factor_is_not_a_normal_number_counts_nothing():
    """Rounded up to the least number that float32 holds, its factor would let twice the clip
    through.
    """
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    data = (torch.cat([torch.ones(N, 1), torch.tensor([[2.66e22]])]),)
    for clipping in ("flat", "normalised", "automatic", "per_layer"):
        session = session_of(model, data, clipping=clipping)
        assert change(session, lambda m, b: m(b[0])[:, 0].square() / 2) <= 1 + 1e-5, clipping
