"""Train an encoder on synthetic images by contrast: two views of one image are near each other.

    loss_i = −log exp(u_i · v_i / τ) / Σ_j exp(u_i · v_j / τ),   ‖u‖ = ‖v‖ = 1

u and v are projections of two views of image i; the sum runs over the batch. Nothing but the seed
enters, so the weights cost no ε.

Source: Chen et al. (2020), SimCLR; images of random processes: Baradad et al. (2021); as the start
of private training: Tang et al. (2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.checkpoint import file_digest, place_file
from dpkfc.features.encoder import Encoder
from dpkfc.features.synthetic_images import draw_images

SIDE = 32
_TEMPERATURE = 0.2


def change_view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return random crops of images, mirrored and in other colours: `[n, 3, SIDE, SIDE]`."""
    n, device = images.shape[0], images.device

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, generator=generator, device=device)

    size = uniform(0.15, 1.0).sqrt()
    ratio = torch.exp(uniform(math.log(3 / 4), math.log(4 / 3)) / 2)
    height, width = (size * ratio).clamp(max=1), (size / ratio).clamp(max=1)
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    across = uniform(-1, 1) * (1 - width)
    down = uniform(-1, 1) * (1 - height)
    zero = torch.zeros_like(down)
    crop = torch.stack([width * mirror, zero, across, zero, height, down], 1).view(n, 2, 3)
    grid = functional.affine_grid(crop, [n, 3, SIDE, SIDE], align_corners=False)
    x = functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    return _change_colours(x, generator)


def _change_colours(x: Tensor, generator: torch.Generator) -> Tensor:
    n, device = x.shape[0], x.device

    def uniform(low: float, high: float) -> Tensor:
        u = torch.rand(n, generator=generator, device=device)
        return (low + (high - low) * u).view(n, 1, 1, 1)

    is_changed = uniform(0, 1) < 0.8
    changed = x * uniform(0.6, 1.4)
    mean = changed.mean((1, 2, 3), keepdim=True)
    changed = mean + (changed - mean) * uniform(0.6, 1.4)
    grey = changed.mean(1, keepdim=True)
    changed = grey + (changed - grey) * uniform(0.2, 1.8)
    # A turn about the grey axis changes the hue.
    angle = uniform(-1.0, 1.0)
    red, green, blue = changed.unbind(1)
    hue = torch.stack([green - blue, blue - red, red - green], 1) / math.sqrt(3)
    rest = changed - changed.mean(1, keepdim=True)
    changed = changed.mean(1, keepdim=True) + rest * angle.cos() + hue * angle.sin()
    x = torch.where(is_changed, changed, x)
    x = torch.where(uniform(0, 1) < 0.2, x.mean(1, keepdim=True).expand_as(x), x)
    return x.clamp(0, 1)


class _Projection(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128)
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.layers(x.mean((2, 3))).float(), dim=1)


def contrast(u: Tensor, v: Tensor) -> Tensor:
    """Return the loss of projections `[n, d]` of two views, both ways."""
    x = torch.cat([u, v])
    logits = x @ x.T / _TEMPERATURE
    logits.fill_diagonal_(-math.inf)
    n = len(u)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(x.device)
    return functional.cross_entropy(logits, target)


def pretrain_encoder(
    encoder: Encoder,
    *,
    steps: int,
    batch_size: int = 1024,
    rate: float = 2e-3,
    seed: int = 0,
    device: str = "cpu",
    report: Callable[[int, float], None] | None = None,
) -> Encoder:
    """Train an encoder in place on images that are drawn as it goes.

    Args:
        encoder: with its initial weights.
        steps: of AdamW, with a cosine schedule.
        batch_size: images a step, each seen in two views.
        rate: the highest learning rate.
        seed: of images, views and the projection.
        device: where it trains.
        report: called with step and loss at times.

    Returns:
        The encoder, in evaluation mode.
    """
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    projection = _Projection(encoder.norm.num_features).to(device)
    encoder.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    parameters = [*encoder.parameters(), *projection.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.05)
    is_gpu = device.startswith("cuda")
    images = torch.empty(0)
    for done in range(steps):
        progress = done / steps
        warm = min(1.0, done / 200)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * progress))
        # Drawing takes as long as a step, so each image serves two of them, in other views.
        if done % 2 == 0:
            images = draw_images(batch_size, SIDE + 8, generator)
        views = torch.cat([change_view(images, generator), change_view(images, generator)])
        with torch.autocast("cuda", torch.bfloat16, enabled=is_gpu):
            views = views.contiguous(memory_format=torch.channels_last)
            u, v = projection(encoder(2 * views - 1)).chunk(2)
        loss = contrast(u, v)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if report is not None and (done % 20 == 19 or done == steps - 1):
            report(done + 1, float(loss.detach()))
    return encoder.eval()


def pretrain_and_save(
    path: Path,
    *,
    steps: int,
    batch_size: int,
    seed: int,
    device: str,
    report: Callable[[int, float], None] | None = None,
) -> str:
    """Train an encoder from a seed, write its weights in half precision and return their SHA-256.

    Args:
        path: the safetensors file.
        steps: as `pretrain_encoder`, like the rest.
        batch_size: images a step.
        seed: of the initial weights too.
        device: where it trains.
        report: called with step and loss at times.

    Raises:
        CheckpointError: the disk cannot take the file.
    """
    torch.manual_seed(seed)
    encoder = pretrain_encoder(
        Encoder(), steps=steps, batch_size=batch_size, seed=seed, device=device, report=report
    )
    state = {}
    for name, x in encoder.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            state[name] = x.half().cpu().contiguous()
    place_file(path, lambda part: save_file(state, part))
    return file_digest(path)
