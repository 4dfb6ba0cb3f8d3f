"""Train the encoder of `dpkfc.features.SyntheticEncoder` on synthetic images alone, by contrast.

Two views of one image are near each other:

    loss_i = −log exp(u_i · v_i / τ) / Σ_j exp(u_i · v_j / τ),   ‖u‖ = ‖v‖ = 1

u and v are projections of two views of image i; the sum runs over the batch. Nothing but the seed
enters, so the weights cost no ε. `papers/results/encoder.json` is the log of the weights in the
package.

Source: Chen et al. (2020), SimCLR; images of random processes: Baradad et al. (2021); as the start
of private training: Tang et al. (2023).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor, nn

from dpkfc.app.run_folder import write_text
from dpkfc.app.toml import ConfigError
from dpkfc.checkpoint import file_digest, place_file
from dpkfc.features.encoder import Encoder
from dpkfc.features.synthetic_images import Draw, draw_images
from dpkfc.terminal import Whole, open_console

SIDE = 32
_TEMPERATURE = 0.2
# The highest learning rate.
_RATE = 2e-3


def change_view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return random crops of images, mirrored and in other colours: `[n, 3, SIDE, SIDE]`."""
    draw = Draw(len(images), generator)
    size = draw.draw_between(0.15, 1.0).sqrt()
    log_ratio = draw.draw_between(math.log(3 / 4), math.log(4 / 3))
    ratio = torch.exp(log_ratio / 2)
    height = (size * ratio).clamp(max=1)
    width = (size / ratio).clamp(max=1)
    mirror = torch.where(draw.uniform() < 0.5, -1.0, 1.0)
    across = draw.draw_between(-1, 1) * (1 - width)
    down = draw.draw_between(-1, 1) * (1 - height)
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
    bright = x * draw.draw_between(0.6, 1.4)
    mean = bright.mean((1, 2, 3), keepdim=True)
    contrast = draw.draw_between(0.6, 1.4)
    contrasted = mean + (bright - mean) * contrast
    grey = contrasted.mean(1, keepdim=True)
    saturation = draw.draw_between(0.2, 1.8)
    saturated = grey + (contrasted - grey) * saturation
    angle = draw.draw_between(-1.0, 1.0)
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


def write_encoder(
    out: Path,
    /,
    *,
    steps: Annotated[Whole, Parameter(validator=Number(gte=2))] = 7800,
    batch_size: Annotated[Whole, Parameter(validator=Number(gte=2))] = 1024,
    seed: Whole = 0,
    device: str = "cpu",
) -> None:
    """Train the encoder of `SyntheticEncoder` anew, and write weights in half precision and a log.

    Args:
        out: The file of weights (safetensors).
        steps: Steps; the package's encoder took 7,783.
        batch_size: Images a step.
        seed: Public seed of images, views and weights.
        device: cpu or cuda.

    Raises:
        ConfigError: another device.
        CheckpointError: the disk cannot take the file.
    """
    if device != "cpu" and not device.startswith("cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    began = time.perf_counter()
    losses: list[tuple[int, float]] = []
    torch.manual_seed(seed)
    with Progress(console=open_console()) as progress:
        task = progress.add_task("encoder", total=steps)

        def report(step: int, loss: float) -> None:
            losses.append((step, round(loss, 4)))
            progress.update(task, completed=step, description=f"encoder, loss {loss:.3f}")

        encoder = pretrain_encoder(
            Encoder(), steps=steps, batch_size=batch_size, seed=seed, device=device, report=report
        )
    state = {
        name: x.half().cpu().contiguous()
        for name, x in encoder.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    place_file(out, lambda part: save_file(state, part))
    facts = {
        "steps": steps,
        "batch_size": batch_size,
        "seed": seed,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - began, 1),
        "sha256": file_digest(out),
        "losses": losses,
    }
    log = out.with_suffix(".json")
    write_text(log, json.dumps(facts))
    open_console().print(f"{out}: SHA-256 {facts['sha256']}; losses in {log}", soft_wrap=True)
