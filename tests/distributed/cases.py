"""Small runs, each of which must come out the same on any number of processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dpkfc.config import PrivacyConfig
from dpkfc.curvature.diagonal import AdaDPS
from dpkfc.curvature.gep import GEP
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.ngd import NGD
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.curvature.probes import PublicData
from dpkfc.curvature.refined import Refined
from dpkfc.postprocess import DiSK
from dpkfc.session import Session
from tests.test_session import N, data, kfac, loss_fn, net, weights

UNITS = [i // 3 for i in range(N)]


class Words(nn.Module):
    """An embedding, a norm layer and a head: factors that are not dense."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, ids):
        return self.head(self.norm(self.table(ids)).mean(1))


class Image(nn.Module):
    """A convolution with few channels: its factors are sums, those of the wide head are kept
    rows.
    """

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 2), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x.reshape(-1, 1, 2, 3))).flatten(1).repeat(1, 2))


def words():
    torch.manual_seed(0)
    return Words().double()


def image():
    torch.manual_seed(0)
    return Image().double()


class Rare(nn.Module):
    """A layer with a computed weight that is called only where an example needs it: on some
    processes, not on others.
    """

    def __init__(self):
        super().__init__()
        self.head, self.rare = (
            nn.Linear(6, 3),
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)),
        )

    def forward(self, x):
        chosen = x[:, :1] > 0.8
        return self.head(x) + (chosen * self.rare(x) if bool(chosen.any()) else 0)


def rare():
    torch.manual_seed(0)
    return Rare().double()


def ids(n=N):
    x, y = data(n)
    return (x * 3).long().clamp(0, 6), y


def public(n=30):
    x, y = data(n)
    return PublicData(x.flip(1) + 0.5, y, provenance="made up")


def public_words(n=24):
    return PublicData(
        torch.randint(0, 7, (n, 8), generator=torch.Generator().manual_seed(5)),
        provenance="made up",
    )


def ngd(probe):
    return NGD(probe=probe, lambda_safe=0.1, steps=4, every=2, probe_size=24)


def shift(batch):
    """An augmentation that does not depend on the rows beside a row."""
    return batch[0] + 0.1 * batch[0].sin(), batch[1]


@dataclass(frozen=True)
class Case:
    """One run: settings of the plan, how the model is made, what the session is given."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = net
    dataset: Callable[[], Any] = data
    options: Mapping[str, Any] = field(default_factory=dict)
    momentum: float = 0.9
    size: int = N

    def plan(self):
        settings = {"expected_batch_size": 8, "steps": 4, "test_mode_seed": 3, **self.settings}
        return PrivacyConfig(**settings).with_noise(1.0, 1e-3, self.size)

    def open(self, ledger, **options):
        """A session with a ledger on the disk, and its model."""
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=self.momentum)
        return Session(
            self.plan(),
            model,
            optimizer,
            self.dataset(),
            ledger_path=ledger,
            **self.options,
            **options,
        ), model

    def train(self, steps=None, **options):
        """A session, closed, and the weights it has made."""
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=self.momentum)
        with Session(self.plan(), model, optimizer, self.dataset(), **self.options, **options) as s:
            for done, batch in enumerate(s.batches(), 1):
                s.step(batch, loss_fn)
                if done == steps:
                    break
        return s, weights(model)


def loss(output, generator):
    """A probe loss that draws numbers of its own, as many as a forward pass has examples."""
    return (output * torch.randn(output.shape, generator=generator, dtype=output.dtype)).sum(1)


CASES = {
    "DP-SGD": Case(),
    "shares that are empty": Case({"expected_batch_size": 2, "steps": 8}),
    "layers that some processes do not call": Case({"expected_batch_size": 4, "steps": 8}, rare),
    "micro-batches": Case({"max_physical_batch_size": 2}),
    "micro-batches found by trying": Case({"max_physical_batch_size": "auto"}),
    "augmentations": Case({"augmentations": 3}, options={"augment": shift}),
    "units": Case(
        {"unit": "patient", "max_records_per_unit": 2},
        options={"units": UNITS},
        size=len(set(UNITS)),
    ),
    "per layer": Case({"clipping": "per_layer"}),
    "DP-KFC": Case({"preconditioner": kfac()}),
    "DP-KFC, two probes, one larger than the chunk": Case(
        {
            "preconditioner": kfac(
                probe_size=90, chunk=7, probe=public(), output_probe=FeatureNoise(6), labels="given"
            )
        }
    ),
    "DP-KFC with a probe of three examples": Case({"preconditioner": kfac(probe_size=3)}),
    "DP-KFC with refined inputs": Case(
        {"preconditioner": kfac(probe=Refined(FeatureNoise(6), 2), chunk=5)}
    ),
    "DP-KFC, averaged over refreshes": Case(
        {"preconditioner": kfac(probe_size=6, decay=0.8), "steps": 8}
    ),
    "DP-KFC, averages of two probes, kept where little has moved": Case(
        {
            "preconditioner": kfac(
                probe=public(),
                output_probe=FeatureNoise(6),
                probe_size=5,
                every=1,
                decay=0.9,
                drift=0.6,
                labels="model",
            ),
            "steps": 8,
        }
    ),
    "DP-KFC, wide sides from drawn rows": Case(
        {
            "preconditioner": kfac(
                probe_size=24, max_factor_size=6, oversize="low_rank", decay=0.5
            ),
            "steps": 8,
        }
    ),
    "DP-KFC with a loss of its own": Case({"preconditioner": kfac(loss=loss)}),
    "DP-KFC in float32": Case(
        {"preconditioner": kfac()},
        lambda: net(dtype=torch.float32),
        lambda: data(dtype=torch.float32),
    ),
    "DP-KFC on a convolution": Case({"preconditioner": kfac(chunk=5)}, image),
    "DP-KFC on words": Case(
        {"preconditioner": KFAC(sides="both", probe=public_words(), probe_size=24, every=2)},
        words,
        ids,
    ),
    "DP-KFC of inputs, most of them not differentiated": Case(
        {"preconditioner": KFAC(probe=public_words(90), probe_size=90, chunk=7, every=2)},
        words,
        ids,
    ),
    "NGD": Case({"preconditioner": ngd(FeatureNoise(6)), "readout": "natural"}),
    "NGD on words": Case({"preconditioner": ngd(public_words()), "readout": "natural"}, words, ids),
    "AdaDPS": Case({"preconditioner": AdaDPS(probe=public(), batch_size=5, every=2)}),
    "GEP": Case(
        {"preconditioner": GEP(probe=public(), rank=3, every=2), "clipping": "embedding_residual"}
    ),
    "DiSK": Case({"postprocess": (DiSK(),), "preconditioner": kfac()}, momentum=0.0),
    "correlated noise": Case({"noise": "correlated", "bands": 3, "preconditioner": kfac()}),
}
