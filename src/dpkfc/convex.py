"""The plan of a convex head on rows of norm at most 1: all rows in every step, averaged weights.

Clip norm, rate and steps follow from public numbers: rows, ε, δ, features and the kind of the
target. Where it pays, a part of the budget buys one noisy matrix of second moments, in whose
coordinates all steps are taken.

Source: the factors were chosen on a validation part of the Adult table, whole and in small parts;
docs/results/tables.md.
"""

from __future__ import annotations

import math
from typing import Any

from dpkfc._checks import check_one_of
from dpkfc.config import PrivacyConfig
from dpkfc.curvature.likelihood import LIKELIHOODS
from dpkfc.curvature.second_moments import MOMENTS, SecondMoments
from dpkfc.postprocess.weight_average import WeightEMA
from dpkfc.privacy.calibration import calibrate_noise_multiplier
from dpkfc.privacy.extra_releases import ExtraRelease

# Steps of the plan. They cost as much as one step together, and the average takes their noise out.
STEPS = 40
# Without a warm-up: 0.87⁴⁰ leaves 0.4 % of the initial weights.
AVERAGE = WeightEMA(0.87, warmup=False)
# The part of μ² of Gaussian privacy that the second moments take.
SHARE = 0.3
# Rows · μ at which a clip norm of 1 balances noise and bias.
_ROWS = 280.0
# The longest gradient of the outputs: of the cross-entropy, and of half a squared error that is
# rarely above ½ on a target from −1 to 1.
_LONGEST = {"categorical": math.sqrt(2), "gaussian": 1.0}
# 1 / L for the largest second derivative L of the loss: ½ for the cross-entropy of classes, else 1.
_RATES = {"categorical": 2.0, "gaussian": 1.0}


def gaussian_noise(epsilon: float, delta: float) -> float:
    """Return 1 / μ, the noise multiplier of one Gaussian release that costs (ε, δ)."""
    import dp_accounting

    return calibrate_noise_multiplier(epsilon, delta, dp_accounting.GaussianDpEvent, 1)


def moments_release(whole: float, share: float = SHARE) -> ExtraRelease:
    """Return the release of second moments of inputs of norm at most 1.

    Args:
        whole: the noise multiplier 1 / μ of the whole budget.
        share: the part of μ² that it takes.
    """
    return ExtraRelease(purpose=MOMENTS, noise_multiplier=whole / math.sqrt(share), norm=1.0)


def convex_clip(rows: int, whole: float, features: int, likelihood: str) -> float:
    """Choose C in the coordinates of the second moments: about √(rows · μ), at most √d / 2.

    Args:
        rows: public number of rows (or units).
        whole: the noise multiplier 1 / μ of the whole budget; 0 where the budget has no bound.
        features: d, inputs of the head.
        likelihood: "categorical" or "gaussian".
    """
    enough = math.sqrt(rows / whole / _ROWS) if whole > 0 else math.inf
    return min(enough, math.sqrt(features) / 2) * _LONGEST[likelihood]


def convex_rate(likelihood: str) -> float:
    """Return 1 / L of the loss in its outputs.

    Raises:
        ValueError: an unknown likelihood.
    """
    check_one_of("likelihood", likelihood, LIKELIHOODS)
    return _RATES[likelihood]


def convex_config(
    rows: int,
    epsilon: float,
    delta: float,
    features: int,
    likelihood: str = "categorical",
    **settings: Any,
) -> PrivacyConfig:
    """Return the settings for a linear head without bias on features of norm at most 1.

    Take `torch.optim.SGD(model.parameters(), lr=convex_rate(likelihood))` with them, and
    `.calibrate(epsilon, delta, rows)`.

    Args:
        rows: public number of rows (or units).
        epsilon: ε of the run, the second moments included.
        delta: δ of the run.
        features: d, inputs of the head.
        likelihood: "categorical" for classes, "gaussian" for a target from −1 to 1.
        settings: of `PrivacyConfig`, in place of these.
    """
    whole = gaussian_noise(epsilon, delta)
    chosen: dict[str, Any] = {
        "expected_batch_size": rows,
        "steps": STEPS,
        "max_grad_norm": convex_clip(rows, whole, features, likelihood),
        "preconditioner": SecondMoments(),
        "readout": "natural",
        "weight_average": AVERAGE,
        "extra_releases": (moments_release(whole),),
    }
    return PrivacyConfig(**chosen | settings)


# Momentum of the steps on whitened rows. Real texts are not white in the coordinates of drawn ones:
# along their mean a step without momentum is too long, and swings.
MOMENTUM = 0.9
# Whitened rows take steps of half the length, for the same reason.
_SHORTER = 0.5


# Rows · μ below which noise in all d directions asks for a smaller C, and how much smaller. Chosen
# on validation rows of four sets of texts, whole and in parts; docs/results/language.md.
_NOISY, _POWER = 6500.0, 1 / 3


def whitened_clip(rows: int, whole: float, features: int, likelihood: str) -> float:
    """Choose C for rows of norm 1 that public examples have whitened: about `convex_clip` / √d.

    Their covariance is about I / d where the second moments make it I. No second moments are
    released, so C · rate alone says how far noise moves the weights: it falls faster with rows · μ.

    Args:
        rows: public number of rows (or units).
        whole: the noise multiplier 1 / μ of the whole budget.
        features: d, inputs of the head.
        likelihood: "categorical" or "gaussian".
    """
    enough = (rows / whole / _NOISY) ** _POWER if whole > 0 else math.inf
    return convex_clip(rows, whole, features, likelihood) * min(enough, 1.0) / math.sqrt(features)


def whitened_rate(features: int, likelihood: str = "categorical") -> float:
    """Return the rate for SGD with `MOMENTUM` on rows of norm 1 that public examples have whitened.

    Raises:
        ValueError: an unknown likelihood.
    """
    return convex_rate(likelihood) * features * _SHORTER * (1 - MOMENTUM)


def whitened_config(
    rows: int,
    epsilon: float,
    delta: float,
    features: int,
    likelihood: str = "categorical",
    **settings: Any,
) -> PrivacyConfig:
    """Return the settings for a head without bias on rows of norm 1, as `LayerMeans` makes them.

    Take `torch.optim.SGD(model.parameters(), lr=whitened_rate(features), momentum=MOMENTUM)` with
    them, and `.calibrate(epsilon, delta, rows)`. Nothing is released before the first step.

    Args:
        rows: public number of rows (or units).
        epsilon: ε of the run.
        delta: δ of the run.
        features: d, inputs of the head.
        likelihood: "categorical" for classes, "gaussian" for a target from −1 to 1.
        settings: of `PrivacyConfig`, in place of these.
    """
    whole = gaussian_noise(epsilon, delta)
    chosen: dict[str, Any] = {
        "expected_batch_size": rows,
        "steps": STEPS,
        "max_grad_norm": whitened_clip(rows, whole, features, likelihood),
        "weight_average": AVERAGE,
    }
    return PrivacyConfig(**chosen | settings)
