"""Predictions, evaluations and exports of the model in a run folder."""

from __future__ import annotations

import csv
import io
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dpkfc._errors import first_line
from dpkfc.app.datasets.errors import DatasetError, damaged_error
from dpkfc.app.datasets.examples import Examples
from dpkfc.app.owndata.records import Records
from dpkfc.app.recipes.catalogue import recipe_of
from dpkfc.app.recipes.objective import Judged, model_outputs
from dpkfc.app.recipes.recipe import Recipe, compute_features
from dpkfc.app.run_config import RunConfig
from dpkfc.app.run_folder import RunFolder, RunFolderError, write_atomically
from dpkfc.app.scores import NO_LABEL, Scores
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import read_settings
from dpkfc.features import build_features
from dpkfc.report.verify import check_weights
from dpkfc.report.written_card import read_card


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run: its settings, its recipe, and the model with released weights."""

    config: RunConfig
    recipe: Recipe
    model: nn.Module


def load_run(path: Path) -> Trained:
    """Return the model of a finished run.

    Args:
        path: the run folder.

    Raises:
        RunFolderError: no folder of a finished run.
        CardError: the weights differ from those that the card describes.
        DatasetError: weights that cannot be read or belong to another model.
    """
    folder = RunFolder.locate(path)
    folder.check_settings()
    if not folder.model.is_file():
        raise RunFolderError(
            f"{path} holds no released weights; finish it: dpkfc train --resume {quote(str(path))}"
        )
    card = read_card(folder.ledger)
    if card is not None:
        check_weights(card)
    config = read_settings(folder)
    recipe = recipe_of(config).start_from(config.model.pretrained)
    model = recipe.model(config.run.seed)
    try:
        model.load_state_dict(load_file(folder.model))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = first_line(error)[:60]
        raise damaged_error(folder.model, f"does not fit the model ({reason})") from None
    model.eval()
    return Trained(config=config, recipe=recipe, model=model)


def read_records(
    trained: Trained, data: Path, run: Path, label_file: Path | None = None
) -> Records:
    """Read another file of the form that a run was trained on.

    Args:
        trained: of the run.
        data: a file, or a folder of images.
        run: the folder of the run.
        label_file: a table of image files and labels; None takes them from folders of classes.

    Raises:
        ConfigError: the run is of a recipe or a task, which reads its own data, or had no label
            file.
        DatasetError: a file that cannot be read, or lacks a column.
    """
    if trained.recipe.read is None:
        raise ConfigError(
            f"{run} was trained on {trained.recipe.title}, which has no form for other files; load"
            " model.safetensors in Python, or dpkfc export"
        )
    if trained.config.run.recipe == "own-images" and not data.is_dir():
        raise DatasetError(f"{data}: is not a folder of images, as the run was trained on")
    if label_file is None:
        records = trained.recipe.read(data)
    elif trained.config.data.label_file:
        records = trained.recipe.read(data, label_file)
    else:
        raise ConfigError(f"--label-file is for runs that were trained with one; {run} was not")
    if trained.recipe.features is None:
        return records
    inputs = compute_features(trained.recipe.features, records.inputs, data.name)
    return replace(records, inputs=inputs)


def write_predictions(trained: Trained, records: Records, out: Path) -> int:
    """Write a CSV file with a name and what is predicted of each record.

    Returns:
        The number of records.

    Raises:
        RunFolderError: the disk cannot take the file.
    """
    answer = trained.recipe.answer
    assert answer is not None
    columns = answer(torch.cat(list(model_outputs(trained.model, records.inputs))))

    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["record", *columns])
            writer.writerows(zip(records.names, *columns.values(), strict=True))

    write_atomically(out, write, private=True)
    return len(records)


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of a model on labelled records. PRIVATE where the records are.

    Attributes:
        judged: score and mean loss.
        examples: number of records.
        unlabelled: records that were left out, since they have no known target.
        scores: all scores; None for a task without them.
    """

    judged: Judged
    examples: int
    unlabelled: int
    scores: Scores | None


def evaluate_records(trained: Trained, records: Records) -> Evaluation:
    """Evaluate a model on the labelled records of a file.

    Raises:
        DatasetError: no record has a known target.
    """
    labelled = records.select_labelled()
    if not len(labelled):
        raise DatasetError(
            "no record has a known target; check its column, --label-file, and classes or"
            " target_bounds in schema.toml of the run"
        )
    examples = labelled.inputs, labelled.labels
    unlabelled = len(records) - len(labelled)
    return evaluate_examples(trained, examples, unlabelled)


def evaluate_examples(trained: Trained, examples: Examples, unlabelled: int = 0) -> Evaluation:
    """Evaluate a model on examples; those without a known target are left out.

    Raises:
        DatasetError: no example has a known target.
    """
    recipe = trained.recipe
    scores = recipe.task.scores(trained.model, examples) if recipe.task.scores else None
    count = len(examples[1])
    if scores is not None:
        unlabelled += scores.unlabelled
        count = scores.examples
    judged = recipe.task.judge(trained.model, examples)
    if not count or math.isnan(judged.accuracy):
        raise DatasetError(
            f"{NO_LABEL.format('test')}; check the column of the target, --label-file, and classes"
            " or target_bounds in schema.toml of the run"
        )
    return Evaluation(judged=judged, examples=count, unlabelled=unlabelled, scores=scores)


# --------------------------------------------------------------------------------------------------

FORMATS = {"torch": "model.pt2", "safetensors": "model.safetensors", "onnx": "model.onnx"}


def export_model(trained: Trained, run: Path, form: str, out: Path | None = None) -> Path:
    """Write the model of a run for use without this package.

    Args:
        trained: of the run.
        run: its folder.
        form: "torch" (a program of torch.export), "safetensors" (weights alone) or "onnx".
        out: the file; by default in the folder `export` of the run.

    Returns:
        The file.

    Raises:
        ConfigError: an unknown format, a missing package, or a model that cannot be traced.
    """
    if form not in FORMATS:
        raise ConfigError(f"unknown format {form!r}; choose {' | '.join(FORMATS)}")
    path = out or run / "export" / FORMATS[form]
    if form == "safetensors":
        weights = RunFolder.locate(run).model
        return write_atomically(path, lambda part: shutil.copyfile(weights, part))
    example = example_inputs(trained.recipe)
    model = trained.model
    if trained.recipe.features is not None:
        # The program takes images, as the files that a user has.
        model = nn.Sequential(build_features(trained.recipe.features), model)
    batch = {0: torch.export.Dim("batch")}
    try:
        program = torch.export.export(model, (example,), dynamic_shapes=(batch,), strict=False)
    # Whatever the tracer says about a model of the user.
    except Exception as error:
        reason = first_line(error)[:80]
        raise ConfigError(f"the model cannot be traced ({reason}); take safetensors") from error
    save = _save_program if form == "torch" else _save_onnx
    return write_atomically(path, lambda part: save(program, part))


def example_inputs(recipe: Recipe) -> Tensor:
    """Return two inputs of zeros, to trace a model with."""
    if recipe.features is not None:
        return torch.zeros(2, *recipe.features.shape)
    if recipe.probe is not None and recipe.read is None:
        generator = torch.Generator().manual_seed(0)
        inputs, _ = recipe.probe(RunConfig()).sample(2, generator)
        if isinstance(inputs, Tensor):
            return inputs
    return torch.zeros(2, *recipe.input_shape)


def _save_program(program: torch.export.ExportedProgram, part: Path) -> None:
    # torch ends the process where it cannot write itself.
    content = io.BytesIO()
    torch.export.save(program, content)
    part.write_bytes(content.getvalue())


def _save_onnx(program: torch.export.ExportedProgram, part: Path) -> None:
    try:
        exported = torch.onnx.export(program, (), dynamo=True, verbose=False)
    except ImportError as error:
        raise ConfigError(
            f"ONNX files need the package {error.name}: pip install onnx onnxscript; or take"
            " --format torch"
        ) from None
    except torch.onnx.OnnxExporterError:
        # Fourier transforms of features are complex, for which ONNX has no form.
        raise ConfigError(
            "ONNX has no form for a part of this model, such as features of images; take --format"
            " torch"
        ) from None
    assert exported is not None
    exported.save(part)
