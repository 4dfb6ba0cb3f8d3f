"""GPT-2 with LoRA: a small one with random weights, or one from a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dpkfc.recipes.datasets.errors import DatasetError

__all__ = ["Logits", "gpt2_lora", "pretrained_lora", "pretrained_tokenizer"]

_HOW = "pip install 'dpkfc[hf]' (transformers and peft)"


class Logits(nn.Module):
    """Token ids `[N, T]` to logits `[N, T, V]` of the next token; texts are padded at their end, which no earlier token sees."""

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
        vocab_size=vocabulary, n_positions=length, n_embd=96, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return _adapted(transformers.GPT2LMHeadModel(config), rank)


def pretrained_lora(folder: str, rank: int = 8) -> Logits:
    """A GPT-2 from a local folder without dropout, of which adapters alone are trained.

    Raises:
        DatasetError: a package is missing, or the folder holds no such model.
    """
    loaded = _from_folder(folder, _transformers().GPT2LMHeadModel, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _adapted(loaded, rank)


def pretrained_tokenizer(folder: str) -> Any:
    """The tokenizer of that folder.

    Raises:
        DatasetError: a package is missing, or the folder holds no tokenizer.
    """
    return _from_folder(folder, _transformers().AutoTokenizer)


def _from_folder(folder: str, kind: Any, **settings: Any) -> Any:
    if not Path(folder).is_dir():
        raise DatasetError(f"pretrained {folder!r} is not a folder; give one with config.json, weights and tokenizer of a GPT-2")
    try:
        return kind.from_pretrained(folder, local_files_only=True, **settings)
    except Exception as error:  # whatever the package raises becomes one line
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatasetError(f"pretrained {folder}: holds no GPT-2 with its tokenizer ({reason}); fetch the folder again") from None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise DatasetError(f"transformers is not installed: {_HOW}") from None
    return transformers


def _adapted(model: nn.Module, rank: int) -> Logits:
    """With adapters at all linear maps of the blocks."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise DatasetError(f"peft is not installed: {_HOW}") from None
    targets = ["c_attn", "c_proj", "c_fc"]
    lora: Any = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, fan_in_fan_out=True, lora_dropout=0.0)
    return Logits(get_peft_model(model, lora))
