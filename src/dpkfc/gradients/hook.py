"""Hooks that this library registers on modules of a user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook of the model. Copies and pickles of the model hold an inactive one."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function
        self.__name__ = "dpkfc_hook"

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, if there is one."""
        if self._function is not None:
            return self._function(*arguments)
        return None

    @property
    def __globals__(self) -> dict[str, Any]:
        """Refuse torch.jit.script, which alone reads this attribute to compile a hook."""
        raise RuntimeError(
            "torch.jit.script would compile the hooks of the privacy engine with the model; call "
            "engine.close() first"
        )

    @property
    def is_active(self) -> bool:
        """Whether the hook still calls a function."""
        return self._function is not None

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()
