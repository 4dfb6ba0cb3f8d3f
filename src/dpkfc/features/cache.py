"""Tensors that depend on public settings alone, kept in the user's cache folder.

The environment variable DPKFC_CACHE names another folder; empty switches the cache off. Nothing
that depends on private data belongs here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpkfc.checkpoint import CheckpointError, place_file


def cache_folder() -> Path | None:
    """Return the folder of the cache, or None where it is switched off."""
    named = os.environ.get("DPKFC_CACHE")
    if named is not None:
        return Path(named) if named else None
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dpkfc"


def cached_tensors(
    name: str,
    settings: Mapping[str, Any],
    code: Sequence[str],
    make: Callable[[], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Return tensors that were made from the same settings by the same code, or make them.

    A folder that cannot be written and a damaged file cost time alone: the tensors are made again.

    Args:
        name: of the tensors, the beginning of the file's name.
        settings: all that the tensors depend on, as JSON can hold it; public.
        code: paths of the source files that make them.
        make: makes them.
    """
    folder = cache_folder()
    if folder is None:
        return make()
    content = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in code:
        content.update(Path(file).read_bytes())
    path = folder / f"{name}-{content.hexdigest()[:32]}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        tensors = make()
    # Another process may write the same file meanwhile.
    own = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(CheckpointError, OSError):
        place_file(own, partial(save_file, tensors))
        own.replace(path)
    return tensors
