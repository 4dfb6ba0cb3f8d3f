"""Fine-tuning a public sentence encoder behind a private head, on SST-2.

    python -m dpkfc_papers.studies.fine_tuning --data-dir DATA    # papers/results/fine_tuning.json
    python -m dpkfc_papers.studies.fine_tuning --table

A head on means of all layers is trained first, at half of ε (`dpkfc_papers.studies.language`). It
is frozen, and a part of the last one or two blocks trains below it. The noise of these steps is
calibrated beside the releases of the head, so the ε of a row counts both, by PLD. States below the
trained blocks are computed once. Rates are chosen at ε = 3 on sentences whose phrases do not train;
C is the median norm of gradients of public texts (pieces of IMDB reviews, with their labels).
A row that is in the file is not run again.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc import KFAC, DiSK, PrivacyConfig, PublicData, Session
from dpkfc.app.datasets.text import IMDB, load_texts
from dpkfc.app.pretrained import public_means, sentence_encoder
from dpkfc.convex import whitened_config
from dpkfc.features import LayerMeans, TextEncoder
from dpkfc.features.cache import cached_tensors
from dpkfc.features.layer_means import scale_means
from dpkfc.privacy.accounting import EpsilonCurve
from dpkfc.privacy.calibration import calibrate_noise_multiplier
from dpkfc_papers.minilm import minilm_classifier
from dpkfc_papers.studies.harness import RESULTS, markdown, seeds_cell
from dpkfc_papers.studies.language import (
    DELTA,
    TASKS,
    WORDS,
    accuracy,
    feature_map,
    map_rows,
    split_sentences,
    train_private,
)
from dpkfc_papers.studies.rows import (
    RowFile,
    Stopwatch,
    median_gradient_norm,
    run_rows,
)

PATH = RESULTS / "fine_tuning.json"
# Heads, each with the ε that it has cost.
HEADS = Path("runs/fine-tuning")
TASK = TASKS["sst2"]
EPSILONS = (3.0, 1.0, 8.0)
SEEDS = 3
# The part of ε that the head takes, and the ε at which rates are chosen.
SHARE, TUNED_AT = 0.5, 3.0
# Phrases that train, sentences that validate, public pieces for C, Zipf texts for curvature.
TRAIN, VALIDATION, PUBLIC, DRAWN = 20_000, 500, 48, 256
BATCH, STEPS, ROWS = 512, 8, 128
RANK = 4
# Median difference of the two logits of public texts, to which the head is scaled.
MARGIN = 2.0


@dataclass(frozen=True)
class Arm:
    """What trains, and how.

    Attributes:
        title: in the table.
        blocks: how many of the last blocks are above the cached states.
        part: "biases", "lora" or "all" of these blocks.
        method: "adam", "sgd", "disk", or "natural" for DP-KFC.
        rates: tried on the validation sentences; of SGD over C.
        like: the arm whose rate is taken where `rates` is empty.
        steps: how many; an arm with more than `STEPS` is also run without noise.
    """

    title: str
    blocks: int
    part: str
    method: str
    rates: tuple[float, ...] = ()
    like: str = ""
    steps: int = STEPS


ARMS = {
    "lora-1": Arm("LoRA on the last block, DP-Adam", 1, "lora", "adam", (4e-3, 1.6e-2)),
    "block-1": Arm("all of the last block, DP-Adam", 1, "all", "adam", (2e-4, 8e-4)),
    "block-1-kfc": Arm("all of the last block, DP-KFC natural", 1, "all", "natural", (0.05, 0.2)),
    "biases": Arm("biases of the last two blocks, DP-Adam", 2, "biases", "adam", like="lora-1"),
    "lora-2": Arm("LoRA on the last two blocks, DP-Adam", 2, "lora", "adam", like="lora-1"),
    "block-2": Arm("all of the last two blocks, DP-Adam", 2, "all", "adam", like="block-1"),
    "lora-2-long": Arm(
        "LoRA on the last two blocks, one epoch", 2, "lora", "adam", (1e-3, 4e-3), steps=40
    ),
    "block-1-sgd": Arm("all of the last block, DP-SGD", 1, "all", "sgd", like="block-1-kfc"),
    "block-1-disk": Arm("all of the last block, DiSK", 1, "all", "disk", like="block-1"),
}

# --------------------------------------------------------------------------------------------------
# Texts as hidden states below the blocks that train.


@dataclass(frozen=True)
class Rows:
    """Texts in the order of their lengths, so that a micro-batch has hardly any fill.

    Attributes:
        states: of all tokens, one text after the other, bfloat16 `[tokens, width]`.
        ends: where each text ends in them, `[N]`.
        fixed: what the layers below give to the whitened means, float16 `[N, d]`.
        labels: `[N]`.
    """

    states: Tensor
    ends: Tensor
    fixed: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        start = int(self.ends[row - 1]) if row else 0
        return self.states[start : int(self.ends[row])], self.fixed[row], self.labels[row]


def collate(rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Return states `[n, T, width]`, mask `[n, T]`, fixed parts and labels; 4 divides T."""
    states, fixed, labels = zip(*rows, strict=True)
    longest = max(map(len, states))
    length = 4 * math.ceil(longest / 4)
    padded = torch.zeros(len(rows), length, states[0].shape[1])
    mask = torch.zeros(len(rows), length)
    for row, own in enumerate(states):
        padded[row, : len(own)] = own.float()
        mask[row, : len(own)] = 1
    return padded, mask, torch.stack(fixed).float(), torch.stack(labels)


@torch.no_grad()
def lower_states(encoder: TextEncoder, texts: Sequence[str], layers: Sequence[int]) -> Any:
    """Return hidden states of some layers, text after text `[tokens, width]`, and lengths."""
    ids = encoder.tokens(texts)
    lengths = [len(own) for own in ids]
    found: dict[int, list[Tensor]] = {layer: [torch.empty(0)] * len(ids) for layer in layers}
    order = sorted(range(len(ids)), key=lengths.__getitem__)
    for at in range(0, len(order), ROWS):
        part = order[at : at + ROWS]
        shape = (len(part), lengths[part[-1]])
        tokens = torch.zeros(shape, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        for place, row in enumerate(part):
            tokens[place, : lengths[row]] = torch.tensor(ids[row])
            mask[place, : lengths[row]] = 1
        output = encoder.model(input_ids=tokens, attention_mask=mask, output_hidden_states=True)
        for layer in layers:
            hidden = output.hidden_states[layer]
            for place, row in enumerate(part):
                found[layer][row] = hidden[place, : lengths[row]].bfloat16()
    states = {f"layer{layer}": torch.cat(parts) for layer, parts in found.items()}
    return {**states, "lengths": torch.tensor(lengths)}


def cached_states(encoder: TextEncoder, texts: Sequence[str], layer: int) -> tuple[Tensor, Tensor]:
    """Return states of a public set's texts below some blocks by the cache, and their lengths."""
    digest, states, lengths = encoder.digest, [], []
    count = len(encoder_blocks())
    for at in range(0, len(texts), 8192):
        some = texts[at : at + 8192]
        settings = {
            "encoder": digest,
            "length": encoder.length,
            "texts": hashlib.sha256(json.dumps(list(some)).encode()).hexdigest(),
        }
        made = cached_tensors(
            "states",
            settings,
            [inspect.getfile(TextEncoder)],
            functools.partial(lower_states, encoder, some, (count - 2, count - 1)),
        )
        states.append(made[f"layer{layer}"])
        lengths.append(made["lengths"])
    return torch.cat(states), torch.cat(lengths)


def make_rows(
    encoder: TextEncoder, texts: Sequence[str], labels: Sequence[int], layer: int
) -> Rows:
    """Return texts for blocks above a layer, in the order of their lengths.

    Args:
        encoder: of the texts.
        texts: of a public data set.
        labels: of the texts.
        layer: whose states the trained blocks read; 4 for two blocks, 5 for one.
    """
    states, lengths = cached_states(encoder, texts, layer)
    order = lengths.argsort(stable=True)
    ends = lengths.cumsum(0)
    parts = states.split(lengths.tolist())
    states = torch.cat([parts[row] for row in order.tolist()])
    mean, root = whitening(encoder)
    width = (layer + 1) * states.shape[1]
    means = public_means(encoder, texts, TASK.title)
    fixed = []
    for piece in means[order].split(8192):
        known = (piece[:, :width].float() - mean[:width]) @ root[:width]
        fixed.append((known - mean[width:] @ root[width:]).half())
    del means, ends
    return Rows(states, lengths[order].cumsum(0), torch.cat(fixed), torch.tensor(labels)[order])


def whitening(encoder: TextEncoder) -> tuple[Tensor, Tensor]:
    """Return mean and root of the whitening by Zipf texts."""
    layers = LayerMeans(encoder)
    mean, root = layers._mean, layers._root
    if mean is None or root is None:
        raise ValueError("the layer means are not whitened; take Whitening(size=4000)")
    return mean, root


class Upper(nn.Module):
    """The last blocks of the encoder, whitened means of all layers, and a frozen head.

    Args:
        blocks: of the encoder.
        root: rows of the whitening's root for means of these blocks.
        head: weight `[classes, d + 1]`.
    """

    def __init__(self, blocks: nn.ModuleList, root: Tensor, head: Tensor) -> None:
        super().__init__()
        self.blocks = blocks
        self.register_buffer("root", root)
        self.head = nn.Linear(head.shape[1], len(head), bias=False)
        self.head.weight.data.copy_(head)
        self.head.requires_grad_(False)

    def forward(self, states: Tensor, attention_mask: Tensor, fixed: Tensor) -> Tensor:
        """Return logits of states `[N, T, width]`, a mask `[N, T]` and fixed parts `[N, d]`."""
        bias = (attention_mask[:, None, None, :] - 1) * 1e4
        weights = attention_mask.unsqueeze(-1)
        count = attention_mask.sum(1, keepdim=True)
        means = []
        for block in self.blocks:
            states = block(states, attention_mask=bias)
            means.append((states * weights).sum(1) / count)
        features = fixed + torch.cat(means, 1) @ self.root
        return self.head(scale_means(features, None, None))


@functools.cache
def encoder_blocks() -> nn.ModuleList:
    """Return the blocks of MiniLM-L6 in float32."""
    blocks = minilm_classifier(trained_blocks=0).get_submodule("encoder.encoder.layer")
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def make_model(encoder: TextEncoder, arm: Arm, head: Tensor) -> Upper:
    """Return the model of an arm, of which only its part trains."""
    blocks = copy.deepcopy(encoder_blocks())
    _, root = whitening(encoder)
    width = arm.blocks * root.shape[0] // (len(blocks) + 1)
    model = Upper(blocks[len(blocks) - arm.blocks :], root[len(root) - width :], head).eval()
    if arm.part == "lora":
        from peft import LoraConfig, inject_adapter_in_model

        adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["query", "value"])
        inject_adapter_in_model(adapters, model.blocks)
    else:
        for name, parameter in model.blocks.named_parameters():
            parameter.requires_grad_(arm.part == "all" or name.endswith("bias"))
    return model


def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return a cross-entropy an example."""
    *inputs, labels = batch
    return functional.cross_entropy(model(*inputs), labels, reduction="none")


@torch.no_grad()
def judge(model: nn.Module, rows: Rows) -> tuple[float, float]:
    """Return accuracy in percent and mean loss."""
    right, losses = 0, 0.0
    for at in range(0, len(rows), ROWS):
        *inputs, labels = collate([rows[row] for row in range(at, min(at + ROWS, len(rows)))])
        logits = model(*inputs)
        right += int((logits.argmax(1) == labels).sum())
        losses += float(functional.cross_entropy(logits, labels, reduction="sum"))
    return 100 * right / len(rows), losses / len(rows)


@torch.no_grad()
def scale_head(model: Upper, rows: Rows) -> None:
    """Scale the head so that public texts have the median margin `MARGIN`.

    The head's own logits are so small that right rows would be pushed as hard as wrong ones.
    """
    *inputs, _ = collate([rows[row] for row in range(len(rows))])
    logits = model(*inputs)
    model.head.weight.mul_(MARGIN / (logits[:, 1] - logits[:, 0]).abs().median())


def public_clip(model: nn.Module, rows: Rows) -> float:
    """Return the median norm of gradients of public rows."""
    batches = [collate([rows[row]]) for row in range(len(rows))]
    return median_gradient_norm(model, loss_fn, batches)


# --------------------------------------------------------------------------------------------------
# Runs.


class Study:
    """Texts and heads that runs share.

    Args:
        data_dir: of SST-2 and IMDB.
    """

    def __init__(self, data_dir: str) -> None:
        self.encoder = sentence_encoder(TASK.length)
        self._texts = TASK.texts(data_dir)
        self._reviews = load_texts(IMDB, data_dir).train
        training, validation = split_sentences(self._texts.train[0])
        generator = torch.Generator().manual_seed(0)
        self._training = training[torch.randperm(len(training), generator=generator)[:TRAIN]]
        self._validation = validation[:VALIDATION]

    def _select_texts(self, rows: Tensor) -> tuple[list[str], list[int]]:
        texts, labels = self._texts.train
        return [texts[row] for row in rows.tolist()], [labels[row] for row in rows.tolist()]

    @functools.cache  # noqa: B019 - one study lives as long as the process
    def rows(self, name: str, layer: int) -> Rows:
        """Return a set of texts above a layer: "train", "validation", "test" or "public"."""
        if name == "train":
            texts, labels = self._select_texts(self._training)
        elif name == "validation":
            texts, labels = self._select_texts(self._validation)
        elif name == "test":
            texts, labels = self._texts.test
        else:
            reviews, signs = self._reviews
            every = len(reviews) // PUBLIC
            words = [text.split()[:WORDS] for text in reviews[::every][:PUBLIC]]
            texts = [" ".join(own) for own in words]
            labels = signs[::every][:PUBLIC]
        return make_rows(self.encoder, texts, labels, layer)

    @functools.cache  # noqa: B019
    def features(self, name: str) -> tuple[Tensor, Tensor]:
        """Return rows of the head, and labels."""
        texts, labels = self._texts.test if name == "test" else self._select_texts(self._training)
        change = feature_map("zipf", TASK, "", self.encoder)
        means = public_means(self.encoder, texts, TASK.title)
        return map_rows(change, means), torch.tensor(labels)

    def head(self, epsilon: float, seed: int) -> dict[str, Any]:
        """Return the weight of a private head, its noise multiplier, accuracy and seconds."""
        path = HEADS / f"head-{epsilon:g}-{seed}.pt"
        if not path.exists():
            rows, labels = self.features("train")
            watch = Stopwatch()
            head, plan = train_private(rows, labels, TASK.classes, epsilon)
            made = {
                "weight": head.weight.detach(),
                **watch.read(),
                "accuracy": accuracy(head, *self.features("test")),
                **plan,
            }
            HEADS.mkdir(parents=True, exist_ok=True)
            torch.save(made, path)
        return torch.load(path, weights_only=True)

    def probe(self, layer: int) -> PublicData:
        """Return Zipf texts as inputs of the blocks above a layer, for curvature."""
        texts = LayerMeans(self.encoder).whitening.texts.draw(DRAWN, 1)
        rows = make_rows(self.encoder, texts, [0] * DRAWN, layer)
        states, mask, fixed, _ = collate([rows[row] for row in range(DRAWN)])
        inputs = {"states": states, "attention_mask": mask, "fixed": fixed}
        return PublicData(
            inputs, provenance="texts drawn by Zipf's law, through the public encoder"
        )


@functools.cache
def upper_noise(epsilon: float, head_epsilon: float, count: int) -> tuple[float, float]:
    """Return the noise multiplier of the blocks' steps beside a head, and ε of both."""
    head = whitened_config(TRAIN, head_epsilon, DELTA, 2).calibrate(head_epsilon, DELTA, TRAIN)
    also = ((head.event, head.steps),)
    steps = PrivacyConfig(expected_batch_size=BATCH, steps=count).with_noise(1.0, DELTA, TRAIN)
    noise = calibrate_noise_multiplier(epsilon, DELTA, steps.sampler.event, count, also=also)
    event = steps.sampler.event(noise)
    return noise, EpsilonCurve(event, DELTA, also=also).epsilon(count)


def execute(study: Study, name: str, epsilon: float, rate: float, seed: int, on: str) -> Any:
    """Train an arm behind a head of the same seed, and return the row of the results."""
    arm = ARMS[name]
    layer = len(encoder_blocks()) - arm.blocks
    is_private = math.isfinite(epsilon)
    head = study.head(SHARE * (epsilon if is_private else TUNED_AT), seed)
    watch = Stopwatch()
    model = make_model(study.encoder, arm, head["weight"])
    trained = [p for p in model.parameters() if p.requires_grad]
    scale_head(model, study.rows("public", layer))
    clip = public_clip(model, study.rows("public", layer))
    noise, spent = 0.0, math.inf
    if is_private:
        noise, spent = upper_noise(epsilon, SHARE * epsilon, arm.steps)
    natural = arm.method == "natural"
    kfac = None
    if natural:
        kfac = KFAC(probe=study.probe(layer), probe_size=DRAWN, every=STEPS)
    plan = PrivacyConfig(
        expected_batch_size=BATCH,
        steps=arm.steps,
        max_grad_norm=clip,
        max_physical_batch_size=ROWS,
        preconditioner=kfac,
        readout="natural" if natural else "whitened",
        postprocess=(DiSK(0.7, 0.5, momentum_allowed=True),) if arm.method == "disk" else (),
    ).with_noise(noise, DELTA, TRAIN)
    if arm.method in ("sgd", "natural"):
        optimizer: Any = torch.optim.SGD(trained, lr=rate / clip, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(trained, lr=rate)
    rows = study.rows("train", layer)
    # The check on public rows is of the model, which tests make; passes are proved either way.
    with Session(plan, model, optimizer, rows, collate_fn=collate, verify=False) as session:
        for batch in session.batches():
            session.step(batch, loss_fn)
    found, loss = judge(model, study.rows(on, layer))
    return {
        "arm": name,
        "epsilon": epsilon if is_private else None,
        "spent": spent if is_private else None,
        "rate": rate,
        "seed": seed,
        "on": on,
        "accuracy": found,
        "loss": loss,
        "head_accuracy": head["accuracy"],
        "clip": clip,
        "noise": noise,
        "trained": sum(map(Tensor.numel, trained)),
        "batch": BATCH,
        "steps": arm.steps,
        "rows": TRAIN,
        "head_seconds": head["seconds"],
        **watch.read(),
    }


def best_rate(file: RowFile, name: str) -> float | None:
    """Return the rate with the best accuracy on the validation sentences; None before all ran."""
    arm = ARMS[name]
    if arm.like:
        return best_rate(file, arm.like)
    return file.best_rate(f"validation/{name}/{rate:g}" for rate in arm.rates)


def judge_head(study: Study) -> dict[str, Any]:
    """Return the row of the head alone on the validation sentences."""
    model = make_model(study.encoder, ARMS["lora-1"], study.head(SHARE * TUNED_AT, 0)["weight"])
    scale_head(model, study.rows("public", 5))
    found, loss = judge(model, study.rows("validation", 5))
    return {"epsilon": TUNED_AT, "accuracy": found, "loss": loss}


def describe_head(study: Study, epsilon: float, seed: int) -> dict[str, Any]:
    """Return the row of a head alone on the test set."""
    facts = {key: value for key, value in study.head(epsilon, seed).items() if key != "weight"}
    return {"epsilon": epsilon, "seed": seed, "rows": TRAIN, **facts}


def run(data_dir: str, names: Sequence[str], seeds: int) -> None:
    """Run what is missing: rates first, then heads and tests, seed by seed."""
    study, file = Study(data_dir), RowFile(PATH)

    def fill(key: str, name: str, epsilon: float, rate: float, seed: int, on: str) -> None:
        file.fill(key, functools.partial(execute, study, name, epsilon, rate, seed, on))

    file.fill("validation/head", functools.partial(judge_head, study))
    for name in names:
        for rate in ARMS[name].rates:
            fill(f"validation/{name}/{rate:g}", name, TUNED_AT, rate, 0, "validation")
    for name in names:
        chosen = best_rate(file, name)
        if ARMS[name].steps > STEPS and chosen is not None:
            fill(f"{name}/none", name, math.inf, chosen, 0, "test")
    for seed in range(seeds):
        for epsilon in EPSILONS:
            head = functools.partial(describe_head, study, epsilon, seed)
            file.fill(f"head/{epsilon:g}/{seed}", head)
            for name in names:
                chosen = best_rate(file, name)
                if chosen is not None:
                    fill(f"{name}/{epsilon:g}/{seed}", name, epsilon, chosen, seed, "test")


def table() -> str:
    """Return accuracies of the head alone and of each arm; "" before anything was run."""
    rows = RowFile(PATH).rows
    titles = {"head": "head alone", **{name: arm.title for name, arm in ARMS.items()}}
    lines = []
    for name, title in titles.items():
        found = {key: row for key, row in rows.items() if key.startswith(f"{name}/")}
        if not found:
            continue
        cells = [title]
        for epsilon in sorted(EPSILONS):
            cells.append(
                seeds_cell([row["accuracy"] for row in found.values() if row["epsilon"] == epsilon])
            )
        free = found.pop(f"{name}/none", None)
        cells.append(f"{free['accuracy']:.2f}" if free else "–")
        gains = [row["accuracy"] - row["head_accuracy"] for row in found.values() if name != "head"]
        cells.append(f"{statistics.mean(gains):+.2f}" if gains else "–")
        spent = [row["processor_seconds"] for row in found.values() if "processor_seconds" in row]
        cells.append(f"{statistics.mean(spent) / 60:.1f}" if spent else "–")
        lines.append(cells)
    if not lines:
        return ""
    head = [f"ε = {epsilon:g} (seeds)" for epsilon in sorted(EPSILONS)]
    more = ["no noise", "change of its head", "processor minutes"]
    return markdown(["SST-2, test %", *head, *more], lines)


if __name__ == "__main__":
    raise SystemExit(run_rows(__doc__, ARMS, SEEDS, run, table))
