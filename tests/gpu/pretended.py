"""A CUDA device that is pretended by `card.cpp`, for one process; torch must not have been imported
in it yet.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("card.cpp")


def compiler() -> str | None:
    """A C++ compiler of this machine."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build_library() -> Path:
    """The library, compiled once for an installation of torch and a version of its source.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    torch = Path(found.origin).parent
    key = f"{torch} {version('torch')} {sysconfig.get_platform()}".encode() + SOURCE.read_bytes()
    library = (
        Path(tempfile.gettempdir())
        / f"pretended-card-{os.getuid()}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    )
    if library.exists():
        return library
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / library.name
        command = [
            *(compiler() or "g++", "-shared", "-fPIC", "-O0", "-std=c++20"),
            *(f"-I{torch / 'include' / below}" for below in ("", "torch/csrc/api/include")),
            *(
                str(SOURCE),
                "-o",
                str(made),
                f"-L{torch / 'lib'}",
                "-ltorch",
                "-ltorch_cpu",
                "-lc10",
            ),
            f"-Wl,-rpath,{torch / 'lib'}",
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
        moved = library.with_suffix(f".{os.getpid()}")
        shutil.copy(made, moved)
        moved.replace(library)
    return library


def pretend() -> Any:
    """Load the device, and let `torch.cuda` speak of it.

    Returns:
        `torch.ops.card`, whose `counts()` tells how often each operator ran and the host waited,
        and `clear()` begins anew.
    """
    library = build_library()
    ctypes.CDLL(str(library))  # before torch, which asks once whether there is a device
    import torch

    torch.ops.load_library(str(library))
    own = torch.Generator()
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
        "get_rng_state": lambda device=None: own.get_state(),
        "set_rng_state": lambda state, device=None: own.set_state(state),
        "get_rng_state_all": lambda: [own.get_state()],
        "set_rng_state_all": lambda states: [own.set_state(x) for x in states],
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_name": lambda device=None: "a pretended card",
        "manual_seed": own.manual_seed,
        "manual_seed_all": own.manual_seed,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    return torch.ops.card
