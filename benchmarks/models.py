"""The models that the speed benchmark steps, with data and probe of the right shape.

Contents do not matter to a step's cost, so inputs are random numbers and labels are random classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with its batch: `shape` is that of one example, `vocabulary` is set where examples are token ids."""

    name: str
    title: str
    batch_size: int
    shape: tuple[int, ...]
    build: Callable[[], nn.Module]
    vocabulary: int | None = None
    probe_size: int = 256
    logits: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)
    language_model: bool = False

    def losses(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """One loss an example `[N]`: of its class, or the mean over its next tokens."""
        out = self.logits(model, x)
        if self.language_model:
            return F.cross_entropy(out[:, :-1].transpose(1, 2), x[:, 1:], reduction="none").mean(1)
        return F.cross_entropy(out, y, reduction="none")

    def data(self, size: int) -> tuple[Tensor, Tensor]:
        """Inputs `[size, *shape]` and labels `[size]`."""
        generator = torch.Generator().manual_seed(1)
        if self.vocabulary is None:
            x = torch.randn(size, *self.shape, generator=generator)
        else:
            x = torch.randint(self.vocabulary, (size, *self.shape), generator=generator)
        return x, torch.randint(CLASSES, (size,), generator=generator)

    def probe(self):
        """Pink noise for images, uniformly random token ids for sequences."""
        from dpkfc.curvature import PinkNoise, PublicData

        if self.vocabulary is None:
            return PinkNoise(self.shape)
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(self.vocabulary, (self.probe_size, *self.shape), generator=generator)
        return PublicData(ids, provenance="uniformly random token ids")


class Attention(nn.Module):
    """Self-attention with separate query, key, value and output maps."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, ffn_ratio: int) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.second = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, ffn_ratio * width), nn.Linear(ffn_ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Encoder(nn.Module):
    """Token embedding with fixed sinusoidal positions, blocks, mean over tokens, classes."""

    def __init__(self, width: int, length: int, blocks: int, ffn_ratio: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64), ffn_ratio) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)
        # A plain attribute: Opacus refuses modules with buffers.
        angles = torch.arange(length).unsqueeze(1) / 10000 ** (torch.arange(width // 2) / (width // 2))
        self.positions = torch.cat([angles.sin(), angles.cos()], 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(ids) + self.positions.to(ids.device))).mean(1))


class WideBlock(nn.Module):
    """A pre-activation residual block with GroupNorm."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first, self.conv1 = nn.GroupNorm(min(16, c_in), c_in), nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.second, self.conv2 = nn.GroupNorm(min(16, c_out), c_out), nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(c_in, c_out, 1, stride, bias=False) if (c_in, stride) != (c_out, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        return self.conv2(F.relu(self.second(self.conv1(y)))) + (x if self.short is None else self.short(y))


def wide_resnet(depth: int, widening: int) -> nn.Module:
    """WRN-depth-widening for 32×32 images with GroupNorm in place of BatchNorm."""
    widths = [16, *(c * widening for c in (16, 32, 64))]
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    for stage, (c_in, c_out) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        for i in range((depth - 4) // 6):
            layers.append(WideBlock(c_in if i == 0 else c_out, c_out, 2 if stage and i == 0 else 1))
    head = [nn.GroupNorm(16, widths[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(widths[-1], CLASSES))


def mnist_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def mlp(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def encoder_case(width: int, length: int, batch_size: int, blocks: int, ffn_ratio: int, vocabulary: int) -> Case:
    suffix = "" if ffn_ratio == 4 else f"-ffn{ffn_ratio}"
    return Case(
        name=f"encoder-{width}{suffix}",
        title=f"{blocks}-block encoder, d={width}, T={length}" + (f", FFN ×{ffn_ratio}" if suffix else ""),
        batch_size=batch_size,
        shape=(length,),
        build=lambda: Encoder(width, length, blocks, ffn_ratio, vocabulary),
        vocabulary=vocabulary,
    )


def _bert(lora: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(num_labels=CLASSES))
    return _with_lora(model, "SEQ_CLS", ["query", "value"]) if lora else model


def _gpt2(lora: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config())
    return _with_lora(model, "CAUSAL_LM", ["c_attn"]) if lora else model


def _llama() -> nn.Module:
    """1.1 billion parameters in the shape of TinyLlama, random weights, LoRA on two of the attention's maps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
        vocab_size=32000, max_position_embeddings=2048,
    )  # fmt: skip
    return _with_lora(LlamaForCausalLM(config), "CAUSAL_LM", ["q_proj", "v_proj"])


def _with_lora(model: nn.Module, task: str, targets: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=targets, task_type=task))


def _bert_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Positions and segments are expanded, because Opacus cannot take the ones of shape [1, T]."""
    positions = torch.arange(x.shape[1]).expand(*x.shape).contiguous()
    return model(input_ids=x, position_ids=positions, token_type_ids=torch.zeros_like(x)).logits


def hugging_face_cases() -> list[Case]:
    """Shapes of transformers with random weights, trained whole and through LoRA adapters."""
    bert = {"batch_size": 8, "shape": (128,), "vocabulary": 30522, "probe_size": 32, "logits": _bert_logits}
    gpt2 = {"batch_size": 4, "shape": (256,), "vocabulary": 50257, "probe_size": 16, "language_model": True}
    gpt2["logits"] = lambda model, x: model(input_ids=x, use_cache=False).logits
    llama = {**gpt2, "batch_size": 2, "shape": (128,), "vocabulary": 32000, "probe_size": 4}
    return [
        Case(name="bert-base", title="BERT-base, T=128", build=lambda: _bert(False), **bert),
        Case(name="gpt2-small", title="GPT-2 small, T=256", build=lambda: _gpt2(False), **gpt2),
        Case(name="bert-base-lora", title="BERT-base, T=128, LoRA r=16", build=lambda: _bert(True), **bert),
        Case(name="gpt2-small-lora", title="GPT-2 small, T=256, LoRA r=16", build=lambda: _gpt2(True), **gpt2),
        Case(name="llama-1b-lora", title="Llama 1.1B, T=128, LoRA r=16", build=_llama, **llama),
    ]


def cases(*, smoke: bool = False, ffn_ratio: int = 4) -> dict[str, Case]:
    """The models by name; `smoke` makes each small enough for a test."""
    if smoke:
        found = [
            Case(name="cnn", title="CNN", batch_size=4, shape=(1, 28, 28), build=mnist_cnn),
            encoder_case(32, 8, 4, 1, ffn_ratio, 50),
            Case(name="mlp", title="MLP", batch_size=4, shape=(1, 28, 28), build=lambda: mlp(16)),
            Case(name="wrn", title="WRN-10-1", batch_size=2, shape=(3, 32, 32), build=lambda: wide_resnet(10, 1)),
        ]
        found = [replace(case, name=f"smoke-{case.name}", probe_size=8) for case in found]
    else:
        mlp_case = Case(
            name="mlp", title="MLP 784-1024-1024-10", batch_size=512, shape=(1, 28, 28), build=lambda: mlp(1024)
        )
        wrn_case = Case(
            name="wrn-16-4", title="WRN-16-4, GroupNorm", batch_size=32, shape=(3, 32, 32),
            build=lambda: wide_resnet(16, 4),
        )  # fmt: skip
        found = [
            Case(name="mnist-cnn", title="MNIST CNN", batch_size=256, shape=(1, 28, 28), build=mnist_cnn),
            encoder_case(256, 64, 32, 4, ffn_ratio, 1000),
            encoder_case(512, 128, 16, 4, ffn_ratio, 1000),
            mlp_case,
            wrn_case,
        ]
        found += hugging_face_cases()
    return {case.name: case for case in found}
