"""An encoder of small images: a wide residual network that was trained on synthetic images alone.

Its weights come with the package. `dpkfc pretrain-encoder` makes them again. Neither private nor
public data are in them, so they cost no ε.

Source: Zagoruyko and Komodakis (2016), WRN-d-k; as the start of private training: Tang et al.
(2023).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional

from dpkfc._checks import check_in_range, check_integer
from dpkfc.features.scattering import ImageShape, check_images

WEIGHTS = "encoder.safetensors"
# SHA-256 of the weights that come with the package.
CHECKSUM = "81ee5010de6dfc892054bdfbbd0fda2e771ec7e1743fefe702583cc0c4c1437b"


@dataclass(frozen=True)
class SyntheticEncoder:
    """Settings of features by an encoder that has seen synthetic images alone.

    Attributes:
        shape: `(channels, height, width)` of an image; 1 or 3 channels with values in [-1, 1].
        pool: features are averaged over a grid of `pool` × `pool` cells.
        weights: a safetensors file of `dpkfc pretrain-encoder`; "" takes the package's own.

    Raises:
        ValueError: another number of channels, an image of fewer than 8 pixels a side, or a grid
            finer than the positions.

    Example:
        >>> SyntheticEncoder((1, 28, 28)).feature_shape
        (256, 2, 2)
    """

    shape: ImageShape
    pool: int = 2
    weights: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) != 3 or self.shape[0] not in (1, 3) or min(self.shape[1:]) < 8:
            raise ValueError(
                "SyntheticEncoder: shape must be (1 or 3, height, width) with sides of 8 or more,"
                f" got {self.shape}"
            )
        finest = min(self.shape[1:]) // 4
        check_integer("SyntheticEncoder: pool", self.pool, 1)
        check_in_range("SyntheticEncoder: pool", self.pool, f"[1, {finest}]")

    @property
    def feature_shape(self) -> ImageShape:
        """Return channels, height and width of the features of one image."""
        return 256, self.pool, self.pool

    def build(self) -> EncoderFeatures:
        """Return the encoder as a module whose parameters do not train.

        Raises:
            ValueError: a weight file that cannot be read, or is not the one of the package.
        """
        encoder = Encoder()
        encoder.load_state_dict(read_weights(self.weights), strict=False)
        return EncoderFeatures(self, encoder)

    def describe(self) -> dict[str, object]:
        """Return plain values for a privacy card."""
        return {
            "kind": "SyntheticEncoder",
            "shape": list(self.shape),
            "pool": self.pool,
            "weights": self.weights or CHECKSUM,
        }


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the weights of an encoder; "" reads the package's own and checks their SHA-256.

    Raises:
        ValueError: the file cannot be read, or the package's own file was changed.
    """
    file = Path(path or Path(__file__).with_name(WEIGHTS))
    try:
        content = file.read_bytes()
        state = load(content)
    except Exception as error:
        raise ValueError(
            f"encoder weights {path or WEIGHTS} cannot be read ({str(error)[:50]}); give a file of"
            " dpkfc pretrain"
        ) from error
    if not path and hashlib.sha256(content).hexdigest() != CHECKSUM:
        raise ValueError(
            f"{WEIGHTS} of the package has another checksum than it was shipped with; install"
            " dpkfc again"
        )
    return {name: x.float() for name, x in state.items()}


class EncoderFeatures(nn.Module):
    """Features `[B, 256, pool, pool]` of images `[B, C, H, W]` with values in [-1, 1].

    Grey images are shown in three equal channels. The norms use the statistics of the synthetic
    images, so an image's features depend on that image alone.
    """

    def __init__(self, settings: SyntheticEncoder, encoder: Encoder) -> None:
        super().__init__()
        self.settings = settings
        self.encoder = encoder.requires_grad_(False).eval()

    def unfreeze(self, blocks: int) -> EncoderFeatures:
        """Let the convolutions of the last residual blocks train, and return this module.

        The norms stay as they are, so no example meets another.

        Args:
            blocks: how many; all blocks include the first convolution too.

        Raises:
            ValueError: no integer, less than one block, or more than there are.
        """
        count = len(self.encoder.blocks)
        check_integer("unfreeze: blocks", blocks, 1)
        check_in_range("unfreeze: blocks", blocks, f"[1, {count}]")
        chosen = self.encoder if blocks == count else self.encoder.blocks[-blocks:]
        for module in chosen.modules():
            if isinstance(module, nn.Conv2d):
                module.requires_grad_(True)
        return self

    def train(self, mode: bool = True) -> EncoderFeatures:
        """Keep the statistics of the synthetic images in training mode too."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of images.

        Raises:
            ValueError: images of another shape than the settings say.
        """
        check_images(x, self.settings.shape)
        colour = x.expand(-1, 3, -1, -1)
        colour = colour.contiguous(memory_format=torch.channels_last)
        features = self.encoder(colour)
        return functional.adaptive_avg_pool2d(features, self.settings.pool)


class Encoder(nn.Module):
    """A wide residual network without its head: images `[B, 3, H, W]` to `[B, 64 k, H/4, W/4]`.

    Args:
        depth: 6 n + 4 layers.
        width: k, the factor on the channels 16, 32 and 64.
    """

    def __init__(self, depth: int = 16, width: int = 4) -> None:
        super().__init__()
        inputs = 16
        self.stem = nn.Conv2d(3, inputs, 3, 1, 1, bias=False)
        blocks = []
        for stage in range(3):
            outputs = 16 * width * 2**stage
            # The first block of the later stages halves the sides.
            stride = 2 if stage else 1
            for _ in range((depth - 4) // 6):
                block = _Block(inputs, outputs, stride)
                blocks.append(block)
                inputs = outputs
                stride = 1
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(inputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features at every position."""
        features = self.blocks(self.stem(x))
        return functional.relu(self.norm(features))


class _Block(nn.Module):
    """Two convolutions beside a shortcut, each after a norm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(x))
        residual = x
        if self.shortcut is not None:
            residual = self.shortcut(y)
        z = self.norm2(self.conv1(y))
        change: Tensor = self.conv2(functional.relu(z))
        return residual + change
