"""Leave the rows of padding of embedding tables as they are, as torch promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpkfc.gradients.layers import Layer
from dpkfc.gradients.padding_rows import find_padding_rows
from dpkfc.privacy.mechanism import Released


def clear_padding(update: Released, layers: Sequence[Layer]) -> Released:
    """Return an update that is zero in rows of padding.

    No example has a gradient in the row of `padding_idx`, so noise alone would move it.

    Args:
        update: for the optimizer. Tables whose noise waits (`lazy_noise`) are not in it.
        layers: of the model.
    """
    rows = find_padding_rows(layers)
    if not rows:
        return update
    gradients = dict(update.gradients)
    for name in rows.keys() & gradients.keys():
        # A copy: the release itself may be read again.
        table = gradients[name].clone()
        table[rows[name]] = 0.0
        gradients[name] = table
    return replace(update, gradients=gradients)
