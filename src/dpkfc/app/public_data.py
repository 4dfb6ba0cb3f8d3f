"""Public examples of a user, in a safetensors file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dpkfc.app.toml import ConfigError


def read_public_data(
    path: Path, input_shape: tuple[int, ...], setting: str = "public_data"
) -> tuple[Tensor, Tensor | None]:
    """Return public examples: `inputs` `[n, *input_shape]` and, if given, `labels` `[n]`.

    Args:
        path: a safetensors file.
        input_shape: of one input.
        setting: the setting that names the file, for messages.

    Raises:
        ConfigError: the file cannot be read, its inputs have another shape or are not finite
            numbers, or its labels are not one whole number for each input.
    """
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"{setting} {path} does not exist; check the name") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{setting} {path} cannot be read as safetensors ({error})") from None
    inputs, labels = tensors.get("inputs"), tensors.get("labels")
    expected = ", ".join(map(str, input_shape))
    if inputs is None:
        raise ConfigError(f"{setting} {path} holds no `inputs`; expected `inputs` [n, {expected}]")
    if tuple(inputs.shape[1:]) != tuple(input_shape):
        raise ConfigError(
            f"{setting} {path} holds inputs of shape {list(inputs.shape)}; "
            f"expected `inputs` [n, {expected}]"
        )
    _check_values(f"{setting} {path}", inputs, labels, images=len(input_shape) > 1)
    return inputs, labels


_WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check_values(what: str, inputs: Tensor, labels: Tensor | None, *, images: bool) -> None:
    """Refuse public examples that a model cannot run on.

    Raises:
        ConfigError: naming the file and what is wrong.
    """
    wrong_kind = images and not inputs.is_floating_point()
    if len(inputs) == 0 or wrong_kind or not bool(torch.isfinite(inputs).all()):
        wanted = "finite floats" if images else "finite numbers"
        raise ConfigError(f"{what}: `inputs` must be {wanted}, one example or more")
    if labels is None:
        return
    if labels.shape != inputs.shape[:1] or labels.dtype not in _WHOLE_NUMBERS:
        given = f"{str(labels.dtype).removeprefix('torch.')} {list(labels.shape)}"
        raise ConfigError(
            f"{what}: `labels` are {given}; expected a whole number for each of "
            f"{len(inputs)} inputs"
        )


def read_labelled(
    path: Path, input_shape: tuple[int, ...], setting: str, purpose: str
) -> tuple[Tensor, Tensor]:
    """Return public inputs and their labels. Inputs in floating point become float32.

    Raises:
        ConfigError: the file has no labels.
    """
    inputs, labels = read_public_data(path, input_shape, setting)
    if labels is None:
        raise ConfigError(f"{setting} {path} has no `labels`; {purpose} needs them")
    if inputs.is_floating_point():
        inputs = inputs.float()
    return inputs, labels
