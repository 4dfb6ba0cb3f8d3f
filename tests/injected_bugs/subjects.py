"""Tiny training steps of many kinds, in which leaks are planted."""

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.audit.harness import Subject
from dpkfc.audit.replay import prepare_canaries
from dpkfc.audit.step_canaries import Canaries
from dpkfc.config import PrivacyConfig
from dpkfc.curvature import GEP, KFAC, NGD, FeatureNoise, PublicData
from dpkfc.postprocess import DiSK
from tests.audit.sizes import size
from tests.sessions import cross_entropy

N, B, WIDTH, CLASSES = 40, 8, 6, 3
STEPS = 120  # more than any script of secret noise here, so that every plan is accounted for once
EVERY, PROBE = size(8, 2), size(16, 32)  # steps between refreshes, and examples of a refresh
C = 0.7  # neither 1 nor B, so that a factor too many or too few shows


def private(**settings):
    """A plan that adds secret noise."""
    examples = settings.pop("examples", N)
    values = {"expected_batch_size": B, "steps": STEPS, "max_grad_norm": C, **settings}
    return PrivacyConfig(**values).with_noise(1.0, 1e-3, examples)


def numbers(*shape, seed=1, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def labels(count=N):
    return torch.randint(0, CLASSES, (count,), generator=torch.Generator().manual_seed(2))


def seed_model(make, dtype=torch.float64):
    """Makes the model with equal weights at every call."""

    def model():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return make().to(dtype)

    return model


def mlp(*middle):
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8), *middle, nn.Linear(8, CLASSES)
    )


def vectors(dtype=torch.float64, model=mlp, **settings):
    """A classifier of short vectors."""
    return Subject(
        plan=private(**settings),
        model=seed_model(model, dtype),
        dataset=(numbers(N, WIDTH, dtype=dtype), labels()),
        loss_fn=cross_entropy,
    )


def public(width=WIDTH, count=32):
    scale = torch.linspace(0.1, 3, width)
    return PublicData(
        numbers(count, width, seed=3, dtype=torch.float32) * scale, provenance="made up"
    )


def kfac(every=EVERY):
    return KFAC(sides="both", probe=FeatureNoise(WIDTH), probe_size=PROBE, every=every)


class Tied(nn.Module):
    """An embedding whose table is the output layer too."""

    def __init__(self, tied=True):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 5), nn.Linear(5, 9, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


def next_token(model, batch):
    ids = batch[0]
    return 5 * F.cross_entropy(
        model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none"
    ).sum(1)


def texts(tied=True, **settings):
    ids = torch.randint(0, 9, (N, 6), generator=torch.Generator().manual_seed(4))
    return Subject(
        plan=private(**settings),
        model=seed_model(lambda: Tied(tied)),
        dataset=(ids,),
        loss_fn=next_token,
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.read(x)[0][:, -1])


def sequences(**settings):
    data = (numbers(N, 4, 3), labels())
    return Subject(
        plan=private(**settings), model=seed_model(Recurrent), dataset=data, loss_fn=cross_entropy
    )


def images(dtype=torch.float32, augment=None, **settings):
    def net():
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.GroupNorm(2, 4),
            nn.Flatten(),
            nn.Linear(100, CLASSES),
        )

    data = (numbers(N, 2, 5, 5, dtype=dtype), labels())
    return Subject(
        plan=private(**settings),
        model=seed_model(net, dtype),
        dataset=data,
        loss_fn=cross_entropy,
        augment=augment,
    )


def jittered(batch):
    """Each row changed at random, on its own."""
    x = batch[0]
    return (x * (1 + 0.3 * torch.rand(len(x), *[1] * (x.dim() - 1)).to(x)), *batch[1:])


def patients(**settings):
    """Twenty units of one to three records."""
    units = torch.cat([torch.arange(20), torch.arange(0, 20, 2), torch.arange(0, 20, 2)])
    settings = {
        "unit": "patient",
        "max_records_per_unit": 3,
        "unit_reduction": "sum",
        "examples": 20,
        **settings,
    }
    return Subject(
        plan=private(**settings),
        model=seed_model(mlp),
        dataset=(numbers(N, WIDTH), labels()),
        loss_fn=cross_entropy,
        units=units,
    )


def wide(**settings):
    """Enough numbers for noise that is 2 % short."""

    def net():
        return nn.Sequential(
            nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 30), nn.Tanh(), nn.Linear(30, CLASSES)
        )

    data = (numbers(N, 30), labels())
    return Subject(
        plan=private(**settings), model=seed_model(net), dataset=data, loss_fn=cross_entropy
    )


def make_cancelling():
    """Sequences cut to the longest of a batch, of positions that cancel but for a small rest; the
    last one is longer.
    """
    width, out, longest = 64, 48, 64
    u, v, w = (
        F.normalize(numbers(k, seed=s, dtype=torch.float32), dim=0)
        for k, s in ((width, 5), (out, 6), (width, 7))
    )
    x = (42 * u).repeat(N, longest, 1)
    x[:, 0] += 0.02 * w
    lengths = torch.full((N,), 16)
    lengths[-1] = longest
    kept = (torch.arange(longest) < lengths[:, None])[..., None]
    weights = (100 * (-1.0) ** torch.arange(longest))[:, None] * v * kept
    return Subject(
        plan=private(),
        model=seed_model(lambda: nn.Linear(width, out), torch.float32),
        dataset=(x * kept, weights, lengths),
        loss_fn=lambda model, batch: (model(batch[0]) * batch[1]).flatten(1).sum(1),
        collate_fn=cut,
    )


def cut(examples):
    longest = max(int(length) for *_, length in examples)
    columns = [torch.stack(column) for column in zip(*examples, strict=True)]
    return (*(x[:, :longest] for x in columns[:-1]), columns[-1])


def flat():
    """A linear loss of long vectors that are alike, so that what moves one norm moves the sum."""
    return Subject(
        plan=private(),
        model=seed_model(lambda: nn.Linear(3000, 40, bias=False), torch.float32),
        dataset=(numbers(1, 3000, dtype=torch.float32).repeat(N, 1),),
        loss_fn=lambda model, batch: 30 * model(batch[0])[:, 0],
    )


class Writer(nn.Module):
    """Keeps the mean of what it has seen in a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x):
        if self.training and len(x):
            with torch.no_grad():
                self.centre += 0.1 * x.detach().nan_to_num(0, 1, -1).mean(0)
        return x - self.centre


class Mixer(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, x):
        return x - 0.5 * x.nan_to_num(0, 1, -1).mean(0, keepdim=True)


def mix_batch(batch):
    return (0.7 * batch[0] + 0.3 * batch[0].roll(1, 0), *batch[1:])


def mix_half(x):
    """Return rows of which the first half holds a part of the second."""
    half = len(x) // 2
    return torch.cat([0.7 * x[:half] + 0.3 * x[half : 2 * half], x[half:]])


class HalfMixer(nn.Module):
    """Mixes the first half of a batch into the second, in reverse order."""

    def forward(self, x):
        return mix_half(x.flip(0)).flip(0)


def half_mixed_batch(batch):
    return (mix_half(batch[0]), *batch[1:])


def half_mixed_loss(model, batch):
    return cross_entropy(model, half_mixed_batch(batch))


class Positions(nn.Module):
    """A linear layer at eight positions, wide enough for norms by Gram matrices."""

    def __init__(self):
        super().__init__()
        self.read, self.head = nn.Linear(40, 36), nn.Linear(36, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.read(x)).mean(1))


def positions():
    data = (numbers(N, 8, 40, dtype=torch.float32), labels())
    return Subject(
        plan=private(),
        model=seed_model(Positions, torch.float32),
        dataset=data,
        loss_fn=cross_entropy,
    )


def ngd():
    preconditioner = NGD(
        probe=public(),
        probe_size=PROBE,
        lambda_safe=0.05,
        lambda_base=1e-3,
        steps=STEPS,
        every=EVERY,
    )
    return vectors(preconditioner=preconditioner, readout="natural")


def gep():
    made = GEP(
        probe=public(),
        rank=3,
        probe_size=PROBE,
        groups=1,
        embedding_norm=0.5,
        residual_norm=0.3,
        every=EVERY,
    )
    return vectors(preconditioner=made, clipping="embedding_residual", max_grad_norm=1.0)


SUBJECTS = {
    "DP-SGD": vectors,
    "DP-SGD in float32": functools.partial(vectors, torch.float32),
    "DP-KFC": lambda: vectors(preconditioner=kfac()),
    "DP-KFC in float32": lambda: vectors(torch.float32, preconditioner=kfac()),
    "DP-NGD": ngd,
    "GEP": gep,
    "DiSK": lambda: vectors(postprocess=(DiSK(kappa=0.3, gamma=0.5),)),
    "per-layer clipping": lambda: vectors(clipping="per_layer"),
    "batches of one size": lambda: vectors(sampler="fixed"),
    "truncated batches": lambda: vectors(sampler="truncated_poisson", max_batch_size=14),
    "padded micro-batches": lambda: vectors(max_physical_batch_size=2),
    "rounded noise": lambda: vectors(noise="rounded"),
    "views": lambda: images(torch.float64, jittered, augmentations=2),
    "patients": patients,
    "convolutions": images,
    "tied texts": texts,
    "texts": lambda: texts(False),
    "LSTM": sequences,
    "wide": wide,
    "long texts": positions,
    "small batches": lambda: vectors(expected_batch_size=2),
    "cancelling sequences": make_cancelling,
    "long vectors": flat,
}
MIXING = {  # refused on public rows; without that check, one example at a time
    "mixing model": lambda: vectors(model=lambda: mlp(Mixer())),
    "mixup": lambda: images(torch.float64, mix_batch, augmentations=2),
    "half-batch mixup": lambda: images(torch.float64, half_mixed_batch, augmentations=2),
    "half-batch mixup in the model": lambda: vectors(model=lambda: mlp(HalfMixer())),
    "half-batch mixup in the loss": lambda: replace(vectors(), loss_fn=half_mixed_loss),
}
FAULTY = {  # refused in every pass
    "writing model": lambda: vectors(model=lambda: mlp(Writer())),
}


def subject_of(name):
    """The subject of this name, new."""
    return (SUBJECTS | MIXING | FAULTY)[name]()


@functools.cache
def canaries_of(name):
    """All canaries of a subject, for the metric of the real code."""
    return prepare_canaries(subject_of(name))


def select(canaries, *parts):
    """The canaries whose names contain one of the parts, and the one without a loss."""
    selected = Canaries()
    numbers = {}
    for number, name in enumerate(canaries.names):
        if number == canaries.zero or any(part in name for part in parts):
            row, factor = canaries.rows[number], canaries.factors[number]
            numbers[number] = selected.add(name, row, factor)
    for layer, plants in canaries.plants.items():
        for number, a, u in plants:
            if number in numbers:
                selected.plants.setdefault(layer, []).append((numbers[number], a, u))
    return selected
