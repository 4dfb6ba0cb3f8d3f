"""Fixed features whose scales come from synthetic examples: they see no private data and cost no ε.

A feature map stands before the layers that train. Neither its filters nor its scales depend on the
private examples, so ε is the head's alone. The scales are mean and deviation of each channel over a
probe, and several maps side by side have equal weight.
"""

from __future__ import annotations

from dpkfc.features.additive import (
    AdditiveFeatures,
    AdditiveModel,
    Effect,
    InputColumn,
    choose_knots,
)
from dpkfc.features.encoder import EncoderFeatures, SyntheticEncoder
from dpkfc.features.joined import FeaturesOf, FlatFeatures, JoinedFeatures, build_features
from dpkfc.features.layer_means import LayerMeans, Whitening
from dpkfc.features.scales import Standardised, standardise
from dpkfc.features.scattering import Scattering, ScatteringTransform
from dpkfc.features.synthetic_images import SyntheticImages, draw_images
from dpkfc.features.text_encoder import TextEncoder
from dpkfc.features.zipf_words import ZipfWords

__all__ = [
    "AdditiveFeatures",
    "AdditiveModel",
    "Effect",
    "EncoderFeatures",
    "FeaturesOf",
    "FlatFeatures",
    "InputColumn",
    "JoinedFeatures",
    "LayerMeans",
    "Scattering",
    "ScatteringTransform",
    "Standardised",
    "SyntheticEncoder",
    "SyntheticImages",
    "TextEncoder",
    "Whitening",
    "ZipfWords",
    "build_features",
    "choose_knots",
    "draw_images",
    "standardise",
]
