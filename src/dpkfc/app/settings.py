"""Every setting of a run: type, range and meaning, in one dataclass for each section of a file.

A setting has one name: its flag, its key in its section of a TOML file, and its attribute.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from dpkfc.app.methods import METHODS
from dpkfc.app.owndata.cells import is_unicode
from dpkfc.app.toml import ConfigError, nearest
from dpkfc.clipping import CLIPPINGS
from dpkfc.config import SAMPLERS
from dpkfc.privacy.dp_accountants import ACCOUNTANTS
from dpkfc.privacy.grid import AUTO, CORRELATED, NOISES
from dpkfc.report.officer import Declared
from dpkfc.terminal import argument_text

OPTIMIZERS = ("sgd", "adam", "adam-bc", "sofim")
PRECONDITIONERS = ("none", "kfac", "ngd", "adadps", "gep", "moments")
FILTERS = (
    "none",
    "disk",
    "disk-look-ahead",
    "storm",
    "ema",
    "doppler",
    "doppler-first-order",
    "doppler-chebyshev",
)
SCHEDULES = ("constant", "linear", "cosine")
AUGMENTS = ("", "reflect-pad-crop-flip", "random-crop", "horizontal-flip")
RECIPE_DEFAULTS = "defaults of the recipe; the search behind them, if any, is not covered by ε"
SOURCES = ("pink", "dead-leaves", "white", "tokens", "public", "private-oracle")
# Modules that need torch hold the same words; a test compares them.
LABELS = ("model", "uniform", "given")
LIKELIHOODS = ("categorical", "gaussian", "bernoulli")
LOGGERS = ("tensorboard", "mlflow", "wandb")
READOUTS = ("whitened", "natural", "inverse")
STOPS = ("public", "private-loss", "private-error")


# --------------------------------------------------------------------------------------------------
# How a setting is declared. Many settings are fields of dataclasses of the library, which give
# them default and meaning; `library_values` gives them back under the names of the fields.


def _setting(
    default: Any,
    text: str = "",
    *,
    owners: str = "",
    key: str = "",
    choices: Iterable[str] = (),
    words: Mapping[str, float] | None = None,
    **bounds: float,
) -> Any:
    """Declare a setting.

    Args:
        default: its value where nothing is given.
        text: what it means; empty takes the docstring of the first owner.
        owners: names of the dataclasses of the library with that field, which need torch and are
            not imported here. The default is the field's, except where 0 or an empty text means
            "not given".
        key: name of the field, where it is another one.
        choices: allowed texts.
        words: words of the library that numbers stand for here.
        bounds: least, above, most or below: what a number must keep.
    """
    metadata = {
        "help": text,
        "key": key,
        "owners": owners.split(),
        "choices": tuple(choices),
        "words": words or {},
        "bounds": bounds,
    }
    return field(default=default, metadata=metadata)


_privacy = partial(_setting, owners="PrivacyConfig")
_kfac = partial(_setting, owners="KFAC")


class _Section:
    """Settings that check themselves.

    Raises:
        ConfigError: a value of the wrong type or outside its range, or an unknown choice.
    """

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):  # type: ignore[arg-type]
            value = _check_value(setting, getattr(self, setting.name))
            object.__setattr__(self, setting.name, value)


_ACCEPTED = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text in quotes",
    "bool": "true or false",
}


def _check_value(setting: dataclasses.Field[Any], value: Any) -> Any:
    """Return a value in the type of its setting.

    Raises:
        ConfigError: naming the setting, the value and what is expected.
    """
    name, kind = setting.name, str(setting.type)
    if not isinstance(value, _ACCEPTED[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"{name} must be {_KINDS[kind]}, got {value!r} ({type(value).__name__})")
    if isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(f"{name} must be a number of at most 64 bits")
    if isinstance(value, str) and not is_unicode(value):
        raise ConfigError(f"{name} contains half a character, which UTF-8 cannot store: {value!r}")
    if kind == "float":
        value = float(value)
        if not math.isfinite(value):
            raise ConfigError(f"{name} must be finite, got {value}")
    _check_range(setting, value)
    return value


def _check_range(setting: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value outside the choices or the range of its setting, before any data are read."""
    name, rules = setting.name, setting.metadata
    if rules["choices"] and value not in rules["choices"]:
        known = [choice for choice in rules["choices"] if choice]
        raise ConfigError(f"unknown {name} {value!r}; {nearest(value, known)}")
    for bound, limit in rules["bounds"].items():
        is_kept, words = _BOUNDS[bound]
        if not is_kept(value, limit):
            raise ConfigError(f"{name} must be {words} {limit:g}, got {value}")


_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


# --------------------------------------------------------------------------------------------------
# The sections. An empty text, and a zero where the help says so, mean "not given".


@dataclass(frozen=True, kw_only=True)
class RunSettings(_Section):
    """What is run, and where."""

    recipe: str = _setting("", "which recipe, for example mnist-cnn; a wrong name shows the list")
    method: str = _setting(
        "dp-kfc-a", "what a run starts from; see `dpkfc methods`", choices=METHODS
    )
    seed: int = _setting(
        0, "public seed of initial weights and probes; never of the noise", least=0
    )
    smoke: bool = _setting(False, "a few steps on a slice of the data, as a trial")
    eval_on: str = _setting("test", "what accuracy is measured on", choices=("test", "validation"))
    evaluate_every: int = _setting(
        0, "steps between evaluations; 0: once an epoch or more", least=0
    )
    patience: int = _setting(
        0, "evaluations without a lower loss on public_validation; 0: no early end", least=0
    )
    stop_on: str = _setting(
        "public",
        "what decides an early end; private-…: noisy means on the validation split",
        choices=STOPS,
    )
    chosen_by: str = _setting(
        RECIPE_DEFAULTS, "how these settings were chosen; printed on the privacy card"
    )
    log: str = _setting("", "also log to this tool; empty: none", choices=("", *LOGGERS))
    log_private: bool = _setting(
        False, "log numbers too that ε does not cover; the card names them"
    )
    audit: int = _setting(
        0, "canaries that train along and bound ε from below; 0: none, else 20 or more", least=0
    )
    out: str = _setting("", "run folder; empty: a new folder below runs/")
    num_workers: int = _setting(0, "loader processes", least=0)
    threads: int = _setting(0, "numerical threads; 0: torch's own choice", least=0)
    device: str = _setting("cpu", "torch device")


@dataclass(frozen=True, kw_only=True)
class DataSettings(_Section):
    """Examples, private and public: a recipe's, or a user's own."""

    data: str = _setting(
        "", "own data: a CSV, Parquet, Feather or JSONL file, or a folder of images"
    )
    target: str = _setting("", "column of own data that is learned")
    schema: str = _setting("", "TOML file with what is public of own data; dpkfc schema")
    class_weights: str = _setting(
        "", "public factors of the losses before the clip, '1 5' for two classes; empty: equal"
    )
    threshold: float = _setting(
        0.5,
        "probability of the second of two classes from which it is the answer",
        above=0,
        below=1,
    )
    bounds: str = _setting(
        "",
        "private: find bounds that the schema leaves out, for a part of ε",
        choices=("", "private"),
    )
    text: str = _setting("", "key of the text in a JSONL file")
    label_file: str = _setting("", "table of image files and their labels")
    task: str = _setting("", "module:function that returns a dpkfc.app.owndata.tasks.Task")
    data_dir: str = _setting(
        "", "folder with the data set; empty: $DPKFC_DATA, then Hugging Face datasets"
    )
    vocabulary: str = _setting(
        "hashed", "how a bag of words is made: hashed, which fits nothing to private text"
    )
    keep_encoded: bool = _setting(
        False, "keep the encoded rows of a table, which are private, as encoded.npy in the folder"
    )
    validation_size: int = _setting(0, "examples cut from the training set for validation", least=0)
    split_seed: int = _setting(0, "public seed of the validation split", least=0)
    augment: str = _setting(
        "", "random change of every view of an image; empty: none", choices=AUGMENTS
    )
    public_data: str = _setting(
        "", "safetensors file of public inputs (and labels) for `public` and pre-training"
    )
    public_validation: str = _setting(
        "", "safetensors file of public inputs and labels, whose loss decides an early end"
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_Section):
    """Where weights start from."""

    knots: int = _setting(
        16, "places of the curve of a number in a table; 0: a straight line", least=0
    )
    pretrained: str = _setting(
        "", "folder or file of public pretrained weights, for recipes that start from some"
    )
    pretrain_epochs: int = _setting(
        0, "epochs on labelled public_data before the private run; 0: none", least=0
    )
    pretrain_lr: float = _setting(
        0.1, "learning rate of those epochs (SGD, momentum 0.9, cosine)", above=0
    )


@dataclass(frozen=True, kw_only=True)
class PrivacySettings(_Section):
    """`PrivacyConfig`, and the arguments of `calibrate` and `with_noise`."""

    epsilon: float = _setting(3.0, "target ε of the whole run", above=0)
    delta: float = _setting(1e-05, "target δ of the whole run", above=0)
    budget: str = _setting(
        "", "budget of the dataset that all runs on it charge (TOML); see dpkfc budget"
    )
    moments_share: float = _setting(
        0.3, "part of μ² that the release of second moments takes (dp-moments)", above=0, most=0.9
    )
    bounds_share: float = _setting(
        0.25, "part of ε that finding bounds would cost alone", above=0, most=0.9
    )
    private_scores: float = _setting(
        0.0,
        "part of ε that noisy scores on the test split would cost alone; 0: scores without noise",
        least=0,
        most=0.9,
    )
    stop_share: float = _setting(
        0.25, "part of ε that private evaluations would cost alone", above=0, most=0.9
    )
    stop_most_loss: float = _setting(4.0, "bound to which private-loss clamps each loss", above=0)
    noise_multiplier: float = _setting(
        0.0, "σ, given; 0: the smallest one that keeps (ε, δ)", least=0
    )
    epochs: float = _setting(5.0, "expected passes over the data, where steps is 0", above=0)
    steps: int = _setting(0, "number of steps; 0: as epochs say", least=0)
    expected_batch_size: int = _privacy(
        256,
        "B, the mean size of a batch and divisor of every noisy sum; 0: all examples",
        least=0,
    )
    max_grad_norm: float = _privacy(
        1.0,
        "C, in the preconditioned space; 0: as examples, features and ε say (dp-moments)",
        least=0,
    )
    clipping: str = _privacy("flat", "how examples are bounded", choices=CLIPPINGS)
    automatic_gamma: float = _privacy(0.01, above=0)
    noise: str = _privacy(
        "gaussian",
        "rounded: sum and noise on one grid; correlated over steps; auto: where it is better",
        choices=(*NOISES, CORRELATED, AUTO),
    )
    bands: int = _privacy(
        0,
        "steps that share correlated noise; 0: the number with the smallest predicted error",
        least=0,
    )
    augmentations: int = _privacy(1, least=1)
    sampler: str = _privacy("poisson", "how batches are drawn", choices=SAMPLERS)
    max_batch_size: int = _privacy(
        0,
        "most examples in a batch of truncated_poisson; 0: no bound",
        least=0,
    )
    uncertified: bool = _privacy(
        False,
        "allow a sampler without a certified ε (stamped on the card)",
    )
    accountant: str = _privacy(
        "",
        "pld or rdp; empty: the one that suits the sampler",
        choices=("", *ACCOUNTANTS),
    )
    readout: str = _privacy(
        "whitened",
        "from the coordinates of the clip to the step",
        choices=READOUTS,
    )
    weight_average: float = _setting(
        0.0, "decay of averaged weights, which are evaluated; 0: none", least=0
    )
    average_from_start: bool = _setting(
        False, "one decay from the first step on, instead of a warm-up that forgets faster"
    )
    max_physical_batch_size: int = _privacy(
        0,
        "rows in memory at once; 0: all; -1: as many as fit",
        least=-1,
        words={"auto": -1},
    )
    pad_to_multiple: int = _privacy(
        0,
        "micro-batches are padded to a multiple; 0: not at all",
        least=0,
    )
    norm_methods: str = _privacy(
        "",
        "norms of single layers, for example 'conv1=gram head=materialised'",
    )
    test_mode: bool = _setting(
        False, "repeatable noise from the seed: NOT PRIVATE, stamped on the card"
    )


@dataclass(frozen=True, kw_only=True)
class PreconditionerSettings(_Section):
    """Coordinates of clip and noise, and the probe that curvature is measured on."""

    preconditioner: str = _setting("none", "coordinates of clip and noise", choices=PRECONDITIONERS)
    source: str = _setting("pink", "where curvature comes from", choices=SOURCES)
    output_source: str = _setting(
        "", "another source for output factors G; empty: the same", choices=("", *SOURCES)
    )
    zipf_exponent: float = _setting(
        1.0, "exponent of Zipf's law of token noise; 0: uniform tokens", least=0
    )
    power_exponent: float = _setting(1.0, owners="PinkNoise", least=0)
    leaves: int = _setting(32, owners="DeadLeaves", least=1)
    refine: int = _setting(
        0, "moves of probe images towards classes of the released model; 0: none", least=0
    )
    probe_size: int = _kfac(256, least=1)
    every: int = _setting(50, owners="KFAC NGD AdaDPS GEP", least=1)
    labels: str = _setting("model", "labels of the probe", owners="KFAC NGD", choices=LABELS)
    likelihood: str = _setting(
        "categorical",
        "of the output, for the probe's loss",
        owners="KFAC NGD AdaDPS GEP",
        choices=LIKELIHOODS,
    )
    sides: str = _kfac("input", choices=("input", "both", "output"))
    damping: float = _kfac(0.1, above=0)
    damping_mode: str = _kfac("relative", choices=("relative", "absolute"))
    gamma: float = _kfac(0.0, least=0)
    exponent: float = _kfac(0.5, above=0, most=0.5)
    scale: str = _kfac(
        "balanced",
        "scale of the factors and of the whole preconditioner",
        choices=("probe", "trace", "balanced", "raw"),
    )
    sharing: str = _kfac("expand", choices=("expand", "reduce"))
    control: str = _kfac(
        "none",
        "random eigenvectors with the same spectrum",
        choices=("none", "random"),
    )
    max_factor_size: int = _setting(4096, owners="KFAC NGD", least=1)
    oversize: str = _kfac("diagonal", choices=("diagonal", "identity", "low_rank"))
    ranks: str = _kfac(
        "",
        "eigenpairs of single sides, for example 'conv1.A=32 head.A=0'; 0: all",
    )
    max_rank: int = _kfac(
        32,
        "eigenpairs kept of sides four times as wide or more; 0: all",
        least=0,
    )
    tail_mass: float = _kfac(0.0, least=0)
    layer_rules: str = _kfac(
        "",
        "kinds of layers to precondition, for example 'linear conv'; empty: all",
    )
    factor_decay: float = _kfac(0.9, key="decay", least=0)
    later_probe_size: int = _kfac(
        0,
        "probe examples of later refreshes, averaged factors; 0: a sixteenth",
        least=0,
    )
    factor_drift: float = _kfac(
        0.0,
        key="drift",
        text="a refresh that shows less movement keeps the preconditioner; 0: never",
        least=0,
    )
    lambda_safe: float = _setting(0.0025, owners="NGD", above=0)
    lambda_base: float = _setting(
        0, "λ_base of DP-NGD; 0: min(1e-4, λ_safe / 10)", owners="NGD", least=0
    )
    ngd_warm: float = _setting(0.1, owners="NGD", key="warm", least=0)
    ngd_power: float = _setting(10.0, owners="NGD", key="power", above=0)
    ngd_order: str = _setting(
        "split",
        "DP-NGD and its ablations",
        owners="NGD",
        key="order",
        choices=("split", "before", "after"),
    )
    adadps_floor: float = _setting(0.001, owners="AdaDPS", key="floor", above=0)
    gep_rank: int = _setting(100, owners="GEP", key="rank", least=1)
    gep_embedding_norm: float = _setting(5.0, owners="GEP", key="embedding_norm", above=0)
    gep_residual_norm: float = _setting(
        2.0,
        "S₂ of GEP; 0 drops the residual (B-GEP)",
        owners="GEP",
        key="residual_norm",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class PostprocessSettings(_Section):
    """What happens to releases before the optimizer."""

    filter: str = _setting(
        "none", "filter of releases over time; see docs/methods", choices=FILTERS
    )
    filter_kappa: float = _setting(
        0.7,
        "κ, weight of the new release (DiSK, storm, ema, first order)",
        owners="DiSK",
        key="kappa",
        above=0,
    )
    disk_gamma: float = _setting(0.5, owners="DiSK", key="gamma")
    doppler_cutoff: float = _setting(
        0.1, "cutoff of the Butterworth filter, fraction of the Nyquist rate", above=0
    )
    filter_momentum: bool = _setting(
        False, "allow momentum behind a filter", owners="DiSK", key="momentum_allowed"
    )
    adam_bc_floor: float = _setting(
        0.0,
        "γ' of DP-AdamBC, on v; 0: as adam_bc_resolution says",
        owners="AdamBC",
        key="floor",
        least=0,
        words={"auto": 0.0},
    )
    adam_bc_resolution: float = _setting(
        2.0,
        "γ' of DP-AdamBC in units of what v resolves",
        owners="AdamBC",
        key="resolution",
        above=0,
    )
    sofim_rho: float = _setting(0.5, "ρ of the SOFIM step", owners="SOFIM", key="rho", above=0)
    sofim_beta: float = _setting(0.9, "β of the SOFIM step", owners="SOFIM", key="beta", least=0)
    sofim_direction: str = _setting(
        "gradient", owners="SOFIM", key="direction", choices=("gradient", "momentum")
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(_Section):
    """The optimizer and its learning rate."""

    optimizer: str = _setting(
        "", "which optimizer takes the step; empty: as the method says", choices=("", *OPTIMIZERS)
    )
    lr: float = _setting(0.001, "learning rate", above=0)
    momentum: float = _setting(0.9, "momentum of SGD", least=0, below=1)
    nesterov: bool = _setting(False, "Nesterov momentum")
    weight_decay: float = _setting(0.0, "after the release, never in a clipped gradient", least=0)
    schedule: str = _setting("constant", "learning rate after the warm-up", choices=SCHEDULES)
    schedule_steps: int = _setting(
        0, "steps of schedule and warm-up together; 0: the plan's", least=0
    )
    warmup_steps: int = _setting(
        0, "first steps, in which the learning rate rises linearly", least=0
    )


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, as plain values, so that a TOML file holds them exactly.

    Raises:
        ConfigError: settings that contradict one another.
    """

    run: RunSettings = RunSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    privacy: PrivacySettings = PrivacySettings()
    preconditioner: PreconditionerSettings = PreconditionerSettings()
    postprocess: PostprocessSettings = PostprocessSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    card: Declared = Declared()

    def __post_init__(self) -> None:
        self._resolve_optimizer()
        self._check()
        parse_pairs("ranks", self.preconditioner.ranks)
        parse_pairs("norm_methods", self.privacy.norm_methods)

    def _resolve_optimizer(self) -> None:
        """Take the optimizer of the method unless one is given, and refuse a contradiction."""
        method, given = METHODS[self.run.method], self.optimizer.optimizer
        preset = method.settings.get("optimizer", "")
        if method.defines_optimizer and given not in ("", preset):
            raise ConfigError(
                f"method = {self.run.method!r} means optimizer = {preset!r}, got {given!r}; "
                "leave optimizer out, or take method = 'dp-kfc'"
            )
        resolved = dataclasses.replace(self.optimizer, optimizer=given or preset or "adam")
        object.__setattr__(self, "optimizer", resolved)

    def _check(self) -> None:
        """Refuse settings that contradict one another."""
        run, data, privacy = self.run, self.data, self.privacy
        if run.eval_on == "validation" and data.validation_size == 0:
            raise ConfigError(
                "eval_on = 'validation' needs validation_size > 0, examples cut from the training "
                "set"
            )
        if privacy.augmentations > 1 and not data.augment:
            raise ConfigError(
                f"augmentations = {privacy.augmentations} without augment gives equal views; "
                f"give augment, one of {' | '.join(AUGMENTS[1:])}"
            )
        rule_of_clip = ("moments", "none")
        if not privacy.max_grad_norm and self.preconditioner.preconditioner not in rule_of_clip:
            raise ConfigError(
                "max_grad_norm = 0 is for preconditioner = 'moments', whose inputs have a known"
                " length; give C"
            )
        longest = self.optimizer.schedule_steps
        if privacy.steps and longest > privacy.steps:
            raise ConfigError(
                f"schedule_steps = {longest} is longer than the plan of {privacy.steps} steps"
            )
        has_momentum = self.optimizer.optimizer == "sgd" and self.optimizer.momentum > 0
        if self.optimizer.nesterov and not has_momentum:
            raise ConfigError("nesterov = true needs optimizer = 'sgd' and momentum above 0")
        if run.log_private and not run.log:
            raise ConfigError(f"log_private = true needs log, one of {', '.join(LOGGERS)}")
        curvature = self.preconditioner
        needed = ""
        if self.model.pretrain_epochs:
            needed = "pretrain_epochs"
        elif self.uses_preconditioner and "public" in (curvature.source, curvature.output_source):
            needed = "source = 'public'"
        if needed and not data.public_data:
            raise ConfigError(
                f"{needed} needs public_data, a safetensors file with `inputs` (and `labels`)"
            )
        if not self.stops_privately and (run.patience > 0) != bool(data.public_validation):
            raise ConfigError(
                f"patience = {run.patience} and public_validation = {data.public_validation!r} do"
                " not go together; give both or none"
            )

    @cached_property
    def values(self) -> dict[str, Any]:
        """All settings by their names."""
        sections = [vars(getattr(self, section)) for section in SECTIONS]
        return {name: value for section in sections for name, value in section.items()}

    def change(self, **settings: Any) -> RunConfig:
        """Return these settings with others by their names."""
        return make_config(**{**self.values, **settings})

    @property
    def stops_privately(self) -> bool:
        """Whether noisy evaluations on held-out private examples decide an early end."""
        return self.run.stop_on != "public"

    @property
    def uses_preconditioner(self) -> bool:
        """Whether gradients are preconditioned."""
        return self.preconditioner.preconditioner != "none"


SECTIONS = tuple(section.name for section in dataclasses.fields(RunConfig))
_OF_SECTION = {
    section.name: dataclasses.fields(section.default)  # type: ignore[arg-type]
    for section in dataclasses.fields(RunConfig)
}
# Every setting by its name, and the section that it stands in.
SETTINGS = {setting.name: setting for fields in _OF_SECTION.values() for setting in fields}
SECTION_OF = {setting.name: name for name, fields in _OF_SECTION.items() for setting in fields}


def make_config(**settings: Any) -> RunConfig:
    """Return the settings of a run from values by their names; others have their defaults.

    Raises:
        ConfigError: an unknown name, or as of the sections and `RunConfig`.
    """
    by_section: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in settings.items():
        check_name(name, "settings")
        by_section[SECTION_OF[name]][name] = value
    try:
        card = Declared(**by_section.pop("card"))
    except ValueError as error:
        # A card shows these, so they must be fit to be shown before anything is trained.
        raise ConfigError(str(error)) from None
    sections = {name: type(getattr(RunConfig, name)) for name in by_section}
    made = {name: sections[name](**values) for name, values in by_section.items()}
    return RunConfig(card=card, **made)


def check_name(name: str, where: str) -> None:
    """Refuse a name that no setting has.

    Raises:
        ConfigError: with the nearest name.
    """
    if name not in SETTINGS:
        raise ConfigError(f"{where}: unknown key {name!r}; {nearest(name, SETTINGS)}")


def explain_setting(name: str) -> str:
    """Return what a setting means, with the classes that it belongs to if only some have it."""
    rules = SETTINGS[name].metadata
    owners = rules.get("owners", ())
    text = rules.get("help", "")
    if owners and not text:
        # The first clause.
        documented = argument_text(_find_owner(owners[0]), library_key(name))
        text = re.split(r"(?<!et al)[.:;] ", documented)[0].removesuffix(".")
    text = text or argument_text(Declared, name)
    shown = SECTION_OF[name] in ("preconditioner", "postprocess") and owners
    return f"{', '.join(owners)}: {text}" if shown else text


def library_key(name: str) -> str:
    """Return the name of the field of the library that a setting is."""
    key: str = SETTINGS[name].metadata["key"]
    return key or name


def _find_owner(name: str) -> type:
    """Return a dataclass of the library by its name; its module needs torch."""
    from dpkfc.config import PrivacyConfig
    from dpkfc.curvature import GEP, KFAC, NGD, AdaDPS, DeadLeaves, PinkNoise
    from dpkfc.postprocess import SOFIM, AdamBC, DiSK

    known = (PrivacyConfig, GEP, KFAC, NGD, AdaDPS, DeadLeaves, PinkNoise, SOFIM, AdamBC, DiSK)
    return next(owner for owner in known if owner.__name__ == name)


def library_values(config: RunConfig, owner: type) -> dict[str, Any]:
    """Return the settings that are fields of a dataclass of the library, as its arguments.

    Raises:
        ConfigError: a number in a list of names and numbers is not a whole number.
    """
    kinds = {found.name: str(found.type) for found in dataclasses.fields(owner)}
    values = {}
    for name, setting in SETTINGS.items():
        if owner.__name__ in setting.metadata.get("owners", ()):
            key = library_key(name)
            values[key] = _library_value(setting, config.values[name], kinds[key])
    return values


def _library_value(setting: dataclasses.Field[Any], value: Any, kind: str) -> Any:
    """Return the value of a setting in the type of a field of the library."""
    words = {number: word for word, number in setting.metadata["words"].items()}
    value = words.get(value, value)
    if kind.startswith("Mapping"):
        pairs = parse_pairs(setting.name, value)
        return _whole_numbers(setting.name, pairs) if "[str, int]" in kind else pairs
    if kind.startswith("tuple"):
        value = tuple(value.replace(",", " ").split())
    return value or None if "None" in kind else value


def _whole_numbers(setting: str, pairs: Mapping[str, str]) -> dict[str, int]:
    for name, text in pairs.items():
        if not text.isdecimal():
            pair = f"{name}={text}"
            raise ConfigError(f"{setting} takes whole numbers, 0 for all eigenpairs; got {pair!r}")
    return {name: int(text) for name, text in pairs.items()}


def parse_pairs(setting: str, text: str) -> dict[str, str]:
    """Return the values of `a=1 b=2` by name.

    Raises:
        ConfigError: naming the setting and a part without a name or a value, or with a name that
            stood before.
    """
    values: dict[str, str] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.rpartition("=")
        if not name or not value or name in values:
            raise ConfigError(
                f"{setting} takes NAME=VALUE with spaces between, each name once; got {part!r}"
            )
        values[name] = value
    return values
