"""How a logical batch is drawn from a dataset and cut into micro-batches."""

from __future__ import annotations
