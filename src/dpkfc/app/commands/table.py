"""Name the commands, and the function behind each; its module is imported when it is called."""

from __future__ import annotations

from cyclopts import App

# The function, what its help says, and examples.
_COMMANDS = {
    "train": (
        "train:train",
        "Train a recipe under a privacy budget and leave a run folder.\n\n"
        "Every setting is a flag or a key of a TOML file; `dpkfc settings` lists them. Others "
        "come from the recipe.",
        "dpkfc train --data patients.csv --schema patients.toml --epsilon 3\n\n"
        "torchrun --nproc-per-node=2 -m dpkfc train --recipe mnist-cnn",
    ),
    "demo": (
        "demos:demo",
        "Train DP-SGD and DP-KFC side by side on real digits under the same budget.",
        "dpkfc demo --epsilon 1",
    ),
    "doctor": (
        "doctor:doctor",
        "Show how each layer of a model is treated.\n\n"
        "The table has the rule, norms, factors and damping, and marks tied, frozen and "
        "uncovered layers.",
        "dpkfc doctor mnist-cnn",
    ),
    "methods": (
        "methods:methods",
        "Show the methods that --method takes.\n\n"
        "The table says what each needs and what a step costs.",
        "dpkfc methods dp-kfc-a",
    ),
    "audit": (
        "audit:audit",
        "Try to disprove the guarantee of a run.\n\n"
        "The audit uses neighbouring batches, noise tests, a distinguishing test and attacks.",
        "dpkfc audit runs/first --kind step --kind membership",
    ),
    "report": (
        "report:report",
        "Write one HTML page of run folders and tuning studies (RUNS).\n\n"
        "It shows accuracy against ε, curves, curvature, privacy cards and commands, and "
        "fetches nothing. Files that cannot be read are named, on the page too.",
        "dpkfc report runs/* --out report.html",
    ),
    "tune": (
        "tune:tune",
        "Tune methods in the same way on a validation split of the training set.\n\n"
        "The command also reports what the search costs in privacy.\n\n"
        "Every method has the same number of trials, matched controls included. A stopped "
        "study continues with the same --out.",
        "dpkfc tune --recipe digits --method dp-kfc-a --method dp-sgd --trials 20",
    ),
    "demo-federated": (
        "demos:demo_federated",
        "Train DP-FedGD, DP-FedSOFIM and federated DP-KFC over ten clients.\n\n"
        "It runs in this process and on Flower's simulation. No telemetry leaves the machine: "
        "Flower's and Ray's are off unless the environment switches them on.",
        "dpkfc demo-federated --rounds 40 --engine here",
    ),
    "card": (
        "card:card",
        "Show page one of a privacy card, after ledger, card and weights were compared.\n\n"
        "A flag fills in a field, and the files of the card are written anew.",
        "dpkfc card runs/first --owner 'Ward 3'",
    ),
    "certify": (
        "certify:certify",
        "Write a certificate of a run: one page to sign, an annex, and what dpkfc-verify reads.",
        "dpkfc certify runs/first --out first.pdf --controller 'City Hospital'",
    ),
    "settings": (
        "train:every_setting",
        "Print every setting that `train` would take, as TOML; without a recipe, every flag.\n\n"
        "The values come from the recipe, its part for the method, a file, and flags. Nothing "
        "is trained. Save the output to a file, change it, and give it to train --config.",
        "dpkfc settings --recipe mnist-cnn > run.toml; dpkfc train --config run.toml",
    ),
    "schema": (
        "schema:write_schema",
        "Write a schema to fill in, from the header of a file alone.",
        "dpkfc schema patients.csv --target readmitted",
    ),
    "try": (
        "try_data:try_data",
        "Ask for what is public of a table, show what a run costs, train and score.\n\n"
        "Proposals come from the header alone. It writes the schema, and prints the commands that"
        " do the same.",
        "dpkfc try patients.csv --target readmitted --epsilon 3",
    ),
    "recipes": (
        "recipes:print_recipes",
        "Show the built-in tasks that --recipe takes.",
        "dpkfc recipes",
    ),
    "predict": (
        "evaluate:predict",
        "Predict the class or number of each record of a file.",
        "dpkfc predict runs/first --data new.csv --out predictions.csv",
    ),
    "evaluate": (
        "evaluate:evaluate_run",
        "Measure accuracy, with recall and precision of each class, or the errors of a number.",
        "dpkfc evaluate runs/first --data test.csv",
    ),
    "export": (
        "evaluate:export_run",
        "Write the model of a run for use without this package, or its entry in the registry.",
        "dpkfc export runs/first --format onnx\n\ndpkfc export runs/first --format registry",
    ),
}


def register(app: App) -> None:
    """Add the commands to the command line."""
    for name, (place, text, example) in _COMMANDS.items():
        app.command(f"dpkfc.app.commands.{place}", name=name, help=text, help_epilogue=example)
