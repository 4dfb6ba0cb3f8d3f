"""Define `dpkfc predict`, `evaluate` and `export`: what a finished model is used for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dpkfc.app.commands.score_tables import print_scores
from dpkfc.app.registry import export_entry
from dpkfc.app.run_folder import check_out
from dpkfc.app.scores import digits
from dpkfc.app.toml import ConfigError
from dpkfc.terminal import open_console, print_line


def predict(
    run: Path,
    /,
    *,
    data: Path,
    out: Path = Path("predictions.csv"),
) -> None:
    """Predict the class or number of each record of a file.

    Args:
        run: Folder of a finished run.
        data: A file of the form that was trained on.
        out: CSV file of what is predicted.
    """
    from dpkfc.app.owndata.display import print_shares
    from dpkfc.app.owndata.predictions import load_run, read_records, write_predictions

    if out.suffix.lower() != ".csv":
        raise ConfigError(f"predictions are CSV, got --out {out}; give --out FILE.csv")
    check_out(out, b"" if out.resolve() == data.resolve() else b"record,")
    trained = load_run(run)
    records = read_records(trained, data, run)
    count = write_predictions(trained, records, out)
    console = open_console()
    console.print(f"{count:,} predictions: {out}", soft_wrap=True)
    print_shares(console, records.figures)


def evaluate_run(
    run: Path,
    /,
    *,
    data: Path | None = None,
    label_file: Path | None = None,
    public: bool = False,
) -> None:
    """Measure accuracy, with recall and precision of each class, or the errors of a number.

    Args:
        run: Folder of a finished run.
        data: A labelled file; left out: the test split of the run.
        label_file: Table of image files and labels.
        public: Anyone may see the file and figures of it.
    """
    from dpkfc.app.owndata.predictions import (
        evaluate_examples,
        evaluate_records,
        load_run,
        read_records,
    )

    trained = load_run(run)
    if data or label_file:
        folder = data or Path(trained.config.data.data)
        records = read_records(trained, folder, run, label_file)
        evaluation = evaluate_records(trained, records)
    else:
        split = trained.recipe.data(trained.config)
        evaluation = evaluate_examples(trained, split.test)
    console = open_console()
    judged = evaluation.judged
    named = trained.recipe.task.figures(judged.accuracy, judged.loss)
    figures = [f"{name} {digits(value)}" for name, value in named.items()]
    line = f"{', '.join(figures)}, {evaluation.examples:,} records"
    if evaluation.unlabelled:
        line += f"; {evaluation.unlabelled:,} without a known target left out"
    console.print(line, highlight=False)
    if evaluation.scores is not None:
        print_scores(console, evaluation.scores, trained.recipe.classes)
    if not public:
        console.print(
            "PRIVATE: ε does not protect these figures from the records they are computed on;"
            " --public says that anyone may see the file.",
            highlight=False,
        )


def export_run(
    run: Path,
    /,
    *,
    form: Annotated[str, Parameter(name="--format")] = "torch",
    out: Path | None = None,
    sector: str = "",
    actors: str = "",
    justification: str = "",
) -> None:
    """Write the model of a run for use without this package, or its entry in the public registry.

    Args:
        run: Folder of a finished run.
        form: torch (a program), safetensors (weights), onnx, or registry (a YAML file).
        out: The file; left out: in RUN/export, or RUN for the registry.
        sector: For the registry: Healthcare, Technology, Education, Government, Energy or Finance.
        actors: For the registry: who may see the model, and whom people have to trust.
        justification: For the registry: why these settings were chosen.
    """
    if out is not None:
        check_out(out)
    stated = {"sector": sector, "actors": actors, "justification": justification}
    given = {name: value for name, value in stated.items() if value}
    if form == "registry":
        path, missing = export_entry(run, out, given)
        print_line(f"entry: {path}")
        for line in missing:
            print_line(f"missing: {line}")
        return
    if given:
        raise ValueError(f"--{next(iter(given))} is for --format registry alone")
    from dpkfc.app.owndata.predictions import export_model, load_run

    trained = load_run(run)
    path = export_model(trained, run, form, out)
    console = open_console()
    console.print(f"model: {path}", soft_wrap=True)
    for name in ("classes", "target"):
        if name in trained.recipe.constants:
            meaning, _ = trained.recipe.constants[name]
            print_line(f"{name}: {meaning}")
    schema = trained.recipe.public_schema
    if schema is not None:
        columns = [(name, column.width) for name, column in schema.columns.items()]
        widths = ", ".join(f"{name} {width}" for name, width in columns if width)
        print_line(f"numbers of a row: {widths}; the last of a column is 1 for a missing value")
