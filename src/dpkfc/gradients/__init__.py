"""Per-example gradients: recording, norms in a metric, clipping, clipped sums."""

from __future__ import annotations

from dpkfc.gradients.clipped_sum import Clip, ClippedSummer, capture, clip_factors
from dpkfc.gradients.discovery import find_layers
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
