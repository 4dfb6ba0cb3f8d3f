"""Every setting of a run, with its type, its range and what it means."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dpkfc.recipes.methods import METHODS

__all__ = ["OPTIMIZERS", "SECTIONS", "ConfigError", "RunConfig", "named_values", "nearest"]

OPTIMIZERS = ("sgd", "adam", "adam-bc", "sofim")
PRECONDITIONERS = ("none", "kfac", "ngd", "adadps", "dp2", "gep")
FILTERS = ("none", "disk", "disk-look-ahead", "storm", "ema", "doppler", "doppler-first-order", "doppler-chebyshev")
READOUTS = ("whitened", "natural", "inverse")
SCHEDULES = ("constant", "linear", "cosine")
CLIPPINGS = ("flat", "automatic", "normalised", "per_layer")
SAMPLERS = ("poisson", "truncated_poisson", "fixed", "shuffle")
AUGMENTS = ("", "reflect-pad-crop-flip", "random-crop", "horizontal-flip")
RECIPE_DEFAULTS = "defaults of the recipe; the search behind them, if any, is not covered by ε"
SOURCES = ("pink", "dead-leaves", "white", "tokens", "public", "private-oracle")
LIKELIHOODS = ("categorical", "gaussian", "bernoulli")
STRUCTURES = ("shape", "auto", "measured")
SCALES = ("probe", "trace", "balanced", "raw")
SECTIONS = ("run", "privacy", "optimizer", "filter", "curvature", "machine")


class ConfigError(ValueError):
    """A setting that does not exist, has the wrong type, or lies outside its range."""


def _setting(
    default: Any,
    section: str,
    text: str,
    *,
    choices: Iterable[str] = (),
    least: float | None = None,
    above: float | None = None,
) -> Any:
    metadata = {"section": section, "help": text, "choices": tuple(choices), "least": least, "above": above}
    return field(default=default, metadata=types.MappingProxyType(metadata))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run; plain values, so that a TOML file holds them exactly.

    An empty text and a zero where the help says so mean "not given".

    Raises:
        ConfigError: a value of the wrong type or outside its range, an unknown choice, or settings that contradict.
    """

    recipe: str = _setting("", "run", "which recipe, for example mnist-cnn; see the README, or give a wrong one for the list")
    method: str = _setting("dp-kfc-a", "run", "what a run starts from; see `dpkfc methods`", choices=METHODS)
    data_dir: str = _setting("", "run", "folder with the data set; empty: $DPKFC_DATA, then Hugging Face datasets")
    seed: int = _setting(0, "run", "public seed of initial weights and probes; never of the noise", least=0)
    smoke: bool = _setting(False, "run", "a few steps on a slice of the data, to see that all is in place")
    pretrained: str = _setting("", "run", "folder or file of public pretrained weights, for recipes that start from some")
    vocabulary: str = _setting("hashed", "run", "how a bag of words is made: hashed, which fits nothing to private text")
    validation_size: int = _setting(0, "run", "examples cut from the training set for validation", least=0)
    split_seed: int = _setting(0, "run", "public seed of the validation split", least=0)
    eval_on: str = _setting("test", "run", "what accuracy is measured on", choices=("test", "validation"))
    evaluate_every: int = _setting(0, "run", "steps between evaluations; 0: once an epoch or more", least=0)
    pretrain_epochs: int = _setting(0, "run", "epochs on labelled public_data before the private run; 0: none", least=0)
    pretrain_lr: float = _setting(0.1, "run", "learning rate of those epochs (SGD, momentum 0.9, cosine)", above=0)
    chosen_by: str = _setting(RECIPE_DEFAULTS, "run", "how these settings were chosen; printed on the privacy card")
    out: str = _setting("", "run", "run folder; empty: a new folder below runs/")

    epsilon: float = _setting(3.0, "privacy", "target ε of the whole run", above=0)
    delta: float = _setting(1e-5, "privacy", "target δ of the whole run", above=0)
    noise_multiplier: float = _setting(0.0, "privacy", "σ, given; 0: the smallest one that keeps (ε, δ)", least=0)
    epochs: float = _setting(5.0, "privacy", "expected passes over the data; ignored when steps is given", above=0)
    steps: int = _setting(0, "privacy", "number of steps; 0: as epochs say", least=0)
    expected_batch_size: int = _setting(256, "privacy", "expected size of a logical batch, the divisor", least=1)
    max_grad_norm: float = _setting(1.0, "privacy", "clipping bound C", above=0)
    clipping: str = _setting("flat", "privacy", "how examples are bounded", choices=CLIPPINGS)
    automatic_gamma: float = _setting(0.01, "privacy", "stabiliser of automatic clipping", above=0)
    noise: str = _setting("gaussian", "privacy", "rounded: sum and noise on one grid", choices=("gaussian", "rounded"))
    augmentations: int = _setting(1, "privacy", "views of every example, averaged before the clip", least=1)
    augment: str = _setting("", "privacy", "random change of every view of an image; empty: none", choices=AUGMENTS)
    sampler: str = _setting("poisson", "privacy", "how batches are drawn", choices=SAMPLERS)
    max_batch_size: int = _setting(0, "privacy", "most examples in a batch of truncated_poisson; 0: no bound", least=0)
    uncertified: bool = _setting(False, "privacy", "allow a sampler without a certified ε (stamped on the card)")
    accountant: str = _setting("", "privacy", "pld or rdp; empty: what suits the sampler", choices=("", "pld", "rdp"))
    test_mode: bool = _setting(False, "privacy", "repeatable noise from the seed: NOT PRIVATE, stamped on the card")

    optimizer: str = _setting("", "optimizer", "what takes the step; empty: as the method says", choices=("", *OPTIMIZERS))
    lr: float = _setting(1e-3, "optimizer", "learning rate", above=0)
    momentum: float = _setting(0.9, "optimizer", "momentum of SGD", least=0)
    nesterov: bool = _setting(False, "optimizer", "momentum of Nesterov's kind")
    weight_decay: float = _setting(0.0, "optimizer", "after the release, never in a clipped gradient", least=0)

    schedule: str = _setting("constant", "optimizer", "learning rate after the warm-up", choices=SCHEDULES)
    schedule_steps: int = _setting(0, "optimizer", "steps of schedule and warm-up together; 0: the plan's", least=0)
    warmup_steps: int = _setting(0, "optimizer", "first steps, in which the learning rate rises linearly", least=0)
    weight_average: float = _setting(0.0, "optimizer", "decay of averaged weights, which are evaluated; 0: none", least=0)
    adam_bc_floor: float = _setting(0.0, "optimizer", "γ' of DP-AdamBC, on v; 0: as adam_bc_resolution says", least=0)
    adam_bc_resolution: float = _setting(2.0, "optimizer", "γ' of DP-AdamBC in units of what v resolves", above=0)
    sofim_rho: float = _setting(0.5, "optimizer", "ρ of the SOFIM step", above=0)
    sofim_beta: float = _setting(0.9, "optimizer", "β of the SOFIM step", least=0)
    sofim_direction: str = _setting("gradient", "optimizer", "what SOFIM maps", choices=("gradient", "momentum"))

    filter: str = _setting("none", "filter", "filter of releases over time; see docs/methods", choices=FILTERS)
    filter_kappa: float = _setting(0.7, "filter", "κ, weight of the new release (DiSK, storm, ema, first order)", above=0)
    disk_gamma: float = _setting(0.5, "filter", "γ of DiSK, in units of the last step")
    doppler_cutoff: float = _setting(0.1, "filter", "cutoff of the Butterworth filter, share of the Nyquist rate", above=0)
    filter_momentum: bool = _setting(False, "filter", "allow momentum behind a filter")

    preconditioner: str = _setting("none", "curvature", "coordinates of clip and noise", choices=PRECONDITIONERS)
    readout: str = _setting("whitened", "curvature", "from those coordinates to the step", choices=READOUTS)
    sides: str = _setting("input", "curvature", "factors that whiten", choices=("input", "both", "output"))
    damping: float = _setting(0.1, "curvature", "damping, relative to the mean eigenvalue or absolute", above=0)
    damping_mode: str = _setting("relative", "curvature", "meaning of damping", choices=("relative", "absolute"))
    gamma: float = _setting(0.0, "curvature", "γ inside the root, absolute damping only", least=0)
    exponent: float = _setting(0.5, "curvature", "exponent of the inverse root of each factor, at most 1/2", above=0)
    scale: str = _setting("balanced", "curvature", "scale of the factors and of the whole metric", choices=SCALES)
    every: int = _setting(50, "curvature", "steps between refreshes", least=1)
    sharing: str = _setting("expand", "curvature", "K-FAC for shared weights", choices=("expand", "reduce"))
    source: str = _setting("pink", "curvature", "where curvature comes from", choices=SOURCES)
    output_source: str = _setting("", "curvature", "another source for G; empty: the same", choices=("", *SOURCES))
    control: str = _setting("none", "curvature", "random eigenvectors with the same spectrum", choices=("none", "random"))
    zipf_exponent: float = _setting(1.0, "curvature", "exponent of Zipf's law of token noise; 0: uniform tokens", least=0)
    power_exponent: float = _setting(1.0, "curvature", "exponent of the power spectrum of pink noise", least=0)
    leaves: int = _setting(32, "curvature", "discs of an image of dead leaves", least=1)
    refine: int = _setting(0, "curvature", "moves of probe images towards classes of the released model; 0: none", least=0)
    probe_size: int = _setting(256, "curvature", "probe examples a refresh", least=1)
    labels: str = _setting("model", "curvature", "labels of the probe", choices=("model", "uniform", "given"))
    likelihood: str = _setting("categorical", "curvature", "of the output, for the probe's loss", choices=LIKELIHOODS)
    max_factor_size: int = _setting(4096, "curvature", "largest matrix that is decomposed", least=1)
    structure: str = _setting("shape", "curvature", "wide sides low-rank by shape, or by measured cost", choices=STRUCTURES)
    ranks: str = _setting("", "curvature", "eigenpairs of single sides, for example 'conv1.A=32 head.A=0'; 0: all")
    norm_methods: str = _setting("", "curvature", "norms of single layers, for example 'conv1=gram head=materialised'")
    max_rank: int = _setting(32, "curvature", "eigenpairs kept of sides four times as wide or more; 0: all", least=0)
    tail_mass: float = _setting(0.0, "curvature", "share of a factor's trace that a side may leave out; 0: none", least=0)
    factor_decay: float = _setting(0.0, "curvature", "share of the past in factors averaged over refreshes", least=0)
    later_probe_size: int = _setting(0, "curvature", "probe examples of later refreshes, averaged factors; 0: alike", least=0)
    factor_drift: float = _setting(0.0, "curvature", "a refresh that shows less movement keeps the metric; 0: never", least=0)
    oversize: str = _setting("diagonal", "curvature", "what a wider side becomes", choices=("diagonal", "identity", "low_rank"))
    layer_rules: str = _setting("", "curvature", "kinds of layers to whiten, for example 'linear conv'; empty: all")
    public_data: str = _setting("", "curvature", "safetensors file of public inputs (and labels) for `public` and pre-training")

    lambda_safe: float = _setting(0.0025, "curvature", "λ_safe of DP-NGD (Eq. 16)", above=0)
    lambda_base: float = _setting(0.0, "curvature", "λ_base of DP-NGD; 0: min(1e-4, λ_safe / 10)", least=0)
    ngd_order: str = _setting("split", "curvature", "DP-NGD and its ablations", choices=("split", "before", "after"))
    adadps_floor: float = _setting(1e-3, "curvature", "floor of v in AdaDPS, relative to its mean", above=0)
    dp2_phase: int = _setting(50, "curvature", "steps of a phase of DP²", least=1)
    dp2_ratio: float = _setting(1.0, "curvature", "learning rate of adaptive phases over that of plain ones", above=0)
    dp2_corrected: bool = _setting(False, "curvature", "subtract the noise from the second moments of DP²")
    gep_rank: int = _setting(100, "curvature", "directions of GEP", least=1)
    gep_embedding_norm: float = _setting(5.0, "curvature", "S₁ of GEP", above=0)
    gep_residual_norm: float = _setting(2.0, "curvature", "S₂ of GEP; 0 drops the residual (B-GEP)", least=0)

    max_physical_batch_size: int = _setting(0, "machine", "rows in memory at once; 0: all; -1: as many as fit", least=-1)
    pad_to_multiple: int = _setting(0, "machine", "micro-batches are padded to a multiple; 0: not at all", least=0)
    num_workers: int = _setting(0, "machine", "loader processes", least=0)
    threads: int = _setting(0, "machine", "numerical threads; 0: torch's own choice", least=0)
    device: str = _setting("cpu", "machine", "torch device")

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            object.__setattr__(self, setting.name, _checked(setting, getattr(self, setting.name)))
        preset = METHODS[self.method].settings.get("optimizer", "")
        if METHODS[self.method].defines_optimizer and self.optimizer not in ("", preset):
            raise ConfigError(
                f"method = {self.method!r} means optimizer = {preset!r}, got {self.optimizer!r}; leave optimizer out, or use a "
                "method that takes any, such as 'dp-kfc'"
            )
        object.__setattr__(self, "optimizer", self.optimizer or preset or "adam")
        if self.eval_on == "validation" and self.validation_size == 0:
            raise ConfigError("eval_on = 'validation' needs validation_size > 0, examples cut from the training set")
        if self.augmentations > 1 and not self.augment:
            raise ConfigError(
                f"augmentations = {self.augmentations} without augment would be so many equal views; "
                f"{_one_of('augment', AUGMENTS[1:])}"
            )
        if self.momentum >= 1:
            raise ConfigError(f"momentum must be below 1, got {self.momentum}: the steps would grow without end")
        if self.exponent > 0.5:
            raise ConfigError(f"exponent must be at most 0.5, got {self.exponent}")
        self._check_public_data()
        for name in ("ranks", "norm_methods"):
            named_values(name, getattr(self, name))
        if self.schedule_steps and self.steps and self.schedule_steps > self.steps:
            raise ConfigError(f"schedule_steps = {self.schedule_steps} is longer than the plan of {self.steps} steps")
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum > 0):
            raise ConfigError("nesterov = true needs optimizer = 'sgd' and momentum above 0")

    def _check_public_data(self) -> None:
        """A file where public examples are asked for."""
        sources = (self.source, self.output_source) if self.uses_preconditioner else ()
        needed = "pretrain_epochs" if self.pretrain_epochs else "source = 'public'" if "public" in sources else ""
        if needed and not self.public_data:
            raise ConfigError(f"{needed} needs public_data, a safetensors file with `inputs` (and `labels`)")

    @property
    def uses_preconditioner(self) -> bool:
        """Whether gradients are whitened."""
        return self.preconditioner != "none"


def named_values(setting: str, text: str) -> dict[str, str]:
    """`a=1 b=2` by name.

    Raises:
        ConfigError: naming the setting and the part that has no name, no value, or a name that stood before.
    """
    found: dict[str, str] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.rpartition("=")
        if not name or not value or name in found:
            raise ConfigError(f"{setting} takes NAME=VALUE with spaces between, each name once; got {part!r}")
        found[name] = value
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known word, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _one_of(name: str, choices: Iterable[str]) -> str:
    return f"give {name}, one of {' | '.join(choices)}"


def _fits_a_file(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _checked(setting: dataclasses.Field[Any], value: Any) -> Any:
    """The value in the type of its field.

    Raises:
        ConfigError: naming the field, the value and what is expected.
    """
    name, kind, rules = setting.name, str(setting.type), setting.metadata
    accepted = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}[kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind != "bool"):
        wanted = {"int": "an integer", "float": "a number", "str": "text in quotes", "bool": "true or false"}[kind]
        raise ConfigError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")
    if isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(f"{name} must be a number of at most 64 bits")
    if isinstance(value, str) and not _fits_a_file(value):
        raise ConfigError(f"{name} holds half a character, which no file can hold: {value!r}")
    value = float(value) if kind == "float" else value
    if rules["choices"] and value not in rules["choices"]:
        known = [choice for choice in rules["choices"] if choice]
        raise ConfigError(f"unknown {name} {value!r}; {nearest(value, known)} ({' | '.join(known)})")
    if kind == "float" and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value}")
    if rules["least"] is not None and value < rules["least"]:
        raise ConfigError(f"{name} must be at least {rules['least']}, got {value}")
    if rules["above"] is not None and value <= rules["above"]:
        raise ConfigError(f"{name} must be above {rules['above']}, got {value}")
    return value
