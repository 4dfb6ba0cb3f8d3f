"""Paper and pencil: a private step of a 70-billion-parameter model on 64 GPUs, and how far the same
formulas are right here.

    python benchmarks/plan_70b.py     # the two tables of docs/scaling-plan.md

Nothing is measured. Operations are counted per map of d_in × d_out at T positions an example (a
multiply and an add are two):

    without privacy   6 T d_in d_out              forward, gradients of inputs and of weights
    DP-SGD            + min(2 T² (d_in + d_out),  the norm by Gram matrices,
                            2 T d_in d_out)       or of materialised gradients
    DP-KFC            + 4 T k (d_in + d_out)      both sides of rank k, onto eigenvectors and back

The first table sets the counts against the times in results/speed.json. What a count cannot see:
memory traffic, noise, optimizer, ledger.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from common import RESULTS, markdown, read_json
from dpkfc import KFAC
from speed_tables import find_ratio

RANK = 64  # of the plan; what was measured has the default of KFAC
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Map:
    """`count` weights of one size."""

    d_in: int
    d_out: int
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.count * self.d_in * self.d_out

    def plain(self, t: int) -> float:
        return 6.0 * t * self.parameters

    def norms(self, t: int) -> float:
        return self.count * min(
            2.0 * t * t * (self.d_in + self.d_out), 2.0 * t * self.d_in * self.d_out
        )

    def sides(self, t: int, rank: int) -> float:
        """Rank-k sides where a side is at least four times as wide, full ones otherwise."""
        each = [
            4.0 * t * rank * d if d >= 4 * rank else 2.0 * t * d * d
            for d in (self.d_in, self.d_out)
        ]
        return self.count * sum(each)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A transformer: its maps, positions, and the parameters of tables, which cost no products."""

    name: str
    maps: tuple[Map, ...]
    positions: int
    layers: int
    tables: int = 0

    @property
    def parameters(self) -> int:
        return sum(m.parameters for m in self.maps) + self.tables

    def counts(self, rank: int) -> tuple[float, float, float]:
        """Operations an example: without privacy, DP-SGD, DP-KFC of a rank; the products of
        attention itself are in all three.
        """
        t = self.positions
        attention = 12.0 * t * t * self.maps[0].d_in * self.layers
        plain = sum(m.plain(t) for m in self.maps) + attention
        private = plain + sum(m.norms(t) for m in self.maps)
        return plain, private, private + sum(m.sides(t, rank) for m in self.maps)


def encoder(
    name: str, width: int, positions: int, blocks: int, tables: int = 0, head: Map | None = None
) -> Shape:
    maps = [
        Map(d_in=width, d_out=width, count=4 * blocks),
        Map(d_in=width, d_out=4 * width, count=blocks),
    ]
    maps += [Map(d_in=4 * width, d_out=width, count=blocks)] + ([head] if head else [])
    return Shape(name=name, maps=tuple(maps), positions=positions, layers=blocks, tables=tables)


MEASURED = {
    "encoder-256": encoder("encoder, d = 256, T = 64", 256, 64, 4),
    "encoder-512": encoder("encoder, d = 512, T = 128", 512, 128, 4),
    "bert-base": encoder("BERT-base, T = 128", 768, 128, 12, 30522 * 768),
    "gpt2-small": encoder("GPT-2 small, T = 256", 768, 256, 12, 0, Map(d_in=768, d_out=50257)),
}

LAYERS, WIDTH, WIDE, KEYS, VOCABULARY = 80, 8192, 28672, 1024, 128256
LLAMA_70B = Shape(
    name="Llama, 70 billion",
    maps=(
        Map(d_in=WIDTH, d_out=WIDTH, count=2 * LAYERS),
        Map(d_in=WIDTH, d_out=KEYS, count=2 * LAYERS),
        Map(d_in=WIDTH, d_out=WIDE, count=2 * LAYERS),
        Map(d_in=WIDE, d_out=WIDTH, count=LAYERS),
        Map(d_in=WIDTH, d_out=VOCABULARY),
    ),
    positions=4096,
    layers=LAYERS,
    tables=VOCABULARY * WIDTH,
)


def check_table() -> str:
    """Counted beside measured ratios."""
    models = read_json(RESULTS / "speed.json").get("models", {})
    rows = []
    for name, shape in MEASURED.items():
        times = models.get(name, {}).get("contenders", {})
        plain, private, preconditioned = shape.counts(KFAC.max_rank or 0)
        first = _pair(private / plain, models.get(name, {}), "dp_sgd", "plain")
        second = _pair(preconditioned / private, models.get(name, {}), "dp_kfc", "dp_sgd")
        rows.append(
            [
                shape.name,
                *first,
                *second,
                _rate(plain * models[name]["batch_size"], times) if name in models else "–",
            ]
        )
    head = [
        "model",
        "DP-SGD ÷ plain, counted",
        "measured",
        "DP-KFC ÷ DP-SGD, counted",
        "measured",
        "GFLOP/s of the plain step",
    ]
    return markdown(head, rows)


def _pair(counted: float, entry: dict[str, Any], top: str, bottom: str) -> tuple[str, str]:
    found = find_ratio(entry, top, bottom)
    return f"{counted:.2f}", "–" if found is None else f"{found['ratio']:.2f}"


def _rate(operations: float, times: dict[str, Any]) -> str:
    return (
        f"{operations / times['plain']['median_ms'] / 1e6:,.0f}"
        if "median_ms" in times.get("plain", {})
        else "–"
    )


def plan_table(
    gpus: int = 64,
    tensor: int = 8,
    batch: int = 1024,
    petaflops: float = 0.4,
    network: float = 50.0,
) -> str:
    """The plan.

    Args:
        gpus: all of them.
        tensor: of these share one layer (tensor parallelism), within a node.
        batch: sequences of a logical batch.
        petaflops: that one GPU sustains in bfloat16.
        network: GB/s that one GPU sends to other nodes.
    """
    shape, replicas = LLAMA_70B, gpus // tensor
    p, t, each = shape.parameters, shape.positions, batch / replicas
    plain, private, preconditioned = (
        x * batch / gpus / (petaflops * 1e15) for x in shape.counts(RANK)
    )
    # of q, k and v; of the output map; of gate and up; of the down map
    inputs = LAYERS * (3 * WIDTH + WIDE)
    outputs = LAYERS * (2 * WIDTH + 2 * KEYS + 2 * WIDE + WIDTH)
    tape = 2.0 * t * (inputs + outputs) / tensor / GIB
    sides = 4.0 * RANK * sum(m.count * (m.d_in + m.d_out) for m in shape.maps) / gpus / GIB
    sums = 4.0 * p / gpus / GIB
    # bytes a GPU receives for one micro-batch, forward and backward
    gather = 2 * 2.0 * p / tensor * (replicas - 1) / replicas
    scatter = 4.0 * p / tensor * (replicas - 1) / replicas
    ratio, gathered, scattered = (
        preconditioned / private,
        gather / network / 1e9,
        scatter / network / 1e9,
    )
    rows = [
        (
            "parameters",
            f"{p / 1e9:.1f} billion",
            f"{LAYERS} layers, d = {WIDTH:,}, wide {WIDE:,}, {VOCABULARY:,} tokens",
        ),
        ("weights, bfloat16, a GPU", f"{2.0 * p / gpus / GIB:.1f} GiB", f"sharded over all {gpus}"),
        (
            "clipped sum, float32, a GPU",
            f"{sums:.1f} GiB",
            "each GPU holds, noises and updates its own shard",
        ),
        (
            "Adam and float32 weights, a GPU",
            f"{12.0 * p / gpus / GIB:.1f} GiB",
            "as without privacy",
        ),
        ("sides of rank 64, a GPU", f"{sides:.2f} GiB", "sharded; gathered a layer at a time"),
        (
            "tape of one sequence, a GPU",
            f"{tape:.1f} GiB",
            f"T = {t:,}, over {tensor} GPUs: inputs and output gradients",
        ),
        (
            "operations a GPU and step, plain",
            f"{plain:.0f} s",
            f"{batch:,} sequences, {petaflops} PFLOP/s",
        ),
        (
            "… DP-SGD",
            f"{private:.0f} s (× {private / plain:.2f})",
            "norms by Gram matrices or formed",
        ),
        (
            "… DP-KFC",
            f"{preconditioned:.0f} s (× {ratio:.3f})",
            "sides of rank 64; the ratio to DP-SGD",
        ),
        (
            "weights gathered a micro-batch",
            f"{gather / 1e9:.0f} GB = {gathered:.1f} s",
            "as without privacy",
        ),
        (
            "sums scattered a micro-batch",
            f"{scatter / 1e9:.0f} GB = {scattered:.1f} s",
            "float32, as rounding bounds assume",
        ),
        ("micro-batches a step", f"{each:.0f}", "messages overlap with products"),
        (
            "norms sent, a micro-batch",
            "8 bytes an example",
            "one number an example over the GPUs of a node",
        ),
        (
            "noise, a GPU",
            f"{p / gpus / 1e9:.2f} billion numbers",
            "once a step, each GPU its shard, from streams of its own",
        ),
        ("ledger", "one line a step", "written by the first rank before any shard is noised"),
    ]
    return markdown(["quantity", "value", "how"], rows)


def main() -> int:
    print(check_table(), plan_table(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
