"""Per-example gradients: recording, norms in a metric, clipping, clipped sums."""

from __future__ import annotations

from dpkfc.gradients.accumulate import Clip, ClippedSummer
from dpkfc.gradients.clipping import clip_factors
from dpkfc.gradients.contributions import capture
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.methods import choose_method
from dpkfc.gradients.norms import per_example_norms
from dpkfc.gradients.sums import weighted_sum
from dpkfc.gradients.tape import Tape

__all__ = [
    "Clip",
    "ClippedSummer",
    "Layer",
    "Tape",
    "capture",
    "choose_method",
    "clip_factors",
    "find_layers",
    "per_example_norms",
    "weighted_sum",
]
