"""The one error of studies: a line that names the file or the setting and what to do."""

from __future__ import annotations

__all__ = ["StudyError"]


class StudyError(ValueError):
    """A study that cannot be read, written or run as it was asked for."""
