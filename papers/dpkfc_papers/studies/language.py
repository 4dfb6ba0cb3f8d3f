"""Linear heads on means of all layers of a public sentence encoder: accuracy by whitening and ε.

    python -m dpkfc_papers.studies.language --data-dir DATA    # papers/results/language.json
    python -m dpkfc_papers.studies.language --table sst2

C, rate and steps follow from rows, ε and number of features alone (`dpkfc.convex`);
`head_search` compares this rule with a search. Features are kept by `DPKFC_CACHE`, and a row that
is in the file is not run again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from torch import Tensor, nn
from torch.nn import functional

from dpkfc import Session
from dpkfc.app.datasets.sources import Source
from dpkfc.app.datasets.text import IMDB, SST2, Texts, load_texts
from dpkfc.app.pretrained import public_means, sentence_encoder
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.app.recipes.text import remove_test_texts
from dpkfc.convex import MOMENTUM, STEPS, whitened_config, whitened_rate
from dpkfc.features import LayerMeans, TextEncoder
from dpkfc.features.layer_means import fit_whitening, scale_means
from dpkfc_papers.recipes.sentences import AG_NEWS, STACKOVERFLOW
from dpkfc_papers.studies.harness import (
    RESULTS,
    interval,
    machine_of_rows,
    make_parser,
    markdown,
)
from dpkfc_papers.studies.rows import RowFile

PATH = RESULTS / "language.json"
DELTA = 1e-5
EPSILONS = (1.0, 3.0)
SEEDS = 5
# Micro-batches of a step.
ROWS = 8192
# Features of which a logistic regression without privacy is the reference.
NARROW = ("last", "top")
# Norm of the rows that it sees.
LENGTH = 10.0
# Phrases of reviews of another set, as public texts: how many, and their words.
PIECES, WORDS = 4000, 25

PRAISE = (
    "good great excellent wonderful superb brilliant charming moving delightful fresh funny clever"
    " beautiful powerful touching enjoyable engaging masterful fascinating remarkable"
)
BLAME = (
    "bad awful terrible boring dull stupid tedious lifeless mediocre pointless stale clumsy ugly"
    " weak annoying unbearable forgettable shallow disappointing ridiculous"
)
REVIEWS = (BLAME, PRAISE)
NEWS = (
    "world politics government war country president minister election peace troops",
    "sports game team season player coach win match championship league",
    "business company market stocks profit economy bank oil sales shares",
    "science technology software computer internet space research users phone microsoft",
)


@dataclass(frozen=True)
class Task:
    """A set of texts.

    Attributes:
        title: of a table.
        source: of the texts.
        classes: number of labels.
        length: tokens that are read of a text.
        words: public words of each class, for a head that sees no data; none where empty.
        unseen: leave out training texts that occur in the test split.
    """

    title: str
    source: Source
    classes: int
    length: int
    words: tuple[str, ...] = ()
    unseen: bool = False

    def texts(self, data_dir: str) -> Texts:
        """Return both splits."""
        texts = load_texts(self.source, data_dir).check(self.source.name, self.classes)
        return remove_test_texts(texts) if self.unseen else texts


TASKS = {
    "sst2": Task("SST-2", SST2, 2, 64, REVIEWS),
    "ag-news": Task("AG News", AG_NEWS, 4, 64, NEWS, unseen=True),
    "stackoverflow": Task("StackOverflow titles", STACKOVERFLOW, 20, 64),
    "imdb": Task("IMDB", IMDB, 2, 128, REVIEWS),
}
FEATURES = {
    "zipf": "all layers, whitened by Zipf texts",
    "pieces": "all layers, whitened by public texts (pieces of IMDB reviews)",
    "random": "all layers, the same scales along random directions",
    "plain": "all layers, not whitened",
    "last": "last layer alone, whitened by Zipf texts",
    "top": "last two layers, not whitened",
}


def public_pieces(data_dir: str) -> list[str]:
    """Return beginnings of IMDB's training reviews, which stand for public texts."""
    reviews = load_texts(IMDB, data_dir).train[0]
    return [" ".join(review.split()[:WORDS]) for review in reviews[::6][:PIECES]]


def feature_map(
    name: str, task: Task, data_dir: str, encoder: TextEncoder
) -> Callable[[Tensor], Tensor]:
    """Return what maps layer means to the rows of a head."""
    if name == "plain":
        return lambda means: scale_means(means.float(), None, None)
    width = encoder.model.get_input_embeddings().embedding_dim  # type: ignore[operator]
    if name == "top":
        return lambda means: scale_means(means[:, -2 * width :].float(), None, None)
    whitening = LayerMeans(encoder).whitening
    if name == "zipf":
        layers = LayerMeans(encoder)
        return lambda means: layers.whiten(means.float())
    if name == "pieces":
        means = public_means(encoder, public_pieces(data_dir), "public texts")
    else:
        means = public_means(encoder, whitening.texts.draw(whitening.size), "Zipf texts")
    means = means.float()
    if name == "last":
        mean, root = fit_whitening(means[:, -width:], whitening.damping)
        return lambda means: scale_means(means[:, -width:].float(), mean, root)
    mean, root = fit_whitening(means, whitening.damping)
    if name == "random":
        generator = torch.Generator().manual_seed(0)
        basis, _ = torch.linalg.qr(torch.randn(root.shape, generator=generator))
        root = (basis * torch.linalg.eigvalsh(root)) @ basis.T
    return lambda means: scale_means(means.float(), mean, root)


def map_rows(change: Callable[[Tensor], Tensor], means: Tensor) -> Tensor:
    """Return the rows of a head in pieces, which saves memory."""
    return torch.cat([change(piece) for piece in means.split(ROWS)])


def accuracy(head: nn.Module, rows: Tensor, labels: Tensor) -> float:
    """Return the share of right classes in percent."""
    with torch.no_grad():
        found = head(rows).argmax(1)
    return 100 * float((found == labels).float().mean())


def new_head(features: int, classes: int) -> nn.Linear:
    """Return a head that begins at zero."""
    head = nn.Linear(features, classes, bias=False)
    nn.init.zeros_(head.weight)
    return head


def train_private(
    rows: Tensor, labels: Tensor, classes: int, epsilon: float
) -> tuple[nn.Linear, dict[str, float]]:
    """Train by the rule; return the head with averaged weights, and what was planned."""
    features = rows.shape[1]
    config = whitened_config(len(rows), epsilon, DELTA, features, max_physical_batch_size=ROWS)
    plan = config.calibrate(epsilon, DELTA, len(rows))
    head = new_head(features, classes)
    rate = whitened_rate(features)
    optimizer = torch.optim.SGD(head.parameters(), lr=rate, momentum=MOMENTUM)
    with Session(plan, head, optimizer, (rows, labels)) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
        with session.averaged_weights():
            trained = head.weight.detach().clone()
    head.weight.data.copy_(trained)
    return head, {"clip": plan.max_grad_norm, "rate": rate, "noise": plan.noise_multiplier}


def train_without_noise(rows: Tensor, labels: Tensor, classes: int) -> nn.Linear:
    """Train with the same steps, without clip and noise."""
    features = rows.shape[1]
    head = new_head(features, classes)
    optimizer = torch.optim.SGD(head.parameters(), lr=whitened_rate(features), momentum=MOMENTUM)
    total = torch.zeros_like(head.weight)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part, known in zip(rows.split(ROWS), labels.split(ROWS), strict=True):
            (cross_entropy(head, (part, known)).sum() / len(rows)).backward()
        optimizer.step()
        if step >= STEPS // 2:
            total += head.weight.detach() / (STEPS - STEPS // 2)
    head.weight.data.copy_(total)
    return head


def train_logistic(rows: Tensor, labels: Tensor) -> nn.Linear:
    """Return the head of scikit-learn's logistic regression, without privacy.

    Its penalty comes from five folds of the training rows, in which no test row takes part. Rows of
    norm 1 are made ten times longer, which moves the grid of penalties to where they matter.
    """
    search = GridSearchCV(LogisticRegression(max_iter=300), {"C": [0.03, 0.1, 0.3, 1.0]}, cv=5)
    model = search.fit(LENGTH * rows.numpy(), labels.numpy()).best_estimator_
    weight, bias = torch.tensor(LENGTH * model.coef_), torch.tensor(model.intercept_)
    if len(weight) == 1:  # two classes: scikit-learn keeps the weights of the second alone
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    head = nn.Linear(rows.shape[1], len(weight))
    head.load_state_dict({"weight": weight, "bias": bias})
    return head


def word_head(task: Task, change: Callable[[Tensor], Tensor], encoder: TextEncoder) -> nn.Linear:
    """Return the head that public words of each class give: no training row is read."""
    means = [change(encoder.means(words.split())).mean(0) for words in task.words]
    weights = torch.stack(means)
    weights = weights - weights.mean(0)
    head = new_head(weights.shape[1], task.classes)
    head.weight.data.copy_(functional.normalize(weights, dim=1))
    return head


# --------------------------------------------------------------------------------------------------


def whole_sentences(texts: Sequence[str]) -> list[int]:
    """Return for each row the row of a longest one that holds all its words in their order.

    SST-2's training rows are sentences and phrases of them; the file does not say which is whose.
    A phrase of several sentences goes to the longest.
    """
    words = [tuple(text.split()) for text in texts]
    places: dict[tuple[str, ...], list[int]] = {}
    for row, own in enumerate(words):
        places.setdefault(own, []).append(row)
    sentence = [-1] * len(texts)
    for row in sorted(range(len(texts)), key=lambda row: -len(words[row])):
        if sentence[row] >= 0:
            continue
        own = words[row]
        for start in range(len(own)):
            for end in range(start + 1, len(own) + 1):
                for other in places.get(own[start:end], ()):
                    if sentence[other] < 0:
                        sentence[other] = row
        sentence[row] = row
    return sentence


def split_sentences(texts: Sequence[str], count: int = 1500) -> tuple[Tensor, Tensor]:
    """Return rows that train, and whole sentences of six words or more that validate."""
    sentence = torch.tensor(whole_sentences(texts))
    whole = [row for row in sentence.unique().tolist() if len(texts[row].split()) >= 6]
    chosen = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1))[:count]
    validation = torch.tensor(whole)[chosen]
    training = (~torch.isin(sentence, validation)).nonzero()[:, 0]
    return training, validation


def make_head(
    part: str, task: Task, change: Callable[[Tensor], Tensor], rows: Tensor, labels: Tensor
) -> tuple[nn.Linear, dict[str, float]]:
    """Return the head that a part of a key names, and what was planned.

    Args:
        part: "ε/seed" of a private head, or "none", "logistic" and "words" of the references.
        task: of the rows.
        change: maps layer means to rows.
        rows: that train.
        labels: of them.
    """
    if part == "none":
        return train_without_noise(rows, labels, task.classes), {}
    if part == "logistic":
        return train_logistic(rows, labels), {}
    if part == "words":
        return word_head(task, change, sentence_encoder(task.length)), {}
    epsilon = float(part.split("/")[0])
    head, plan = train_private(rows, labels, task.classes, epsilon)
    return head, {**plan, "epsilon": epsilon}


def run(name: str, data_dir: str, file: RowFile, only: Sequence[str]) -> None:
    """Run what is missing of a task: first the features of the recipe, then controls."""
    task = TASKS[name]
    texts = task.texts(data_dir)
    encoder = sentence_encoder(task.length)
    begun = time.monotonic()
    train_means = public_means(encoder, texts.train[0], task.title)
    test_means = public_means(encoder, texts.test[0], task.title)
    encoding = time.monotonic() - begun
    train_labels, test_labels = torch.tensor(texts.train[1]), torch.tensor(texts.test[1])
    for features in only or FEATURES:
        parts = [f"{epsilon:g}/{seed}" for seed in range(SEEDS) for epsilon in EPSILONS]
        parts.append("none")
        if features in NARROW:
            parts.append("logistic")
        if task.words:
            parts.append("words")
        keys = {f"{name}/{features}/{part}": part for part in parts}
        if keys.keys() <= file.rows.keys():
            continue
        change = feature_map(features, task, data_dir, encoder)
        rows, test = map_rows(change, train_means), map_rows(change, test_means)
        facts = {
            "task": name,
            "features": features,
            "rows": len(rows),
            "encoding_seconds": encoding,
        }
        make = functools.partial(
            make_head, task=task, change=change, rows=rows, labels=train_labels
        )

        def judge(part: str, make=make, facts=facts, test=test) -> dict[str, Any]:
            begun = time.monotonic()
            head, plan = make(part)
            seconds = time.monotonic() - begun
            return {
                **facts,
                **plan,
                "seconds": seconds,
                "accuracy": accuracy(head, test, test_labels),
            }

        for key, part in keys.items():
            file.fill(key, functools.partial(judge, part))


def _values(rows: dict[str, Any], start: str) -> list[float]:
    return [row["accuracy"] for key, row in rows.items() if key.startswith(start)]


def table(name: str) -> str:
    """Return the table of a task: features by ε, and the head of public words."""
    rows = RowFile(PATH).rows
    of = {key: row for key, row in rows.items() if key.startswith(f"{name}/")}
    if not of:
        return ""
    lines = []
    for features, title in FEATURES.items():
        start = f"{name}/{features}/"
        if not _values(of, start):
            continue
        cells = [title]
        for part in ("1/", "3/", "none", "logistic", "words"):
            values = _values(of, start + part)
            cells.append(_cell(values))
        seconds = [row["seconds"] for key, row in of.items() if key.startswith(f"{start}1/")]
        cells.append(f"{sum(seconds) / len(seconds):.0f}" if seconds else "–")
        lines.append(cells)
    head = ["test %", "ε = 1", "ε = 3", "no noise", "logistic, not private", "public words"]
    head.append("seconds of a head")
    return f"{markdown(head, lines)}\n\n{machine_of_rows(list(of.values()))}"


def _cell(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "–"
    text = interval(values)
    return text if len(values) == SEEDS else f"{text} ({len(values)})"


def main() -> int:
    """Run, or print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--task", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--features", nargs="*", default=[], choices=list(FEATURES))
    parser.add_argument("--table", default="", choices=["", *TASKS])
    chosen = parser.parse_args()
    if chosen.table:
        print(table(chosen.table))
        return 0
    torch.set_num_threads(1)
    file = RowFile(PATH)
    for name in chosen.task:
        run(name, chosen.data_dir, file, chosen.features)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
