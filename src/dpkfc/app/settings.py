"""Every setting of a run, with its type, its range and what it means."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkfc.app.methods import METHODS
from dpkfc.postprocess.optimizers import AdamBC

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


# --------------------------------------------------------------------------------------------------
# Learning rates that a method borrows: a recipe's file has them for DP-SGD with momentum and for
# DP-Adam, and few others.
#
# A method whose steps are of another length for the same rate takes the rate that makes them alike.
# It is a start, not a search.

_DIGITS = 4


def without_momentum(like: Mapping[str, Any], own: Mapping[str, Any]) -> float:
    """The rate of a method without momentum, from one that was chosen with momentum m: divided by 1 − m.

    For DP-NGD, whose C is of another space, η C / √λ_safe is the η C of DP-SGD (Eq. 16), and η C where nothing is mapped back.
    A normalised clip releases gradients of length 1 whatever C is.

    Args:
        like: settings that the rate was chosen with.
        own: settings of the method.

    Raises:
        TypeError, ValueError, ArithmeticError: a setting is none that a run can have.
    """
    rate = _of(like, "lr") * (1 - _of(own, "momentum")) / (1 - _of(like, "momentum"))
    if own.get("preconditioner") == "ngd":
        rate *= _longest(like) / _longest(own) * (math.sqrt(_of(own, "lambda_safe")) if own["readout"] == "natural" else 1.0)
    return _positive(rate)


def of_adam(rate: float, own: Mapping[str, Any]) -> float:
    """The rate of DP-AdamBC from one of DP-Adam: times √(γ′/Φ), as most entries of v are noise.

    There DP-Adam divides by √Φ and DP-AdamBC by the root of its floor, which falls to 0.03 Φ times `adam_bc_resolution`; that of
    the first steps is larger, so a run of a hundred steps takes a larger rate. With a floor that is given the rate stays as it
    is: Φ is not known before the plan.

    Args:
        rate: of DP-Adam.
        own: settings of the method.

    Raises:
        TypeError, ValueError, ArithmeticError: a setting is none that a run can have.
    """
    if _of(own, "adam_bc_floor") > 0:
        return rate
    beta = AdamBC.betas[1]
    return _positive(rate * math.sqrt(_of(own, "adam_bc_resolution") * math.sqrt(2 * (1 - beta) / (1 + beta))))


def _longest(settings: Mapping[str, Any]) -> float:
    return 1.0 if settings.get("clipping", RunConfig.clipping) == "normalised" else _of(settings, "max_grad_norm")


def _of(settings: Mapping[str, Any], name: str) -> float:
    return float(settings.get(name, getattr(RunConfig, name)))


def _positive(rate: float) -> float:
    if not rate > 0:
        raise ValueError("a setting behind the learning rate is outside its range")
    return float(f"{rate:.{_DIGITS}g}")


# --------------------------------------------------------------------------------------------------
# Where the value of every setting comes from, and the TOML file that replays a run.
#
# Values are laid over one another: the defaults, the common part of the recipe's TOML, its part for
# a method that lends its own, the method's settings, the recipe's part for that very method, then
# for the optimizer under it, a file given with `--config`, and flags.

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
_PLACES = ("out", "data_dir", "pretrained", "public_data")
_FIELDS = {setting.name: setting for setting in dataclasses.fields(RunConfig)}


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the name and its permissions") from None
    except (ValueError, RecursionError) as error:  # bad syntax, bytes that are no UTF-8, brackets without end
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def flatten(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of a TOML file, whether written flat or in the sections of the written config.

    Args:
        content: the parsed file.
        where: name of the file, for errors.

    Raises:
        ConfigError: an unknown key or section (the nearest known one is named), or a key in the wrong section.
    """
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if not isinstance(value, Mapping):
            _known_key(key, where)
            flat[key] = value
            continue
        if key not in SECTIONS:
            shown = f"[{key}]" if key.isprintable() else repr(key)
            raise ConfigError(f"{where}: unknown section {shown}; {nearest(key, SECTIONS)}")
        for name, inner in value.items():
            section = _known_key(name, where).metadata["section"]
            if section != key:
                raise ConfigError(f"{where}: {name} stands in [{key}] and belongs into [{section}]")
            if name in flat:
                raise ConfigError(f"{where}: {name} is given twice, in [{key}] and outside of any section; leave one of them out")
            flat[name] = inner
    return flat


def chosen(file: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What a user chose: a TOML file under flags. `--epsilon` as a flag takes the place of a noise multiplier in the file.

    Raises:
        ConfigError: as `read_toml` and `flatten`; both ways to say how much noise there is.
    """
    written = {} if file is None else flatten(read_toml(file), str(file))
    if "epsilon" in flags:
        if flags.get("noise_multiplier"):
            raise ConfigError("--epsilon asks for the least noise that keeps it, --noise-multiplier gives it; leave one out")
        written.pop("noise_multiplier", None)
    return {**written, **flags}


def _known_key(key: str, where: str) -> dataclasses.Field[Any]:
    if key not in _FIELDS:
        raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, _FIELDS)}")
    return _FIELDS[key]


def layered(defaults: Mapping[str, Any], chosen: Mapping[str, Any], where: str = "recipe") -> RunConfig:
    """A run's settings from a recipe's defaults and what the user chose.

    Args:
        defaults: parsed TOML of the recipe. Beside settings it may hold `[method.NAME]`, settings of one method, and in
            it a table per optimizer, which apply when that method and optimizer are in force.
        chosen: flat settings of the user, which win.
        where: name of the defaults, for errors.

    Raises:
        ConfigError: as `flatten` and `RunConfig`.
    """
    common = {key: value for key, value in defaults.items() if key != "method" or not isinstance(value, Mapping)}
    per_method = defaults["method"] if isinstance(defaults.get("method"), Mapping) else {}
    settings = flatten(common, where)
    method = chosen.get("method", settings.get("method", RunConfig.method))
    known = METHODS.get(method) if isinstance(method, str) else None
    section = method if known is None or method in per_method else known.like
    of_method = dict(per_method.get(section, {})) if isinstance(section, str) else {}
    tables = {key: of_method.pop(key) for key in OPTIMIZERS if key in of_method}
    settings |= flatten(of_method, f"{where} [method.{section}]")
    preset = dict(known.settings) if known else {}
    before = dict(settings)
    settings |= {key: value for key, value in preset.items() if section != method or key not in of_method}
    optimizer = chosen.get("optimizer") or settings.get("optimizer") or "adam"
    if isinstance(optimizer, str) and optimizer in tables:
        settings |= flatten(tables[optimizer], f"{where} [method.{section}.{optimizer}]")
    found = {**settings, **{_known_key(key, "settings").name: value for key, value in chosen.items()}}
    if "lr" not in chosen and known is not None:
        borrowed = before.get("lr") if section == known.like != method else None
        adam = borrowed if known.like == "dp-adam" else None
        if "lr" not in of_method and isinstance(tables.get("adam"), Mapping):
            adam = tables["adam"].get("lr")
        with contextlib.suppress(TypeError, ValueError, ArithmeticError):  # a wrong value, which RunConfig names
            if borrowed and known.without_momentum and optimizer == "sgd":
                found["lr"] = without_momentum(before, found)
            elif adam and optimizer == "adam-bc" and optimizer not in tables:
                found["lr"] = of_adam(adam, found)
    return RunConfig(**found)


def of_the_run(config: RunConfig) -> dict[str, Any]:
    """The settings that decide what a run is; the others say where it runs and where its files lie."""
    return {
        name: getattr(config, name)
        for name, setting in _FIELDS.items()
        if setting.metadata["section"] != "machine" and name not in _PLACES
    }


def check_unchanged(config: RunConfig, begun: Mapping[str, Any], where: str) -> None:
    """A run that goes on has the settings that it was begun with.

    Args:
        config: settings now.
        begun: what `of_the_run` gave when it was begun; settings it does not name are not compared.
        where: name of the file with the settings, for the error.

    Raises:
        ConfigError: naming the first setting that has changed.
    """
    for name, value in of_the_run(config).items():
        if name in begun and begun[name] != value:
            raise ConfigError(
                f"{where}: {name} is {value!r}, and the run was begun with {begun[name]!r}; put that back to continue it, or "
                f"begin another run, with a budget of its own: dpkfc train --config {where} --out ANOTHER"
            )


def to_toml(config: RunConfig) -> str:
    """The settings as a TOML file that replays the run: every key, in sections, with what it means.

    `out` is left out, so that a replay gets a folder of its own.
    """
    lines = ["# Every setting of this run. Replay it with: dpkfc train --config config.toml"]
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for name, setting in _FIELDS.items():
            if setting.metadata["section"] == section and name != "out":
                text = f"{name} = {_toml_value(getattr(config, name))}"
                lines.append(f"{text:<36}  # {setting.metadata['help']}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        import tomli_w

        return tomli_w.dumps({"x": value}).split("=", 1)[1].strip()
    return repr(value)
