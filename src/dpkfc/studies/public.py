"""Public examples of a study: those of another recipe or set, named by a text that is the same on every machine."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from dpkfc.studies.errors import StudyError

__all__ = ["resolved"]

_NAMED = re.compile(r"@(?P<recipe>[\w-]+):(?P<count>\d+)")
_SEED = 0

_LOG = logging.getLogger(__name__)


def resolved(name: Any, folder: Path, data_dir: str = "") -> str:
    """The file of public examples behind a name; the file is made when it is not there, or not whole.

    Args:
        name: `@RECIPE:N`, N training examples of that recipe, chosen by a public seed; `@cifar100:N`, in CIFAR-10's constants;
            `@ag-news-words:N`, AG News in the hashed words of `imdb-logistic`. Any other text is returned as it is.
        folder: where the file is kept, for all cells of a study.
        data_dir: folder of the data sets.

    Raises:
        StudyError: fewer examples than asked for.
        ConfigError: an unknown recipe.
        DatasetError: its data set is missing.
    """
    found = _NAMED.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return str(name)
    recipe, count = found["recipe"], int(found["count"])
    path = folder / f"{recipe}-{count}.safetensors"
    if not _is_whole(path, count):
        if path.exists():
            _LOG.warning("public examples %s: the file is damaged and is made again", path)
        _write(path, recipe, count, data_dir)
    return str(path)


def _is_whole(path: Path, count: int) -> bool:
    """Whether a file holds so many examples, by its header and its length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as held:
            return all(held.get_slice(name).get_shape()[:1] == [count] for name in ("inputs", "labels"))
    except (OSError, SafetensorError):
        return False


def _write(path: Path, recipe: str, count: int, data_dir: str) -> None:
    import torch
    from safetensors.torch import save_file

    from dpkfc.report.run_folder import placed

    inputs, labels = _examples(recipe, data_dir)
    if not 0 < count <= len(labels):
        raise StudyError(f"public_data = '@{recipe}:{count}': the set has {len(labels)} training examples; choose 1 to that")
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))[:count]
    content = {"inputs": inputs[rows].clone().contiguous(), "labels": labels[rows].clone().contiguous()}
    placed(path, lambda part: save_file(content, part))


def _examples(name: str, data_dir: str) -> tuple[Any, Any]:
    """Training inputs and labels of a recipe, or of a set in the form of one."""
    if name == "cifar100":
        from dpkfc.recipes.cifar10_cnn import NORMALISATION
        from dpkfc.recipes.datasets import load_pixels
        from dpkfc.recipes.datasets.sources import CIFAR100

        return load_pixels(CIFAR100, data_dir or None).tensors(NORMALISATION).train
    if name == "ag-news-words":
        from dpkfc.recipes.datasets import load_texts
        from dpkfc.recipes.datasets.hashing import hashed_texts
        from dpkfc.recipes.datasets.texts import AG_NEWS
        from dpkfc.recipes.imdb_logistic import SIZE

        return load_texts(AG_NEWS, data_dir or None).tensors(lambda lines: hashed_texts(lines, SIZE)).train
    from dpkfc.recipes.catalogue import find_recipe, run_config

    given = {"data_dir": data_dir} if data_dir else {}
    return find_recipe(name).data(run_config({"recipe": name, **given})).train
