"""Curvature of a linear head from one noisy matrix of second moments, Σ x xᵀ over all rows.

The matrix is a release of its own, charged in the ledger of the run before it is made
(`Session.release_curvature`). What is built from it is post-processing: no function here takes a
tensor that is not released.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpkfc._checks import check_positive
from dpkfc.curvature.base import Preconditioner, PreconditionerState
from dpkfc.curvature.layer_factors import Rules
from dpkfc.curvature.probe_pass import Capture
from dpkfc.curvature.report import report_row
from dpkfc.linalg.metric import Kronecker
from dpkfc.linalg.sides import Dense

# Of the release that a plan needs, `ExtraRelease(purpose=MOMENTS, norm=1.0, …)`: inputs of the head
# have norm 1 at most, or are clipped to it.
MOMENTS = "moments"


@dataclass(frozen=True, kw_only=True)
class SecondMoments(Preconditioner):
    """Whiten the inputs of a linear head by their second moments, released with noise.

    The root is (M + damping · ν I)^(-1/2) for the moments M of a row, where ν bounds the
    eigenvalues of the noise in M. Eigenvalues below ν are replaced by their mean.

    Attributes:
        damping: in units of ν.
    """

    damping: float = 1.0

    def __post_init__(self) -> None:
        check_positive("damping of SecondMoments", self.damping)

    @property
    def purpose(self) -> str:
        """The release that the metric is built from."""
        return MOMENTS

    def describe(self) -> dict[str, Any]:
        """Return plain values that decide the result."""
        return {"kind": type(self).__name__, "source": "a noisy release", **asdict(self)}

    def is_due(self, step: int) -> bool:
        """Return False: the one release serves all steps."""
        return False

    def build(
        self, model: nn.Module, capture: Capture, step: int, rules: Rules | None = None
    ) -> PreconditionerState:
        """Refuse to build without a release.

        Raises:
            RuntimeError: always; `Session.release_curvature` builds.
        """
        raise RuntimeError("SecondMoments is built from a release: call session.release_curvature")

    def build_from_release(
        self, model: nn.Module, vector: NDArray[np.float64], stddev: float, count: int, step: int
    ) -> PreconditionerState:
        """Build the metric of a linear head from released moments.

        Args:
            model: a linear layer, or a sequence that ends in one.
            vector: the released sum of `pack_symmetric(x xᵀ)` `[d (d + 1) / 2]`.
            stddev: of its noise.
            count: public number of rows or units.
            step: of training.
        """
        _, head = split_head(model)
        moments = unpack_symmetric(torch.from_numpy(vector) / count)
        width = len(moments)
        # Off the diagonal an entry of the noise has deviation stddev / √2: its norm is about this.
        noise = stddev / count * math.sqrt(2 * width)
        values, vectors = torch.linalg.eigh(moments)
        is_seen = values > noise
        rest = float(values.sum() - values[is_seen].sum()) / max(1, int((~is_seen).sum()))
        damped = torch.where(is_seen, values, values.clamp_min(0)) + self.damping * noise
        root = vectors * damped.rsqrt() @ vectors.T
        dtype = head.weight.dtype
        side = Dense(root.to(head.weight.device, dtype), float(damped.min().rsqrt()))
        name = "" if head is model else str(len(list(model.children())) - 1)
        rank = int(is_seen.sum())
        before = float(values.max() / max(rest, 1e-12))
        after = float(damped.max() / damped.min())
        report = report_row(
            name,
            side="input",
            kind=side.kind,
            dim=width,
            rank=rank,
            trace=float(moments.trace()),
            conditions=(before, after),
            note=f"eigenvalues above the noise of the release: {rank}",
        )
        known = torch.where(is_seen, values, max(rest, 0.0))
        return PreconditionerState(
            metric={name: Kronecker(input=side)},
            step=step,
            report=(report,),
            spectra={name: {"A": known}},
        )


def split_head(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """Return what comes before the linear head of a model, and the head.

    Raises:
        ValueError: the model is neither a linear layer without bias nor a sequence of modules
            without trained parameters that ends in one.
    """
    layers = list(model) if isinstance(model, nn.Sequential) else [model]
    *maps, head = layers or [model]
    trained = [p for layer in maps for p in layer.parameters() if p.requires_grad]
    if not isinstance(head, nn.Linear) or head.bias is not None or trained:
        raise ValueError(
            "SecondMoments is for one trained layer, nn.Linear(..., bias=False), behind fixed"
            " features; give such a model, or take KFAC"
        )
    return nn.Sequential(*maps), head


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Return a symmetric matrix `[d, d]` as a vector of the same norm `[d (d + 1) / 2]`."""
    rows, columns = torch.triu_indices(len(matrix), len(matrix))
    symmetric = (matrix + matrix.T) / 2
    return symmetric[rows, columns] * torch.where(rows == columns, 1.0, math.sqrt(2)).to(matrix)


def unpack_symmetric(vector: Tensor) -> Tensor:
    """Return the matrix `[d, d]` that `pack_symmetric` has packed."""
    width = round((math.sqrt(8 * len(vector) + 1) - 1) / 2)
    rows, columns = torch.triu_indices(width, width)
    entries = vector / torch.where(rows == columns, 1.0, math.sqrt(2)).to(vector)
    matrix = vector.new_zeros(width, width)
    matrix[rows, columns] = entries
    matrix[columns, rows] = entries
    return matrix
