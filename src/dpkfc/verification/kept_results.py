"""Results of a pass that objects of installed packages keep for the next one, as a cache does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def refuse_kept_results(model: nn.Module) -> Iterator[None]:
    """Raise if an object keeps results of passes that the body makes, as a cache of keys does.

    A replica copies what user code defines. Objects of installed packages stay shared by all
    passes, so one batch would see results of another.
    """
    try:
        yield
    finally:
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                is_object = hasattr(value, "__dict__") and not isinstance(value, Tensor)
                if is_object and not name.startswith("_") and _holds_results(value):
                    raise ValueError(
                        f"'{name}' of the module '{path}' ({type(value).__name__}) keeps results of"
                        " a pass for the next one; make it anew in forward (docs/pitfalls.md)"
                    )


def _holds_results(x: Any, depth: int = 4) -> bool:
    if isinstance(x, Tensor):
        return x.grad_fn is not None
    if depth == 0 or isinstance(x, nn.Module):
        return False
    if isinstance(x, Mapping):
        parts = list(x.values())
    elif isinstance(x, (list, tuple)):
        parts = list(x)
    else:
        parts = list(vars(x).values()) if hasattr(x, "__dict__") else []
    return any(_holds_results(part, depth - 1) for part in parts)
