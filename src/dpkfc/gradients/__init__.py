"""Per-example gradients: recording, norms in a metric, clipping, clipped sums."""

from __future__ import annotations

from dpkfc.gradients.clip import Clip, clip_factors
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import LayerRule, register_layer_rule
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.norms import per_example_norms

__all__ = [
    "Clip",
    "ClippedSummer",
    "Layer",
    "LayerRule",
    "Tape",
    "capture",
    "clip_factors",
    "find_layers",
    "per_example_norms",
    "register_layer_rule",
]
