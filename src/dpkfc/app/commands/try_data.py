"""Define `dpkfc try`: from a table to a schema, a model and its scores, by questions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from dpkfc.app.owndata.proposals import kind_of_data
from dpkfc.app.owndata.schema import read_schema
from dpkfc.app.owndata.schema_file import schema_toml
from dpkfc.app.run_folder import RunFolderError, write_text
from dpkfc.app.toml import ConfigError
from dpkfc.terminal import open_console, print_line


def try_data(
    data: Path,
    /,
    *,
    target: str = "",
    epsilon: float = 3.0,
    schema: Path | None = None,
    answers: Path | None = None,
    yes: bool = False,
    out: str = "",
) -> None:
    """Ask for a schema, show what a run costs, train, and score.

    Args:
        data: A table.
        target: Column that is learned.
        epsilon: Target ε of the run.
        schema: A schema that is filled in; left out: questions, and a new file.
        answers: File of answers, one a line, instead of a terminal.
        yes: Train without a last question.
        out: Run folder; else a new one in runs/.
    """
    from dpkfc.app import train as training
    from dpkfc.app.commands.train import announce
    from dpkfc.app.owndata.display import schema_table
    from dpkfc.app.owndata.questions import Answers, ask_schema
    from dpkfc.app.preview import preview
    from dpkfc.app.recipes.catalogue import configure

    if kind_of_data(data) != "own-table":
        raise ConfigError(f"{data}: dpkfc try takes a table; see dpkfc schema for other data")
    person = None if schema is not None and yes else Answers.choose(answers)
    if schema is None:
        assert person is not None
        schema = _new_schema(data)
        if not target:
            raise ConfigError("which column is learned? give --target NAME")
        found = ask_schema(data, target, person)
        write_text(schema, schema_toml(found, f"The public schema of {data.name}, as answered."))
        print_line(f"schema: {schema}")
    target = target or read_schema(schema, may_be_open=True).target
    choices: dict[str, Any] = {"data": str(data), "schema": str(schema), "epsilon": epsilon}
    if target:
        choices["target"] = target
    if read_schema(schema, target, may_be_open=True).is_open:
        choices["bounds"] = "private"
    if out:
        choices["out"] = out
    config, recipe = configure(choices)
    console = open_console()
    console.print(schema_table(recipe.columns))
    preview(config, console, recipe, f"so far no budget is spent; training spends ε = {epsilon:g}")
    if not yes and person is not None and not person.ask("train now? yes or no", _is_yes, "yes"):
        print_line(f"nothing was trained; the schema is {schema}")
        return
    result = training.run(config, console, recipe=recipe)
    announce(result)
    flags = {**choices, "out": str(result.folder)}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    print_line("the same by three commands, the first with its file filled in:")
    make = ["schema", str(data), "--target", target, "--out", str(schema)]
    for command in (make, ["train", *words], ["evaluate", str(result.folder)]):
        print_line(f"  dpkfc {shlex.join(command)}")


def _new_schema(data: Path) -> Path:
    """Return the name of a schema that does not exist yet.

    Raises:
        RunFolderError: there is one.
    """
    path = Path(f"{data.name.split('.')[0]}.toml")
    if path.exists():
        raise RunFolderError(f"{path} exists: give --schema {path}, or move it away")
    return path


def _is_yes(answer: str) -> bool:
    if answer not in ("yes", "y", "no", "n"):
        raise ConfigError(f"answer yes or no, got {answer!r:.20}")
    return answer.startswith("y")
