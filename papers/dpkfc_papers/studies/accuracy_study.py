"""Arms tuned alike at ε = 1 on a validation split, then judged on the test set: MNIST and
Fashion-MNIST, IMDB, an MLP, or titles of StackOverflow.

    python -m dpkfc_papers.studies.accuracy_study --data-dir DIR --out runs/acc  # resumable
    python -m dpkfc_papers.studies.accuracy_study --study imdb --data-dir DIR
    python -m dpkfc_papers.studies.accuracy_study --study mlp --data-dir DIR
    python -m dpkfc_papers.studies.accuracy_study --study sentences --trials 12 --data-dir DIR
    python -m dpkfc_papers.studies.accuracy_study --table  # the Markdown table

Every cell is kept by the hash of its settings in papers/results/accuracy/STUDY.json. The order
is: twenty trials an arm in rounds of five, three seeds at ε = 1, the other data set, then the other
ε with the settings tuned at ε = 1. Noise is secure.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dpkfc_papers.studies import harness

RESULTS = harness.RESULTS / "accuracy"
STUDIES = {
    "cnn": ("mnist-cnn", "fashion-mnist-cnn"),
    "imdb": ("imdb-logistic",),
    "mlp": ("mnist-mlp",),
    "sentences": ("stackoverflow-head",),
}


def study(name: str, trials: int):
    from dpkfc_papers.accuracy import MLP, TEXT, AccuracyStudy

    settings = {
        "cnn": {},
        "imdb": {"epsilons": (1.0, 0.5, 2.8, 8.0), "common": dict(TEXT)},
        "mlp": {"epsilons": (1.0,), "common": dict(MLP)},
        "sentences": {
            "epsilons": (1.0, 0.5, 2.0, 3.0, 5.0, 8.0, 10.0),
            "validation": 2000,
            "common": {"delta": 1e-5, "max_rank": 64},
        },
    }
    return AccuracyStudy(recipes=STUDIES[name], trials=trials, **settings[name])


def table(path: Path) -> str:
    from dpkfc_papers import accuracy
    from dpkfc_papers.store import Store

    rows = list(Store(path))
    done = dict.fromkeys(row["run"]["recipe"] for row in rows)
    return (
        "\n\n".join(f"**{recipe}**\n\n{accuracy.table(rows, recipe)}" for recipe in done)
        or "nothing has been run yet"
    )


def main() -> int:
    parser = harness.cells_parser(__doc__)
    parser.add_argument("--study", choices=list(STUDIES), default="cnn")
    parser.add_argument("--trials", type=int, default=20)
    arguments = parser.parse_args()
    path = arguments.results or RESULTS / f"{arguments.study}.json"
    if arguments.table:
        print(table(path))
        return 0
    out = arguments.out or Path("runs/accuracy")
    chosen = study(arguments.study, arguments.trials)
    chosen.check(arguments.data_dir)
    code = harness.run_cells(
        lambda store: chosen.sources(store, out / "trials.log"), path, out, arguments
    )
    if code:
        return code
    print(table(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
