"""Physical batches of an Opacus-shaped script."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from dpkfc.integrations._poisson_loader import PrivateLoader
from dpkfc.integrations._stepping import PrivateStep

__all__ = ["BatchMemoryManager"]


class BatchMemoryManager:
    """Splits logical batches into physical ones, as `opacus.utils.batch_memory_manager.BatchMemoryManager` does.

    `optimizer.step()` after a physical batch that does not end its logical batch changes no parameter and no state.

    Args:
        data_loader: from `make_private`.
        max_physical_batch_size: largest physical batch.
        optimizer: from the same `make_private`.

    Raises:
        ValueError: a loader that is not private, another optimizer, a size below 1.
    """

    def __init__(
        self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if not isinstance(data_loader, PrivateLoader) or not isinstance(data_loader.listener, PrivateStep):
            raise ValueError("data_loader is not private; pass the one that make_private returned")
        if data_loader.listener.optimizer is not optimizer:
            raise ValueError(
                "the optimizer belongs to another engine than data_loader; pass what make_private returned"
            )
        if isinstance(max_physical_batch_size, bool) or not isinstance(max_physical_batch_size, int):
            raise ValueError(f"max_physical_batch_size must be an integer, got {max_physical_batch_size!r}")
        if max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size must be >= 1, got {max_physical_batch_size}")
        self._step, self._loader = data_loader.listener, data_loader.cut(max_physical_batch_size)

    def __enter__(self) -> PrivateLoader:
        """The loader of physical batches."""
        return self._loader

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Drop an unfinished logical batch."""
        self._step.forget()
