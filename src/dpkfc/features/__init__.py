"""Fixed features whose scales come from synthetic examples: they see no private data and cost no ε.

A feature map stands before the layers that train. Neither its filters nor its scales depend on the
private examples, so ε is that of the head alone.
"""

from __future__ import annotations

from dpkfc.features.scales import FeaturesOf, Standardised, standardise
from dpkfc.features.scattering import Scattering, ScatteringTransform

__all__ = ["FeaturesOf", "Scattering", "ScatteringTransform", "Standardised", "standardise"]
