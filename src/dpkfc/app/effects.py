"""The effects of the columns of an additive model: what each adds, with the band of its noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.app.assembly import Prepared
from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.scales import from_share
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.picture_data import ColumnEffect
from dpkfc.features import AdditiveModel, Effect
from dpkfc.session import Session
from dpkfc.weight_noise import mean_curvature, noise_covariance

# Rows drawn from the schema at which the curvature of the loss is taken.
_ROWS = 1024
_EPOCH = datetime(1970, 1, 1)


def column_effects(prepared: Prepared, session: Session) -> list[ColumnEffect]:
    """Return the effects of a trained additive model; none for another model.

    Args:
        prepared: of the run; the model holds the weights that are delivered.
        session: of the run.
    """
    model, recipe = prepared.model, prepared.recipe
    if not isinstance(model, AdditiveModel) or recipe.public_schema is None:
        return []
    covariance = None
    state = session.preconditioner
    if state is not None and recipe.probe is not None:
        rows, _ = recipe.probe(prepared.config).sample(_ROWS, torch.Generator().manual_seed(0))
        assert isinstance(rows, Tensor)
        rate = prepared.config.optimizer.lr
        covariance = noise_covariance(session.plan, state, rate, mean_curvature(model, rows))
    return describe_effects(model.effects(covariance), recipe.public_schema, recipe.classes)


def describe_effects(
    effects: Sequence[Effect], schema: Schema, classes: Sequence[str]
) -> list[ColumnEffect]:
    """Return effects in the words of a schema; of two classes the log odds of the second."""
    described = []
    for effect in effects:
        column = schema.columns[effect.column]
        values, deviation = effect.values, effect.deviation
        outputs = list(classes) or [schema.target]
        if len(classes) == 2:
            values, deviation = 2 * values[:, 1:], 2 * deviation[:, 1:]
            outputs = [f"log odds of {classes[1]}"]
        elif not classes:
            values, deviation, outputs = _convert_unit(values, deviation, schema)
        described.append(
            ColumnEffect(
                effect.column,
                effect.is_curve,
                _names(column, effect),
                outputs,
                values[:-1],
                deviation[:-1],
                values[-1],
            )
        )
    return described


def _convert_unit(
    values: np.ndarray, deviation: np.ndarray, schema: Schema
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return effects on a number in its unit, or on its logarithm."""
    least, greatest = schema.target_bounds
    half = (greatest - least) / 2
    name = schema.target
    if schema.target_scale:
        if least <= 0:
            return values, deviation, [f"{name}, −1 to 1 on its log scale"]
        half = math.log(greatest / least) / 2
        name = f"log of {name}"
    return values * half, deviation * half, [name]


def _names(column: Column, effect: Effect) -> list[Any]:
    """Return what a person calls the values of a column at which the effect is given."""
    places = effect.inputs[:-1]
    if effect.is_curve:
        limits = column.limits
        # A column without bounds had none found.
        least, greatest = limits[0] if limits else (-1.0, 1.0)
        numbers = from_share((places[:, 0] + 1) / 2, least, greatest, column.scale)
        if column.kind == "date":
            return [_EPOCH + timedelta(seconds=float(number)) for number in numbers]
        return [float(f"{number:.6g}") for number in numbers]
    if column.kind == "flag":
        return ["false", "true"]
    if column.categories:
        return [*column.categories, "other"][: len(places)]
    return [str(place) for place in range(len(places))]
