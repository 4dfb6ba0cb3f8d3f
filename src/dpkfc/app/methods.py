"""The methods by name: each is a set of settings that a run starts from, never a class or a loop.

The settings of a method replace what a recipe's file says of all methods. What the file says of
this method, a file given with `--config` and flags replace them in turn. Each row also says where
the method acts in a step, what it needs and costs, and where it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of `dpkfc methods`.

    Attributes:
        name: as given to `--method`.
        label: in tables and plots.
        settings: settings that differ from the defaults of a run.
        acts: the parts of a step that it changes: gradient, coordinates, clip, release, read-out,
            filter, optimizer, weights, start.
        side_data: data that it needs next to the private data.
        privacy: extra privacy cost.
        state: numbers kept between steps, d being the parameters.
        cost: of a step, against DP-SGD.
        source: paper, with equation or algorithm.
        equation: what it does, in one line.
        page: its page in docs/methods.
        like: the method whose part of a recipe's file is used where the file has no part for this
            one.
        without_momentum: whether the learning rate of that part was chosen with momentum m. It is
            then divided by 1 − m, which gives steps of the same length; see
            `settings.rate_without_momentum`.
        defines_optimizer: whether another optimizer would be another method.
    """

    name: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    acts: str
    side_data: str = "none"
    privacy: str = "none"
    state: str
    cost: str
    source: str
    equation: str
    page: str
    like: str = "dp-sgd"
    without_momentum: bool = False
    defines_optimizer: bool = False


_ABADI = "Abadi et al. 2016, Algorithm 1"
_KFC = "DP-KFC, Algorithms 1 and 2"
_KFC_STATE = "factors, Σ d_in² + d_out²"
_KFC_COST = "one pass over the probe a refresh; see docs/speed.md"
_ROWS = (
    Method(
        name="dp-sgd",
        label="DP-SGD",
        settings={"optimizer": "sgd"},
        acts="clip, release",
        state="d with momentum",
        cost="1",
        source=_ABADI,
        equation="g̃ = (Σ min(1, C/‖g_i‖) g_i + σCξ) / B;  θ ← θ − η g̃",
        page="dp-sgd.md",
        defines_optimizer=True,
    ),
    Method(
        name="dp-adam",
        label="DP-Adam",
        settings={"optimizer": "adam"},
        acts="optimizer",
        state="2d",
        cost="1",
        source="Kingma and Ba 2015 on the g̃ of DP-SGD",
        equation="θ ← θ − η m̂ / (√v̂ + ε)",
        page="dp-sgd.md",
        like="dp-adam",
        defines_optimizer=True,
    ),
    Method(
        name="dp-adamw",
        label="DP-AdamW",
        settings={"optimizer": "adam", "weight_decay": 0.01},
        acts="optimizer",
        state="2d",
        cost="1",
        source="Loshchilov and Hutter 2019 on the g̃ of DP-SGD",
        equation="θ ← (1 − η wd) θ − η m̂ / (√v̂ + ε)",
        page="dp-sgd.md",
        like="dp-adam",
        defines_optimizer=True,
    ),
    Method(
        name="dp-sgd-normalised",
        label="normalised DP-SGD",
        settings={"optimizer": "sgd", "clipping": "normalised", "max_grad_norm": 0.05},
        acts="clip",
        state="d with momentum",
        cost="1",
        source="De et al. 2022; a control",
        equation="g̃ = (Σ min(1/C, 1/‖g_i‖) g_i + σξ) / B",
        page="controls.md",
        defines_optimizer=True,
    ),
    Method(
        name="dp-sgd-pt",
        label="DP-SGD-PT",
        settings={"optimizer": "sgd", "pretrain_epochs": 200},
        acts="start",
        side_data="labelled public data",
        state="d with momentum",
        cost="1",
        source="DP-NGD, baselines",
        equation="θ₀ from training without privacy on public data; then DP-SGD",
        page="dp-sgd.md",
    ),
    Method(
        name="de-et-al",
        label="De et al.",
        settings={
            "optimizer": "sgd",
            "momentum": 0.0,
            "clipping": "normalised",
            "augmentations": 4,
            "augment": "reflect-pad-crop-flip",
            "weight_average": 0.999,
        },
        acts="gradient, clip, weights",
        state="d (average)",
        cost="K forward and backward passes",
        source="De et al. 2022",
        equation="g_i = (1/K) Σ_k ∇ℓ(aug_k(x_i)), then the clip; weights averaged",
        page="de-et-al.md",
        without_momentum=True,
    ),
    Method(
        name="adadps",
        label="AdaDPS",
        settings={"preconditioner": "adadps", "source": "public", "optimizer": "sgd"},
        acts="coordinates",
        side_data="public data",
        state="d",
        cost="one pass over public data a refresh",
        source="Li et al. 2022",
        equation="z_i = g_i / √(v + floor · mean v), v = E_public[ḡ²]",
        page="adadps.md",
    ),
    Method(
        name="pink-adadps",
        label="pink AdaDPS",
        settings={"preconditioner": "adadps", "optimizer": "sgd"},
        acts="coordinates",
        state="d",
        cost="one pass over the probe a refresh",
        source="DP-KFC, baselines",
        equation="AdaDPS with v from pink noise (or tokens) instead of public data",
        page="adadps.md",
    ),
    Method(
        name="dp2",
        label="DP²",
        settings={"preconditioner": "dp2", "optimizer": "sgd", "momentum": 0.0},
        acts="coordinates",
        state="2d",
        cost="1",
        source="Li, Liu et al. 2023",
        equation=(
            "v from the mean of s past releases; then s steps with z_i = g_i / √max(v, floor "
            "· mean v)"
        ),
        page="dp2.md",
        without_momentum=True,
    ),
    Method(
        name="gep",
        label="GEP",
        settings={"preconditioner": "gep", "source": "public", "optimizer": "sgd"},
        acts="coordinates, clip, release",
        side_data="public data",
        privacy="one Gaussian for both parts: (q, σ/√2)",
        state="k directions, k·d",
        cost="public gradients a refresh",
        source="Yu et al. 2021",
        equation="(L clip_S1(Lᵀg_i), clip_S2(g_i − L Lᵀ g_i)) released jointly",
        page="gep.md",
    ),
    Method(
        name="b-gep",
        label="B-GEP",
        settings={
            "preconditioner": "gep",
            "gep_residual_norm": 0.0,
            "source": "public",
            "optimizer": "sgd",
        },
        acts="coordinates, clip, release",
        side_data="public data",
        state="k directions, k·d",
        cost="public gradients a refresh",
        source="Yu et al. 2021",
        equation="L clip_S1(Lᵀ g_i) alone: biased",
        page="gep.md",
    ),
    Method(
        name="dp-kfc",
        label="DP-KFC",
        settings={"preconditioner": "kfac", "sides": "both"},
        acts="coordinates",
        side_data="none: pink or white noise, tokens; public data by choice",
        state=_KFC_STATE,
        cost=_KFC_COST,
        source=_KFC,
        equation=(
            "z_i = G^(−1/2) g_i A^(−1/2), clipped and noised; the update is the "
            "preconditioned gradient"
        ),
        page="dp-kfc.md",
    ),
    Method(
        name="dp-kfc-a",
        label="DP-KFC, A only",
        settings={"preconditioner": "kfac", "sides": "input"},
        acts="coordinates",
        side_data="none: pink or white noise, tokens; public data by choice",
        state="factors, Σ d_in²",
        cost=_KFC_COST,
        source="DP-KFC without G",
        equation=(
            "z_i = g_i A^(−1/2), clipped and noised; the update is the preconditioned gradient"
        ),
        page="dp-kfc.md",
        like="dp-kfc",
    ),
    Method(
        name="dp-kfc-natural",
        label="DP-KFC, natural",
        settings={
            "preconditioner": "kfac",
            "sides": "input",
            "readout": "natural",
            "optimizer": "sgd",
        },
        acts="coordinates, read-out",
        side_data="none: pink noise, dead leaves, tokens; public data by choice",
        state="factors, Σ d_in²",
        cost=_KFC_COST,
        source="DP-KFC with the read-out of DP-NGD",
        equation="z_i = g_i A^(−1/2), clipped and noised; θ ← θ − η z̃ A^(−1/2)",
        page="dp-kfc.md",
        like="dp-kfc",
    ),
    Method(
        name="dp-kfc-g",
        label="DP-KFC, G only",
        settings={"preconditioner": "kfac", "sides": "output"},
        acts="coordinates",
        state=_KFC_STATE,
        cost=_KFC_COST,
        source="a control",
        equation="z_i = G^(−1/2) g_i",
        page="controls.md",
        like="dp-kfc",
    ),
    Method(
        name="dp-kfc-random",
        label="random, same spectrum",
        settings={"preconditioner": "kfac", "sides": "both", "control": "random"},
        acts="coordinates",
        state=_KFC_STATE,
        cost=_KFC_COST,
        source="a control",
        equation="as DP-KFC with random orthogonal eigenvectors",
        page="controls.md",
        like="dp-kfc",
    ),
    Method(
        name="dp-ngd",
        label="DP-NGD",
        settings={
            "preconditioner": "ngd",
            "source": "public",
            "readout": "natural",
            "optimizer": "sgd",
            "momentum": 0.0,
            "max_grad_norm": 10.0,
            "every": 8,
        },
        acts="coordinates, read-out",
        side_data="public data",
        state="eigenvectors and Σ d_in·d_out eigenvalues",
        cost="gradients formed where a layer has several positions; eigenproblems every 8 steps",
        source="DP-NGD, Algorithms 1 and 2, Eq. 16 to 18",
        equation="z_i = F̃^(−1/2) g_i with max(Λ, λ_t); θ ← θ − η F̃^(−1/2) z̃",
        page="dp-ngd.md",
        without_momentum=True,
    ),
    Method(
        name="disk",
        label="DiSK",
        settings={"filter": "disk", "optimizer": "sgd", "momentum": 0.0},
        acts="gradient, filter",
        state="2d",
        cost="2 (look-ahead mode: 1)",
        source="DiSK, Algorithm 3",
        equation="g_i = c ∇ℓ(θ + γd) + (1−c) ∇ℓ(θ), clipped once; g̃ ← (1−κ) g̃ + κ g",
        page="disk.md",
        without_momentum=True,
    ),
    Method(
        name="doppler",
        label="DOPPLER",
        settings={"filter": "doppler", "optimizer": "sgd", "momentum": 0.0},
        acts="filter",
        state="4d",
        cost="1",
        source="Zhang et al. 2024",
        equation="m = Σ b_τ g̃_{t−τ} − Σ a_τ m_{t−τ};  m̂ = m / c",
        page="doppler.md",
    ),
    Method(
        name="dp-adambc",
        label="DP-AdamBC",
        settings={"optimizer": "adam-bc"},
        acts="optimizer",
        state="2d",
        cost="1",
        source="Tang et al. 2024",
        equation="θ ← θ − η m̂ / √max(v̂ − Φ, γ′), Φ the variance of the noise",
        page="adam-bc.md",
        like="dp-adam",
        defines_optimizer=True,
    ),
    Method(
        name="sofim",
        label="SOFIM step",
        settings={"optimizer": "sofim"},
        acts="optimizer",
        state="d",
        cost="1",
        source="DP-FedSOFIM, Algorithm 1",
        equation="θ ← θ − η (ρI + M Mᵀ)⁻¹ g̃",
        page="sofim.md",
        defines_optimizer=True,
    ),
)
METHODS: Mapping[str, Method] = {row.name: row for row in _ROWS}
