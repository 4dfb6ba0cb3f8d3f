"""What every test of a script gets: modes of torch that an earlier test has left on are taken off."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from torch.overrides import _get_current_function_mode_stack

from dpkfc.integrations._modes import ScriptModes


class Owner:
    """Owns no mode."""


@pytest.fixture(autouse=True)
def _without_modes() -> Iterator[None]:
    """Let go of the batches that the test has left behind."""
    yield
    if _get_current_function_mode_stack():
        gc.collect()
        ScriptModes(Owner(), ()).end()
