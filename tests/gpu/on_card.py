"""Private steps on the pretended device beside the same on the CPU, written as JSON, in a process
that has loaded it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpkfc
from dpkfc.curvature.diagonal import AdaDPS
from dpkfc.linalg.row_norms import row_norms
from dpkfc.postprocess import SOFIM, AdamBC, DiSK
from tests.gradients.cases import CASES, build, loss_fn

CARD: Any = torch.ops.card
STEPS, BATCH, MICRO = 4, 4, 2
WIDTH = 160  # wide enough for Gram matrices


class Text(nn.Module):
    """Embedding, attention, norms and a tied head over the vocabulary."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(blocks)
        )
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


def deep(layers: int) -> nn.Module:
    """A stack over positions whose every layer takes its norms by Gram matrices."""
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), nn.Flatten(), nn.Linear(5 * WIDTH, 3)
    )


def steps(
    model: nn.Module, data: Any, loss: Callable[..., Tensor], device: str, **config: Any
) -> dict[str, Any]:
    """Clipped sums of every step, the weights after it, and how often the host waited in each."""
    model = copy.deepcopy(model).to(device)
    plan = dpkfc.PrivacyConfig(
        **{"steps": STEPS, "sampler": "fixed", "expected_batch_size": BATCH, "max_grad_norm": 0.1}
        | config,
        max_physical_batch_size=MICRO,
        test_mode_seed=0,
    ).calibrate(epsilon=50.0, delta=1e-3, dataset_size=len(data))
    session = dpkfc.Session(plan, model, torch.optim.SGD(model.parameters(), lr=0.0), data)
    sums: list[dict[str, Tensor]] = []
    waits: list[int] = []
    release = session._release

    def release_and_note(clipped: Any) -> Any:
        counts = CARD.counts()
        sums.append({name: x.to("cpu", copy=True) for name, x in clipped.tensors.items()})
        waits[-1] -= _waits(CARD.counts()) - _waits(counts)  # this look itself
        return release(clipped)

    vars(session)["_release"] = release_and_note
    for batch in session.batches():
        CARD.clear()
        waits.append(0)
        session.step(batch, loss)
        waits[-1] += _waits(CARD.counts())
    finite = all(bool(x.isfinite().all()) for x in model.state_dict().values())
    return {"sums": sums, "waits": waits, "finite": finite}


def _waits(counts: dict[str, int]) -> int:
    return sum(n for name, n in counts.items() if name.startswith("waits: "))


def compare(
    model: nn.Module, data: Any, loss: Callable[..., Tensor], **config: Any
) -> dict[str, Any]:
    here, there = (steps(model, data, loss, device, **config) for device in ("cpu", "cuda"))
    worst = max(
        float((one[name] - other[name]).norm() / max(float(one[name].norm()), 1e-3))
        for one, other in zip(here["sums"], there["sums"], strict=True)
        for name in one
    )
    return {"difference": worst, "waits": there["waits"], "finite": there["finite"]}


class Pooled(nn.Module):
    """All positions get one output gradient, so that the sum of the inputs is what counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum(1)[:, :3]


def _draw_cancelling() -> torch.utils.data.TensorDataset:
    """Inputs of 6 positions, each followed by all but its opposite."""
    x = torch.randn(8, 3, 1, WIDTH)
    x = torch.cat([x, 1e-4 * torch.randn(8, 3, 1, WIDTH) - x], 2).flatten(1, 2)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (8,)))


def bounds() -> list[float]:
    """How far lengths on the card are above those in float64, for rows within the range of float32
    and beyond it.
    """
    rows = torch.randn(6, 10)
    rows = rows * torch.tensor([1.0, 1e-30, 1e-22, 1e18, 1e25, 0.0]).unsqueeze(1)
    found, exact = row_norms(rows.to("cuda")).cpu(), rows.double().norm(dim=1)
    return [1.0 if a == b else a / b for a, b in zip(found.tolist(), exact.tolist(), strict=True)]


def main(path: str) -> None:
    report: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        model, (x, y) = build(case, n=8, dtype=torch.float32)
        data = torch.utils.data.TensorDataset(x, y)
        report[case.name] = compare(model, data, loss_fn)
        if x.is_floating_point() and number % 3 == 0:
            kfac = dpkfc.KFAC(
                probe=dpkfc.WhiteNoise(shape=tuple(x.shape[1:])), probe_size=8, sides="both"
            )
            report[f"{case.name}, whitened"] = compare(model, data, loss_fn, preconditioner=kfac)
    torch.manual_seed(0)
    images = torch.utils.data.TensorDataset(torch.randn(8, 5, WIDTH), torch.randint(0, 3, (8,)))
    noise = dpkfc.WhiteNoise(shape=(5, WIDTH))
    for layers in (1, 5):
        report[f"depth {layers}"] = compare(deep(layers), images, loss_fn)
    methods: dict[str, dict[str, Any]] = {
        "filtered": {"postprocess": (DiSK(),)},
        "bias corrected": {"postprocess": (AdamBC(),)},
        "second moments": {"postprocess": (SOFIM(),)},
        "rescaled": {"preconditioner": AdaDPS(probe=noise, probe_size=8)},
        "mapped back": {
            "preconditioner": dpkfc.KFAC(probe=noise, probe_size=8),
            "readout": "natural",
        },
        "layer by layer": {"clipping": "per_layer"},
        "normalised": {"clipping": "normalised"},
    }
    for name, config in methods.items():
        report[name] = compare(deep(1), images, loss_fn, **config)
    # or what rounding makes of these models depends on how many were drawn before
    torch.manual_seed(0)
    ids = torch.utils.data.TensorDataset(torch.randint(0, 30, (8, 7)), torch.randint(0, 30, (8,)))
    tokens = dpkfc.TokenNoise(vocab_size=30, length=7, min_length=7, bare=True)
    for blocks in (1, 2):
        report[f"text of {blocks}"] = compare(Text(blocks), ids, lose_words)
    report["text, whitened"] = compare(
        Text(1), ids, lose_words, preconditioner=dpkfc.KFAC(probe=tokens, probe_size=8)
    )
    report["cancelling"] = compare(Pooled(), _draw_cancelling(), loss_fn)
    report["bounds"] = bounds()
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file)


def lose_words(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
