"""Commands for own data and finished models: schema, recipes, predict, evaluate and export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpkfc.terminal import make_table, open_console

_Run = Annotated[Path, typer.Argument(help="Folder of a finished run.")]


def write_schema(
    data: Annotated[Path, typer.Argument(help="A table, a folder of images, or a JSONL file.")],
    *,
    target: Annotated[str, typer.Option(help="Column (or key) that is learned.")] = "",
    text: Annotated[str, typer.Option(help="Key of the text in a JSONL file.")] = "text",
    label_file: Annotated[
        Path | None, typer.Option(help="Table of image files and their labels.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file; left out: the terminal.")] = None,
) -> None:
    """Write a schema to fill in, from the header of a file alone.

    Example: dpkfc schema patients.csv --target readmitted --out patients.toml
    """
    from dpkfc.app.owndata.recipes import empty_schema
    from dpkfc.app.run_folder import RunFolderError, placed

    content = empty_schema(data, target, text, label_file)
    if out is None:
        open_console().out(content, end="", highlight=False)
        return
    if out.exists():
        raise RunFolderError(f"{out} exists and may be filled in; choose another name with --out")
    placed(out, lambda part: part.write_text(content, "utf-8"))
    open_console().print(f"schema to fill in: {out}", soft_wrap=True)


def print_recipes() -> None:
    """Show the built-in tasks that --recipe takes."""
    from dpkfc.app.recipes.catalogue import RECIPES
    from dpkfc.app.settings import RunConfig

    table = make_table("recipe", "data", "input", "classes", "method")
    for recipe in RECIPES.values():
        shape = " × ".join(map(str, recipe.input_shape))
        defaults = recipe.defaults.get("run", {})
        method = defaults.get("method", RunConfig.method)
        classes = str(recipe.num_classes)
        table.add_row(recipe.name, recipe.title, shape, classes, method)
    console = open_console()
    console.print(table)
    console.print("Own data take --data FILE or --task module:function in the place of --recipe.")


def predict(
    run: _Run,
    *,
    data: Annotated[Path, typer.Option(help="A file of the form that was trained on.")],
    out: Annotated[Path, typer.Option(help="CSV file of what is predicted.")] = Path(
        "predictions.csv"
    ),
) -> None:
    """Predict the class or number of each record of a file.

    Example: dpkfc predict runs/first --data new.csv --out predictions.csv
    """
    from dpkfc.app.owndata.predictions import load_run, read_records, write_predictions
    from dpkfc.app.owndata.records import describe_figures

    trained = load_run(run)
    records = read_records(trained, data, run)
    count = write_predictions(trained, records, out)
    open_console().print(f"{count:,} predictions: {out}", soft_wrap=True)
    open_console().print(describe_figures(records.figures), soft_wrap=True, highlight=False)


def evaluate_run(
    run: _Run,
    *,
    data: Annotated[
        Path | None, typer.Option(help="A labelled file; left out: the test split of the run.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Anyone may see the file and figures of it.")
    ] = False,
) -> None:
    """Measure accuracy, with recall and precision of each class, or the errors of a number.

    Example: dpkfc evaluate runs/first --data test.csv
    """
    from dpkfc.app.owndata.predictions import (
        evaluate_examples,
        evaluate_records,
        load_run,
        read_records,
    )

    trained = load_run(run)
    if data is not None:
        records = read_records(trained, data, run)
        found = evaluate_records(trained, records)
    else:
        split = trained.recipe.data(trained.config)
        found = evaluate_examples(trained, split.test)
    console = open_console()
    judged = found.judged
    named = trained.recipe.task.figures(judged.accuracy, judged.loss)
    figures = ", ".join(f"{name} {_number(value)}" for name, value in named.items())
    left_out = f"; {found.unlabelled:,} without a known target left out" if found.unlabelled else ""
    console.print(f"{figures}, {found.examples:,} records{left_out}", highlight=False)
    if found.classes:
        numbers = ("records", "recall", "precision")
        table = make_table("class", *numbers, right=numbers)
        for name, count, recall, precision in found.classes:
            shares = _percent(recall), _percent(precision)
            table.add_row(name, f"{count:,}", *shares)
        console.print(table)
    if not public:
        console.print(
            "PRIVATE: ε does not protect these figures from the records they are computed on;"
            " --public says that anyone may see the file.",
            highlight=False,
        )


def _number(value: float | None) -> str:
    """Return four places of a number below ten, five digits of a greater one."""
    if value is None:
        return "–"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.5g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def export_run(
    run: _Run,
    *,
    form: Annotated[
        str, typer.Option("--format", help="torch (a program), safetensors (weights) or onnx.")
    ] = "torch",
    out: Annotated[Path | None, typer.Option(help="The file; left out: in RUN/export.")] = None,
) -> None:
    """Write the model of a run for use without this package.

    Example: dpkfc export runs/first --format onnx
    """
    from dpkfc.app.owndata.predictions import export_model, load_run

    trained = load_run(run)
    path = export_model(trained, run, form, out)
    console = open_console()
    console.print(f"model: {path}", soft_wrap=True)
    for name in ("classes", "target"):
        if name in trained.recipe.constants:
            meaning, _ = trained.recipe.constants[name]
            console.print(f"{name}: {meaning}", soft_wrap=True, markup=False, highlight=False)
