"""The models that the speed benchmark steps, with data and probe of the right shape.

Contents do not matter to a step's cost, so inputs are random numbers and labels are random classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.app.models import two_convolutions
from dpkfc_papers.recipes.networks import TransformerBlock

CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with its batch.

    Attributes:
        shape: of one example.
        vocabulary: set where examples are token ids.
        views: of every example, which counts by the mean of their gradients.
        micro_batch: rows in memory at once, None for all.
    """

    name: str
    title: str
    batch_size: int
    shape: tuple[int, ...]
    build: Callable[[], nn.Module]
    vocabulary: int | None = None
    probe_size: int = 256
    logits: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)
    language_model: bool = False
    views: int = 1
    micro_batch: int | None = None

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

    def parts(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of a batch as they are in memory at once: views of each example, changed at
        random.
        """
        if self.views > 1:
            x, y = x.repeat_interleave(self.views, 0), y.repeat_interleave(self.views, 0)
        for part in zip(
            x.split(self.micro_batch or len(x)), y.split(self.micro_batch or len(y)), strict=True
        ):
            yield part if self.augment is None else self.augment(part)

    @property
    def augment(self) -> Callable[[Any], Any] | None:
        """What makes the views, None where there is one of each example."""
        from dpkfc.data.augment import reflect_pad_crop_flip

        return reflect_pad_crop_flip() if self.views > 1 else None


class Encoder(nn.Module):
    """Token embedding with fixed sinusoidal positions, blocks, mean over tokens, classes."""

    def __init__(self, width: int, length: int, blocks: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, max(1, width // 64)) for _ in range(blocks))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)
        # A plain attribute: Opacus refuses modules with buffers.
        angles = torch.arange(length).unsqueeze(1) / 10000 ** (
            torch.arange(width // 2) / (width // 2)
        )
        self.positions = torch.cat([angles.sin(), angles.cos()], 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(
            self.norm(self.blocks(self.embedding(ids) + self.positions.to(ids.device))).mean(1)
        )


class WideBlock(nn.Module):
    """A pre-activation residual block with GroupNorm."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first, self.conv1 = (
            nn.GroupNorm(min(16, c_in), c_in),
            nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False),
        )
        self.second, self.conv2 = (
            nn.GroupNorm(min(16, c_out), c_out),
            nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False),
        )
        self.short = (
            nn.Conv2d(c_in, c_out, 1, stride, bias=False) if (c_in, stride) != (c_out, 1) else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        return self.conv2(F.relu(self.second(self.conv1(y)))) + (
            x if self.short is None else self.short(y)
        )


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
    return two_convolutions(1, 32 * 7 * 7, 128, CLASSES)


def mlp(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def encoder_case(width: int, length: int, batch_size: int, blocks: int, vocabulary: int) -> Case:
    return Case(
        name=f"encoder-{width}",
        title=f"{blocks}-block encoder, d={width}, T={length}",
        batch_size=batch_size,
        shape=(length,),
        build=lambda: Encoder(width, length, blocks, vocabulary),
        vocabulary=vocabulary,
    )


def _bert(lora: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(num_labels=CLASSES))
    return _add_lora(model, "SEQ_CLS", ["query", "value"]) if lora else model


def _gpt2(lora: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config())
    return _add_lora(model, "CAUSAL_LM", ["c_attn"]) if lora else model


def _llama() -> nn.Module:
    """1.1 billion parameters in the shape of TinyLlama, random weights, LoRA on two of the
    attention's maps.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    return _add_lora(LlamaForCausalLM(config), "CAUSAL_LM", ["q_proj", "v_proj"])


def _add_lora(model: nn.Module, task: str, targets: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=16, lora_alpha=16, target_modules=targets, task_type=task)
    )


def _bert_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Positions and segments are expanded, because Opacus cannot take the ones of shape [1, T]."""
    positions = torch.arange(x.shape[1], device=x.device).expand(*x.shape).contiguous()
    return model(input_ids=x, position_ids=positions, token_type_ids=torch.zeros_like(x)).logits


def hugging_face_cases() -> list[Case]:
    """Shapes of transformers with random weights, trained whole and through LoRA adapters."""
    bert = {
        "batch_size": 8,
        "shape": (128,),
        "vocabulary": 30522,
        "probe_size": 32,
        "logits": _bert_logits,
    }
    gpt2 = {
        "batch_size": 4,
        "shape": (256,),
        "vocabulary": 50257,
        "probe_size": 16,
        "language_model": True,
    }
    gpt2["logits"] = lambda model, x: model(input_ids=x, use_cache=False).logits
    llama = {**gpt2, "batch_size": 2, "shape": (128,), "vocabulary": 32000, "probe_size": 4}
    return [
        Case(name="bert-base", title="BERT-base, T=128", build=lambda: _bert(False), **bert),
        Case(name="gpt2-small", title="GPT-2 small, T=256", build=lambda: _gpt2(False), **gpt2),
        Case(
            name="bert-base-lora",
            title="BERT-base, T=128, LoRA r=16",
            build=lambda: _bert(True),
            **bert,
        ),
        Case(
            name="gpt2-small-lora",
            title="GPT-2 small, T=256, LoRA r=16",
            build=lambda: _gpt2(True),
            **gpt2,
        ),
        Case(name="llama-1b-lora", title="Llama 1.1B, T=128, LoRA r=16", build=_llama, **llama),
    ]


def _vit(**sizes: int) -> nn.Module:
    """A vision transformer, ViT-B/16 by default, with random weights."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=CLASSES, **sizes))


def vit_case(name: str, batch_size: int, size: int = 224, **sizes: int) -> Case:
    return Case(
        name=name,
        title="ViT-B/16" if not sizes else "ViT",
        batch_size=batch_size,
        shape=(3, size, size),
        build=lambda: _vit(image_size=size, **sizes),
        logits=lambda model, x: model(pixel_values=x).logits,
    )


def wrn_case(
    depth: int, widening: int, batch_size: int, views: int = 1, micro_batch: int | None = None
) -> Case:
    """A wide residual network; with views as De et al. (2022) and the DP-NGD paper train it."""
    suffix = f", K={views} views" if views > 1 else ", GroupNorm"
    return Case(
        name=f"wrn-{depth}-{widening}" + f"-views-{views}" * (views > 1),
        title=f"WRN-{depth}-{widening}{suffix}",
        batch_size=batch_size,
        shape=(3, 32, 32),
        build=lambda: wide_resnet(depth, widening),
        views=views,
        micro_batch=micro_batch,
    )


def card_cases() -> list[Case]:
    """What is too large for a CPU."""
    return [vit_case("vit-b16", 64), wrn_case(16, 4, 4096, views=16, micro_batch=2048)]


def cases(*, smoke: bool = False, card: bool = False) -> dict[str, Case]:
    """The models by name; `smoke` makes each small enough for a test, `card` adds those that only a
    card is asked for.
    """
    mnist = {"shape": (1, 28, 28)}
    if smoke:
        tiny_vit = {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        }
        found = [
            Case(name="cnn", title="CNN", batch_size=4, build=mnist_cnn, **mnist),
            encoder_case(32, 8, 4, 1, 50),
            Case(name="mlp", title="MLP", batch_size=4, build=lambda: mlp(16), **mnist),
            replace(wrn_case(10, 1, 2), name="wrn", title="WRN-10-1"),
            vit_case("vit", 2, 32, **tiny_vit),
            replace(wrn_case(10, 1, 4, views=2, micro_batch=4), name="views"),
        ]
        found = [replace(case, name=f"smoke-{case.name}", probe_size=8) for case in found]
    else:
        found = [
            Case(name="mnist-cnn", title="MNIST CNN", batch_size=256, build=mnist_cnn, **mnist),
            encoder_case(256, 64, 32, 4, 1000),
            encoder_case(512, 128, 16, 4, 1000),
            Case(
                name="mlp",
                title="MLP 784-1024-1024-10",
                batch_size=512,
                build=lambda: mlp(1024),
                **mnist,
            ),
            wrn_case(16, 4, 32),
            *hugging_face_cases(),
            *(card_cases() if card else []),
        ]
    return {case.name: case for case in found}
