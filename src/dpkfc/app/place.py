"""The place of a user's own data: a run goes on with files that were moved or renamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from dpkfc.app.datasets.errors import DatasetError, unreadable_error
from dpkfc.app.run_config import RunConfig
from dpkfc.app.toml import ConfigError
from dpkfc.checkpoint import file_digest

# The settings that name own data, which may stand elsewhere when a run goes on.
MOVABLE = ("data", "label_file")


def data_digest(config: RunConfig, known: str = "") -> str:
    """Return the SHA-256 of a run's own data, wherever they lie; empty for a recipe. PRIVATE.

    It depends on the content of files, on how the name of a table ends, and on the names inside of
    a folder. Hidden files and links are left out.

    Args:
        config: settings.
        known: the SHA-256 of the file `data`, where it has been read.

    Raises:
        DatasetError: a file is missing or cannot be read.
    """
    if not config.data.data:
        return ""
    digest = hashlib.sha256()
    for setting in MOVABLE:
        if not config.values[setting]:
            continue
        root = Path(config.values[setting])
        if not root.exists():
            raise DatasetError(f"{root}: does not exist; --{setting.replace('_', '-')} names it")
        try:
            for path in _files(root):
                name = root.suffix if path == root else path.relative_to(root).as_posix()
                content = known if known and setting == "data" else file_digest(path)
                line = f"{setting}\0{name}\0{content}\n"
                # A name need not be UTF-8.
                digest.update(line.encode("utf-8", "surrogatepass"))
        except OSError as error:
            raise unreadable_error(root, error) from None
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for place, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in sorted(Path(place, name) for name in names):
            if not path.name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def move_data(config: RunConfig, moved: Mapping[str, str], first: str) -> RunConfig:
    """Return the settings of a run with the place of its data, which have to be the same.

    Args:
        config: settings of the run.
        moved: the new places, by the names of `MOVABLE`; empty where the data lie as they did.
        first: what `data_digest` gave when the run was started.

    Raises:
        ConfigError: a setting that the run does not have, or data that the run was not trained on.
        DatasetError: the new place cannot be read.
    """
    for name in moved:
        if not config.values[name]:
            raise ConfigError(f"the run was started without {name}; resume it without {name}")
    config = config.change(**moved)
    if data_digest(config) != first:
        place = next(iter(moved.values()), config.data.data)
        raise ConfigError(
            f"{Path(place).name:.60} holds other data than the run was started with; a resumed run"
            " needs the same files"
        )
    return config
