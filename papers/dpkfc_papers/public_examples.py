"""Public examples of a study, named by a text that is the same on every machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dpkfc.app.datasets.sources import CIFAR100, load_pixels
from dpkfc.app.datasets.text import hashed_texts, load_texts
from dpkfc.app.recipes.catalogue import find_recipe, run_config
from dpkfc.app.recipes.images import CIFAR10_NORMALISATION
from dpkfc.app.run_folder import write_atomically
from dpkfc.app.tuning.runs import Place, Plain, Run, StudyError
from dpkfc_papers.minilm import minilm_tokens
from dpkfc_papers.recipes.sentences import AG_NEWS, HEAD_LENGTH, SIZE
from dpkfc_papers.sentence_vectors import encode_tokens

_NAMED = re.compile(r"@(?P<recipe>[\w-]+):(?P<count>\d+)")
_SEED = 0


def study_place(folder: Path, data_dir: str = "") -> Place:
    """Return the place of a study, where runs find public examples by their names."""
    return Place(folder, data_dir, localise)


def localise(run: Run, place: Place) -> Mapping[str, Plain]:
    """Return the path of a run's public examples, for a run that names some."""
    name = dict(run.settings).get("public_data")
    if not name:
        return {}
    return {"public_data": find_public_examples(name, place.folder / "public", place.data_dir)}


def find_public_examples(name: Any, folder: Path, data_dir: str = "") -> str:
    """Return the file of public examples behind a name; make it if it is missing.

    Args:
        name: `@RECIPE:N`, N training examples of that recipe, chosen by a public seed;
            `@cifar100:N`, in CIFAR-10's constants; `@ag-news-words:N`, AG News in the hashed words
            of `imdb-logistic`; `@ag-news-sentences:N`, AG News as vectors, for
            `stackoverflow-head`. Any other text is returned as it is.
        folder: where the file is kept, for all cells of a study.
        data_dir: folder of the data sets.

    Raises:
        StudyError: fewer examples than asked for.
        ConfigError: an unknown recipe.
        DatasetError: its data set is missing.
    """
    found = _NAMED.fullmatch(str(name))
    if found is None:
        return str(name)
    recipe = found["recipe"]
    count = int(found["count"])
    path = folder / f"{recipe}-{count}.safetensors"
    if not path.is_file():
        _write(path, recipe, count, data_dir)
    return str(path)


def _write(path: Path, recipe: str, count: int, data_dir: str) -> None:
    inputs, labels = _examples(recipe, data_dir)
    if not 0 < count <= len(labels):
        raise StudyError(
            f"public_data = '@{recipe}:{count}': the set has {len(labels)} training examples;"
            " choose 1 to that"
        )
    generator = torch.Generator().manual_seed(_SEED)
    rows = torch.randperm(len(labels), generator=generator)[:count]
    chosen = inputs[rows]
    if recipe == "ag-news-sentences":
        # The encoder is slow, so it sees the chosen texts alone.
        chosen = encode_tokens(chosen)
    content = {"inputs": chosen.contiguous(), "labels": labels[rows].contiguous()}
    write_atomically(path, lambda part: save_file(content, part))


def _examples(name: str, data_dir: str) -> tuple[Any, Any]:
    """Return training inputs and labels of a recipe, or of a set in the form of one."""
    home = data_dir or None
    if name == "cifar100":
        return load_pixels(CIFAR100, home).tensors(CIFAR10_NORMALISATION).train
    if name == "ag-news-words":
        return load_texts(AG_NEWS, home).tensors(lambda lines: hashed_texts(lines, SIZE)).train
    if name == "ag-news-sentences":
        texts = load_texts(AG_NEWS, home)
        return texts.tensors(lambda lines: minilm_tokens(lines, HEAD_LENGTH)).train
    return recipe_data(name, data_dir).train


def recipe_data(name: str, data_dir: str) -> Any:
    """Return the data of a recipe, with splits `train` and `test`."""
    return find_recipe(name).data(run_config({"recipe": name, "data_dir": data_dir}))


# --------------------------------------------------------------------------------------------------
