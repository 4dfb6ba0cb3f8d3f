"""Say what becomes of missing values, where no private figure of a step is shown."""

from __future__ import annotations

import warnings


def warn_of_missing_values(stacklevel: int) -> None:
    """Warn of NaN in every script alike: a warning that depended on records would tell of them.

    Args:
        stacklevel: of `warnings.warn`, counted from the caller.
    """
    warnings.warn(
        "a record whose gradient is not finite (NaN) adds nothing, and no message will say so:"
        " check the data for missing values",
        UserWarning,
        stacklevel=stacklevel + 1,
    )
