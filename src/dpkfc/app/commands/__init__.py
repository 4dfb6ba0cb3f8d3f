"""The commands of the application, one module each, and the table that names them."""

from __future__ import annotations

from dpkfc.app.commands.table import register

__all__ = ["register"]
