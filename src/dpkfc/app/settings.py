"""The methods and every setting of a run: type, range, meaning, and the TOML files of settings."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from dpkfc.app.toml import ConfigError, nearest, read_toml, tomllib
from dpkfc.clipping import CLIPPINGS
from dpkfc.config import SAMPLERS, PrivacyConfig
from dpkfc.curvature.diagonal import AdaDPS
from dpkfc.curvature.gep import GEP
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.likelihood import LABELS, LIKELIHOODS
from dpkfc.curvature.ngd import NGD
from dpkfc.curvature.noise_probes import DeadLeaves, PinkNoise
from dpkfc.integrations.loggers import LOGGERS
from dpkfc.postprocess.pipeline import READOUTS
from dpkfc.postprocess.steps import SOFIM, AdamBC, DiSK
from dpkfc.privacy.accounting import ACCOUNTANTS
from dpkfc.privacy.grid import NOISES
from dpkfc.report.officer import Declared
from dpkfc.terminal import argument_text

OPTIMIZERS = ("sgd", "adam", "adam-bc", "sofim")
PRECONDITIONERS = ("none", "kfac", "ngd", "adadps", "gep")
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
STOPS = ("public", "private-loss", "private-error")
_DECLARED = tuple(item.name for item in dataclasses.fields(Declared))
# By the names of their flags, or by section and key as a TOML file has them.
Settings = Mapping[str, Any]
SECTIONS = ("run", "data", "model", "privacy", "preconditioner", "postprocess", "optimizer", "card")


# --------------------------------------------------------------------------------------------------
# The methods by name: each is a set of settings that a run starts from, never a class or a loop.
#
# The settings of a method replace what a recipe's file says of all methods. What the file says of
# this method, a file given with `--config` and flags replace them in turn. Each row also says where
# the method acts in a step, what it needs and costs, and where it comes from.


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
            `rate_without_momentum`.
        defines_optimizer: whether another optimizer would be another method.
    """

    name: str
    label: str
    settings: Settings = field(default_factory=dict)
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


_ROWS = tomllib.loads((files("dpkfc.app") / "methods.toml").read_text("utf-8"))
METHODS: Mapping[str, Method] = {name: Method(name=name, **row) for name, row in _ROWS.items()}
METHOD_LABELS = {name: method.label for name, method in METHODS.items()}


# --------------------------------------------------------------------------------------------------
# How a setting is declared.
#
# A setting has two names: that of its flag, which is the attribute of `RunConfig`, and a key in a
# section of a TOML file. Most settings are fields of dataclasses of the library. Their key,
# default and help text are taken from those dataclasses, and `library_values` gives them back
# under the names of the fields.

_SECTION_OF: dict[type, str] = {
    PrivacyConfig: "privacy",
    **dict.fromkeys((KFAC, NGD, AdaDPS, GEP, PinkNoise, DeadLeaves), "preconditioner"),
    **dict.fromkeys((DiSK, AdamBC, SOFIM), "postprocess"),
}


def _setting(
    default: Any,
    section: str,
    text: str,
    *,
    key: str = "",
    owners: tuple[type, ...] = (),
    choices: Iterable[str] = (),
    least: float | None = None,
    above: float | None = None,
    words: Mapping[str, float] | None = None,
) -> Any:
    """Declare a setting.

    Args:
        default: its value where nothing is given.
        section: section of a TOML file.
        text: what it means.
        key: its key in that section, where this is not the attribute's name.
        owners: dataclasses of the library with a field of that key.
        choices: allowed texts.
        least: the least allowed number.
        above: a number that the value must exceed.
        words: words of the library that numbers stand for here.
    """
    metadata = {
        "section": section,
        "help": text,
        "key": key,
        "owners": owners,
        "choices": tuple(choices),
        "least": least,
        "above": above,
        "words": words or {},
    }
    return field(default=default, metadata=metadata)


def _library(
    owners: type | tuple[type, ...],
    key: str,
    *,
    default: Any = None,
    text: str = "",
    **rules: Any,
) -> Any:
    """Declare a setting that is a field of a dataclass of the library, or of several.

    Args:
        owners: the dataclasses; default and help text come from the first one.
        key: name of the field.
        default: another default than the field's.
        text: another help text than the one in the docstring of the dataclass.
        rules: as for `_setting`.
    """
    owners = owners if isinstance(owners, tuple) else (owners,)
    library_field = _library_field(owners[0], key)
    if default is None:
        default = library_field.default
    if default is None:
        default = "" if "str" in str(library_field.type) else 0
    if not text:
        # The first clause.
        documented = argument_text(owners[0], key)
        text = re.split(r"(?<!et al)[.:;] ", documented)[0].removesuffix(".")
    return _setting(default, _SECTION_OF[owners[0]], text, key=key, owners=owners, **rules)


def _library_field(owner: type, key: str) -> dataclasses.Field[Any]:
    return next(found for found in dataclasses.fields(owner) if found.name == key)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, as plain values, so that a TOML file holds them exactly.

    An empty text, and a zero where the help says so, mean "not given".

    Raises:
        ConfigError: a value of the wrong type or outside its range, an unknown choice, or settings
            that contradict one another.
    """

    # What is run, and where.
    recipe: str = _setting(
        "", "run", "which recipe, for example mnist-cnn; a wrong name shows the list"
    )
    method: str = _setting(
        "dp-kfc-a", "run", "what a run starts from; see `dpkfc methods`", choices=METHODS
    )
    seed: int = _setting(
        0, "run", "public seed of initial weights and probes; never of the noise", least=0
    )
    smoke: bool = _setting(False, "run", "a few steps on a slice of the data, as a trial")
    eval_on: str = _setting(
        "test", "run", "what accuracy is measured on", choices=("test", "validation")
    )
    evaluate_every: int = _setting(
        0, "run", "steps between evaluations; 0: once an epoch or more", least=0
    )
    patience: int = _setting(
        0, "run", "evaluations without a lower loss on public_validation; 0: no early end", least=0
    )
    stop_on: str = _setting(
        "public",
        "run",
        "what decides an early end; private-…: noisy means on the validation split",
        choices=STOPS,
    )
    chosen_by: str = _setting(
        RECIPE_DEFAULTS, "run", "how these settings were chosen; printed on the privacy card"
    )
    log: str = _setting("", "run", "also log to this tool; empty: none", choices=("", *LOGGERS))
    log_private: bool = _setting(
        False, "run", "log numbers too that ε does not cover; the card names them"
    )
    out: str = _setting("", "run", "run folder; empty: a new folder below runs/")
    num_workers: int = _setting(0, "run", "loader processes", least=0)
    threads: int = _setting(0, "run", "numerical threads; 0: torch's own choice", least=0)
    device: str = _setting("cpu", "run", "torch device")

    # A user's own data, in the place of a recipe.
    data: str = _setting(
        "", "data", "own data: a CSV, Parquet, Feather or JSONL file, or a folder of images"
    )
    target: str = _setting("", "data", "column of own data that is learned")
    schema: str = _setting("", "data", "TOML file with what is public of own data; dpkfc schema")
    bounds: str = _setting(
        "",
        "data",
        "private: find bounds that the schema leaves out, for a part of ε",
        choices=("", "private"),
    )
    text: str = _setting("", "data", "key of the text in a JSONL file")
    label_file: str = _setting("", "data", "table of image files and their labels")
    task: str = _setting("", "data", "module:function that returns a dpkfc.app.owndata.tasks.Task")
    # What only the owner knows, for the first page of the card.
    owner: str = _setting("", "card", "who answers for the model; printed on the privacy card")
    purpose: str = _setting("", "card", "what the model is for; printed on the privacy card")
    data_subjects: str = _setting(
        "", "card", "whose data are trained on; printed on the privacy card"
    )
    contact: str = _setting("", "card", "whom to ask about it; printed on the privacy card")
    region: str = _setting("", "card", "whose law applies; for the registry of deployments")

    # Examples, private and public.
    data_dir: str = _setting(
        "", "data", "folder with the data set; empty: $DPKFC_DATA, then Hugging Face datasets"
    )
    vocabulary: str = _setting(
        "hashed", "data", "how a bag of words is made: hashed, which fits nothing to private text"
    )
    validation_size: int = _setting(
        0, "data", "examples cut from the training set for validation", least=0
    )
    split_seed: int = _setting(0, "data", "public seed of the validation split", least=0)
    augment: str = _setting(
        "", "data", "random change of every view of an image; empty: none", choices=AUGMENTS
    )
    public_data: str = _setting(
        "",
        "data",
        "safetensors file of public inputs (and labels) for `public` and pre-training",
    )

    public_validation: str = _setting(
        "",
        "data",
        "safetensors file of public inputs and labels, whose loss decides an early end",
    )

    # Where weights start from.
    pretrained: str = _setting(
        "",
        "model",
        "folder or file of public pretrained weights, for recipes that start from some",
    )
    pretrain_epochs: int = _setting(
        0, "model", "epochs on labelled public_data before the private run; 0: none", least=0
    )
    pretrain_lr: float = _setting(
        0.1, "model", "learning rate of those epochs (SGD, momentum 0.9, cosine)", above=0
    )

    # `PrivacyConfig`, and the arguments of `calibrate` and `with_noise`.
    epsilon: float = _setting(3.0, "privacy", "target ε of the whole run", above=0)
    delta: float = _setting(1e-5, "privacy", "target δ of the whole run", above=0)
    budget: str = _setting(
        "", "privacy", "budget of the dataset that all runs on it charge (TOML); see dpkfc budget"
    )
    bounds_share: float = _setting(
        0.25, "privacy", "part of ε that finding bounds would cost alone", above=0
    )
    stop_share: float = _setting(
        0.25, "privacy", "part of ε that private evaluations would cost alone", above=0
    )
    stop_most_loss: float = _setting(
        4.0, "privacy", "bound to which private-loss clamps each loss", above=0
    )
    noise_multiplier: float = _setting(
        0.0, "privacy", "σ, given; 0: the smallest one that keeps (ε, δ)", least=0
    )
    epochs: float = _setting(
        5.0, "privacy", "expected passes over the data; ignored when steps is given", above=0
    )
    steps: int = _setting(0, "privacy", "number of steps; 0: as epochs say", least=0)
    expected_batch_size: int = _library(PrivacyConfig, "expected_batch_size", default=256, least=1)
    max_grad_norm: float = _library(PrivacyConfig, "max_grad_norm", above=0)
    clipping: str = _library(
        PrivacyConfig, "clipping", text="how examples are bounded", choices=CLIPPINGS
    )
    automatic_gamma: float = _library(PrivacyConfig, "automatic_gamma", above=0)
    noise: str = _library(
        PrivacyConfig, "noise", text="rounded: sum and noise on one grid", choices=NOISES
    )
    augmentations: int = _library(PrivacyConfig, "augmentations", least=1)
    sampler: str = _library(
        PrivacyConfig, "sampler", text="how batches are drawn", choices=SAMPLERS
    )
    max_batch_size: int = _library(
        PrivacyConfig,
        "max_batch_size",
        text="most examples in a batch of truncated_poisson; 0: no bound",
        least=0,
    )
    uncertified: bool = _library(
        PrivacyConfig,
        "uncertified",
        text="allow a sampler without a certified ε (stamped on the card)",
    )
    accountant: str = _library(
        PrivacyConfig,
        "accountant",
        text="pld or rdp; empty: the one that suits the sampler",
        choices=("", *ACCOUNTANTS),
    )
    readout: str = _library(
        PrivacyConfig,
        "readout",
        text="from the coordinates of the clip to the step",
        choices=READOUTS,
    )
    weight_average: float = _setting(
        0.0, "privacy", "decay of averaged weights, which are evaluated; 0: none", least=0
    )
    max_physical_batch_size: int = _library(
        PrivacyConfig,
        "max_physical_batch_size",
        default=0,
        text="rows in memory at once; 0: all; -1: as many as fit",
        least=-1,
        words={"auto": -1},
    )
    pad_to_multiple: int = _library(
        PrivacyConfig,
        "pad_to_multiple",
        text="micro-batches are padded to a multiple; 0: not at all",
        least=0,
    )
    norm_methods: str = _library(
        PrivacyConfig,
        "norm_methods",
        default="",
        text="norms of single layers, for example 'conv1=gram head=materialised'",
    )
    test_mode: bool = _setting(
        False, "privacy", "repeatable noise from the seed: NOT PRIVATE, stamped on the card"
    )

    # The preconditioner: `KFAC`, `NGD`, `AdaDPS` or `GEP`, and its probe.
    preconditioner: str = _setting(
        "none",
        "preconditioner",
        "coordinates of clip and noise",
        key="kind",
        choices=PRECONDITIONERS,
    )
    source: str = _setting(
        "pink", "preconditioner", "where curvature comes from", key="probe", choices=SOURCES
    )
    output_source: str = _setting(
        "",
        "preconditioner",
        "another source for output factors G; empty: the same",
        key="output_probe",
        choices=("", *SOURCES),
    )
    zipf_exponent: float = _setting(
        1.0, "preconditioner", "exponent of Zipf's law of token noise; 0: uniform tokens", least=0
    )
    power_exponent: float = _library(PinkNoise, "power_exponent", least=0)
    leaves: int = _library(DeadLeaves, "leaves", least=1)
    refine: int = _setting(
        0,
        "preconditioner",
        "moves of probe images towards classes of the released model; 0: none",
        least=0,
    )
    probe_size: int = _library(KFAC, "probe_size", least=1)
    every: int = _library((KFAC, NGD, AdaDPS, GEP), "every", least=1)
    labels: str = _library((KFAC, NGD), "labels", text="labels of the probe", choices=LABELS)
    likelihood: str = _library(
        (KFAC, NGD, AdaDPS, GEP),
        "likelihood",
        text="of the output, for the probe's loss",
        choices=LIKELIHOODS,
    )
    sides: str = _library(KFAC, "sides", choices=("input", "both", "output"))
    damping: float = _library(KFAC, "damping", above=0)
    damping_mode: str = _library(KFAC, "damping_mode", choices=("relative", "absolute"))
    gamma: float = _library(KFAC, "gamma", least=0)
    exponent: float = _library(KFAC, "exponent", above=0)
    scale: str = _library(
        KFAC,
        "scale",
        text="scale of the factors and of the whole preconditioner",
        choices=("probe", "trace", "balanced", "raw"),
    )
    sharing: str = _library(KFAC, "sharing", choices=("expand", "reduce"))
    control: str = _library(
        KFAC,
        "control",
        text="random eigenvectors with the same spectrum",
        choices=("none", "random"),
    )
    max_factor_size: int = _library((KFAC, NGD), "max_factor_size", least=1)
    oversize: str = _library(KFAC, "oversize", choices=("diagonal", "identity", "low_rank"))
    ranks: str = _library(
        KFAC,
        "ranks",
        default="",
        text="eigenpairs of single sides, for example 'conv1.A=32 head.A=0'; 0: all",
    )
    max_rank: int = _library(
        KFAC,
        "max_rank",
        text="eigenpairs kept of sides four times as wide or more; 0: all",
        least=0,
    )
    tail_mass: float = _library(KFAC, "tail_mass", least=0)
    layer_rules: str = _library(
        KFAC,
        "layer_rules",
        text="kinds of layers to precondition, for example 'linear conv'; empty: all",
    )
    factor_decay: float = _library(KFAC, "decay", least=0)
    later_probe_size: int = _library(
        KFAC,
        "later_probe_size",
        text="probe examples of later refreshes, averaged factors; 0: as many",
        least=0,
    )
    factor_drift: float = _library(
        KFAC,
        "drift",
        text="a refresh that shows less movement keeps the preconditioner; 0: never",
        least=0,
    )
    lambda_safe: float = _library(NGD, "lambda_safe", default=0.0025, above=0)
    lambda_base: float = _library(
        NGD, "lambda_base", text="λ_base of DP-NGD; 0: min(1e-4, λ_safe / 10)", least=0
    )
    ngd_warm: float = _library(NGD, "warm", least=0)
    ngd_power: float = _library(NGD, "power", above=0)
    ngd_order: str = _library(
        NGD, "order", text="DP-NGD and its ablations", choices=("split", "before", "after")
    )
    adadps_floor: float = _library(AdaDPS, "floor", above=0)
    gep_rank: int = _library(GEP, "rank", default=100, least=1)
    gep_embedding_norm: float = _library(GEP, "embedding_norm", above=0)
    gep_residual_norm: float = _library(
        GEP, "residual_norm", text="S₂ of GEP; 0 drops the residual (B-GEP)", least=0
    )

    # What happens to releases before the optimizer.
    filter: str = _setting(
        "none", "postprocess", "filter of releases over time; see docs/methods", choices=FILTERS
    )
    filter_kappa: float = _library(
        DiSK,
        "kappa",
        text="κ, weight of the new release (DiSK, storm, ema, first order)",
        above=0,
    )
    disk_gamma: float = _library(DiSK, "gamma", default=0.5)
    doppler_cutoff: float = _setting(
        0.1,
        "postprocess",
        "cutoff of the Butterworth filter, fraction of the Nyquist rate",
        key="cutoff",
        above=0,
    )
    filter_momentum: bool = _library(
        DiSK, "momentum_allowed", text="allow momentum behind a filter"
    )
    adam_bc_floor: float = _library(
        AdamBC,
        "floor",
        default=0.0,
        text="γ' of DP-AdamBC, on v; 0: as adam_bc_resolution says",
        least=0,
        words={"auto": 0.0},
    )
    adam_bc_resolution: float = _library(
        AdamBC, "resolution", text="γ' of DP-AdamBC in units of what v resolves", above=0
    )
    sofim_rho: float = _library(SOFIM, "rho", text="ρ of the SOFIM step", above=0)
    sofim_beta: float = _library(SOFIM, "beta", text="β of the SOFIM step", least=0)
    sofim_direction: str = _library(SOFIM, "direction", choices=("gradient", "momentum"))

    # The optimizer and its learning rate.
    optimizer: str = _setting(
        "",
        "optimizer",
        "which optimizer takes the step; empty: as the method says",
        key="kind",
        choices=("", *OPTIMIZERS),
    )
    lr: float = _setting(1e-3, "optimizer", "learning rate", above=0)
    momentum: float = _setting(0.9, "optimizer", "momentum of SGD", least=0)
    nesterov: bool = _setting(False, "optimizer", "Nesterov momentum")
    weight_decay: float = _setting(
        0.0, "optimizer", "after the release, never in a clipped gradient", least=0
    )
    schedule: str = _setting(
        "constant", "optimizer", "learning rate after the warm-up", choices=SCHEDULES
    )
    schedule_steps: int = _setting(
        0, "optimizer", "steps of schedule and warm-up together; 0: the plan's", least=0
    )
    warmup_steps: int = _setting(
        0, "optimizer", "first steps, in which the learning rate rises linearly", least=0
    )

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            value = _checked_value(setting, getattr(self, setting.name))
            object.__setattr__(self, setting.name, value)
        self._resolve_optimizer()
        self._check()
        for name in ("ranks", "norm_methods"):
            parse_pairs(name, getattr(self, name))
        # A card shows these, so they must be fit to be shown before anything is trained.
        _ = self.declared

    def _resolve_optimizer(self) -> None:
        """Take the optimizer of the method where none is given, and refuse a contradiction."""
        method = METHODS[self.method]
        preset = method.settings.get("optimizer", "")
        if method.defines_optimizer and self.optimizer not in ("", preset):
            raise ConfigError(
                f"method = {self.method!r} means optimizer = {preset!r}, got {self.optimizer!r}; "
                "leave optimizer out, or take method = 'dp-kfc'"
            )
        object.__setattr__(self, "optimizer", self.optimizer or preset or "adam")

    def _check(self) -> None:
        """Refuse settings that contradict one another."""
        if self.eval_on == "validation" and self.validation_size == 0:
            raise ConfigError(
                "eval_on = 'validation' needs validation_size > 0, examples cut from the training "
                "set"
            )
        if self.augmentations > 1 and not self.augment:
            raise ConfigError(
                f"augmentations = {self.augmentations} without augment gives equal views; "
                f"give augment, one of {' | '.join(AUGMENTS[1:])}"
            )
        if self.momentum >= 1:
            raise ConfigError(f"momentum must be below 1, got {self.momentum}: steps grow forever")
        if self.exponent > 0.5:
            raise ConfigError(f"exponent must be at most 0.5, got {self.exponent}")
        if self.steps and self.schedule_steps > self.steps:
            raise ConfigError(
                f"schedule_steps = {self.schedule_steps} is longer than the plan of {self.steps} "
                "steps"
            )
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum > 0):
            raise ConfigError("nesterov = true needs optimizer = 'sgd' and momentum above 0")
        for name in ("bounds_share", "stop_share"):
            share = getattr(self, name)
            if share > 0.9:
                raise ConfigError(f"{name} must be at most 0.9, got {share}")
        if self.log_private and not self.log:
            raise ConfigError(f"log_private = true needs log, one of {', '.join(LOGGERS)}")
        needed = ""
        if self.pretrain_epochs:
            needed = "pretrain_epochs"
        elif self.uses_preconditioner and "public" in (self.source, self.output_source):
            needed = "source = 'public'"
        if needed and not self.public_data:
            raise ConfigError(
                f"{needed} needs public_data, a safetensors file with `inputs` (and `labels`)"
            )
        if not self.stops_privately and (self.patience > 0) != bool(self.public_validation):
            raise ConfigError(
                f"patience = {self.patience} and public_validation = {self.public_validation!r} do"
                " not go together; give both or none"
            )

    @property
    def declared(self) -> Declared:
        """What the owner says about the run.

        Raises:
            ConfigError: a value that a card cannot show.
        """
        try:
            return Declared(**{name: getattr(self, name) for name in _DECLARED})
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def stops_privately(self) -> bool:
        """Whether noisy evaluations on held-out private examples decide an early end."""
        return self.stop_on != "public"

    @property
    def uses_preconditioner(self) -> bool:
        """Whether gradients are preconditioned."""
        return self.preconditioner != "none"


_FIELDS = {setting.name: setting for setting in dataclasses.fields(RunConfig)}


def _key(setting: dataclasses.Field[Any]) -> str:
    """Return the key of a setting in its section of a TOML file."""
    return setting.metadata["key"] or setting.name


def library_values(config: RunConfig, owner: type) -> dict[str, Any]:
    """Return the settings that are fields of a dataclass of the library, as its arguments.

    Raises:
        ConfigError: a number in a list of names and numbers is not a whole number.
    """
    values = {}
    for setting in _FIELDS.values():
        if owner in setting.metadata["owners"]:
            kind = str(_library_field(owner, _key(setting)).type)
            values[_key(setting)] = _library_value(setting, getattr(config, setting.name), kind)
    return values


def _library_value(setting: dataclasses.Field[Any], value: Any, kind: str) -> Any:
    """Return the value of a setting in the type of a field of the library."""
    value = _use_word(setting, value)
    if kind.startswith("Mapping"):
        pairs = parse_pairs(setting.name, value)
        return _whole_numbers(setting.name, pairs) if "[str, int]" in kind else pairs
    if kind.startswith("tuple"):
        value = tuple(value.replace(",", " ").split())
    return value or None if "None" in kind else value


def _use_word(setting: dataclasses.Field[Any], value: Any) -> Any:
    """Return the word that the library has for a number, any other value as it is."""
    words = {number: word for word, number in setting.metadata["words"].items()}
    return words.get(value, value)


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


def ensure_text(value: Any) -> str:
    """Return a text itself, an empty one for anything else."""
    return value if isinstance(value, str) else ""


def _fits_a_file(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


_ACCEPTED = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text in quotes",
    "bool": "true or false",
}


def _checked_value(setting: dataclasses.Field[Any], value: Any) -> Any:
    """Return a value in the type of its setting.

    Raises:
        ConfigError: naming the setting, the value and what is expected.
    """
    name, kind = setting.name, str(setting.type)
    if not isinstance(value, _ACCEPTED[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"{name} must be {_KINDS[kind]}, got {value!r} ({type(value).__name__})")
    if isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(f"{name} must be a number of at most 64 bits")
    if isinstance(value, str) and not _fits_a_file(value):
        raise ConfigError(f"{name} holds half a character, which no file can hold: {value!r}")
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
    if rules["least"] is not None and value < rules["least"]:
        raise ConfigError(f"{name} must be at least {rules['least']}, got {value}")
    if rules["above"] is not None and value <= rules["above"]:
        raise ConfigError(f"{name} must be above {rules['above']}, got {value}")


# --------------------------------------------------------------------------------------------------
# TOML files. A file holds sections with the keys of the library, or settings by the names of their
# flags outside of any section.

_BY_KEY = {(setting.metadata["section"], _key(setting)): setting for setting in _FIELDS.values()}


def flatten(content: Settings, where: str) -> dict[str, Any]:
    """Return the settings of a TOML file by the names of their flags.

    Args:
        content: the parsed file.
        where: name of the file, for errors.

    Raises:
        ConfigError: an unknown key or section, with the nearest known one, or a key in the wrong
            section.
    """
    for section, value in content.items():
        if isinstance(value, Mapping) and section not in SECTIONS:
            shown = f"[{section}]" if section.isprintable() else repr(section)
            raise ConfigError(f"{where}: unknown section {shown}; {nearest(section, SECTIONS)}")
    settings: dict[str, Any] = {}
    for section, key, name, value in _list_values(content):
        if not section:
            _check_name(key, where)
        elif not name:
            raise _unknown_key(section, key, where)
        if name in settings:
            raise ConfigError(
                f"{where}: {name} is given twice, in two sections or outside; leave one out"
            )
        settings[name] = value
    return settings


def known_settings(content: Settings) -> dict[str, Any]:
    """Return the settings of a file by the names of their flags; keep keys that are not known."""
    return {name or key: value for _, key, name, value in _list_values(content)}


def _list_values(content: Settings) -> Iterator[tuple[str, str, str, Any]]:
    """Yield section, key, setting ("" where the key is not known) and value of a parsed file."""
    for section, value in content.items():
        if not isinstance(value, Mapping):
            yield "", section, section, value
            continue
        for key, inner in value.items():
            setting = _BY_KEY.get((section, key))
            if setting is None:
                yield section, key, "", inner
            else:
                yield section, key, setting.name, _plain_value(setting, inner)


def _plain_value(setting: dataclasses.Field[Any], value: Any) -> Any:
    """Return the plain value of a table, a list or a word that the library's field takes."""
    if isinstance(value, str):
        return setting.metadata["words"].get(value, value)
    if setting.name in ("ranks", "norm_methods") and isinstance(value, Mapping):
        return " ".join(f"{name}={inner}" for name, inner in value.items())
    if setting.name == "layer_rules" and isinstance(value, list):
        return " ".join(map(str, value))
    return value


def _check_name(name: str, where: str) -> None:
    if name not in _FIELDS:
        raise ConfigError(f"{where}: unknown key {name!r}; {nearest(name, _FIELDS)}")


def _unknown_key(section: str, key: str, where: str) -> ConfigError:
    """Return the error for a key that a section does not have."""
    homes = [setting for setting in _FIELDS.values() if key in (setting.name, _key(setting))]
    if not homes:
        known = {_key(setting) for setting in _FIELDS.values()} | set(_FIELDS)
        return ConfigError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
    home = homes[0].metadata["section"]
    name = "" if _key(homes[0]) == key else f" as {_key(homes[0])}"
    return ConfigError(f"{where}: {key} stands in [{section}] and belongs into [{home}]{name}")


def read_choices(file: Path | None, flags: Settings) -> dict[str, Any]:
    """Return what a user chose: a TOML file under flags.

    `--epsilon` as a flag takes the place of a noise multiplier in the file.

    Raises:
        ConfigError: as `read_toml` and `flatten`; both ways to say how much noise there is.
    """
    settings = {} if file is None else flatten(read_toml(file), str(file))
    if "epsilon" in flags:
        if flags.get("noise_multiplier"):
            raise ConfigError(
                "--epsilon asks for the least noise that keeps it, --noise-multiplier gives it; "
                "leave one out"
            )
        settings.pop("noise_multiplier", None)
    return {**settings, **flags}


# Settings that say where a run takes place and where its files lie.
_PLACES = (
    "out",
    "budget",
    "data_dir",
    "pretrained",
    "public_data",
    "public_validation",
    "data",
    "schema",
    "label_file",
)
MACHINE = (
    "max_physical_batch_size",
    "pad_to_multiple",
    "num_workers",
    "threads",
    "device",
    "log",
    "log_private",
)


def deciding_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide what a run is, by the names of their flags."""
    return {name: getattr(config, name) for name in _FIELDS if name not in (*_PLACES, *MACHINE)}


def check_unchanged(config: RunConfig, first: Settings, where: str) -> None:
    """Refuse to continue a run with other settings than those it was started with.

    Args:
        config: settings now.
        first: what `deciding_settings` gave at the start; settings it lacks are not compared.
        where: name of the file with the settings, for the error.

    Raises:
        ConfigError: naming the first setting that has changed.
    """
    for name, value in deciding_settings(config).items():
        if first.get(name, value) != value:
            raise ConfigError(
                f"{where}: {name} is {value!r}, and the run was started with {first[name]!r}; put "
                "that back, or start another run with --config FILE --out ANOTHER"
            )


def to_toml(config: RunConfig) -> str:
    """Return a TOML file that replays the run: every setting, in sections, with what it means.

    `out` is left out, so that a replay gets a folder of its own.
    """
    lines = ["# Every setting of this run. Replay it with: dpkfc train --config config.toml"]
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for setting in _FIELDS.values():
            if setting.metadata["section"] == section and setting.name != "out":
                value = _toml_value(setting, getattr(config, setting.name))
                lines.append(f"{f'{_key(setting)} = {value}':<36}  # {_comment(setting)}")
    return "\n".join(lines) + "\n"


def _comment(setting: dataclasses.Field[Any]) -> str:
    """Return what a setting means, after the classes whose field it is where not all have it."""
    owners = ", ".join(owner.__name__ for owner in setting.metadata["owners"])
    text: str = setting.metadata["help"]
    shown = setting.metadata["section"] in ("preconditioner", "postprocess") and owners
    return f"{owners}: {text}" if shown else text


def _toml_value(setting: dataclasses.Field[Any], value: Any) -> str:
    value = _use_word(setting, value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        import tomli_w

        return tomli_w.dumps({"x": value}).split("=", 1)[1].strip()
    return repr(value)


# --------------------------------------------------------------------------------------------------
# Where the value of every setting comes from.
#
# Later values replace earlier ones: the defaults, the common part of the recipe's TOML, its part
# for a method that lends its own, the method's settings, the recipe's part for that very method,
# its part for the optimizer under that method, a file given with `--config`, and flags.


def layer_settings(defaults: Settings, chosen: Settings, where: str = "recipe") -> RunConfig:
    """Return a run's settings from a recipe's defaults and what the user chose.

    Args:
        defaults: parsed TOML of the recipe. Beside settings it may hold `[method.NAME]`, settings
            of one method, and in it a table per optimizer. Both apply when that method and that
            optimizer are in force.
        chosen: settings of the user by the names of their flags, which win.
        where: name of the defaults, for errors.

    Raises:
        ConfigError: as `flatten` and `RunConfig`.
    """
    common = dict(defaults)
    per_method = {}
    if isinstance(common.get("method"), Mapping):
        per_method = common.pop("method")
    common = flatten(common, where)
    for key in chosen:
        _check_name(key, "settings")
    name = chosen.get("method", common.get("method", RunConfig.method))
    if ensure_text(name) not in METHODS:
        # `RunConfig` names a wrong method.
        return RunConfig(method=name)
    method = METHODS[name]
    lender = name if name in per_method else method.like
    table = dict(per_method.get(lender, {}))
    by_optimizer = {key: table.pop(key) for key in OPTIMIZERS if key in table}
    of_method = flatten(table, f"{where} [method.{lender}]")
    borrowed = {**common, **of_method}
    settings = {**borrowed, **method.settings}
    if lender == name:
        # A table of the very method wins over its preset, a borrowed table does not.
        borrowed = {}
        settings |= of_method
    optimizer = chosen.get("optimizer") or settings.get("optimizer") or "adam"
    if ensure_text(optimizer) in by_optimizer:
        settings |= flatten(by_optimizer[optimizer], f"{where} [method.{lender}.{optimizer}]")
    settings |= chosen
    if "lr" not in chosen:
        settings |= _borrow_rate(method, optimizer, settings, borrowed, of_method, by_optimizer)
    return RunConfig(**settings)


# --------------------------------------------------------------------------------------------------
# Learning rates that a method borrows. A recipe's file has rates for DP-SGD with momentum and for
# DP-Adam, and few others. A method whose steps have another length at the same rate takes the rate
# that makes the lengths equal. That is a starting point and not the result of a search.

_DIGITS = 4


def _borrow_rate(
    method: Method,
    optimizer: Any,
    settings: Settings,
    borrowed: Settings,
    of_method: Settings,
    by_optimizer: Settings,
) -> dict[str, float]:
    """Return the learning rate that follows from another method's, {} where none does."""
    rate = borrowed.get("lr")
    adam = rate if method.like == "dp-adam" else None
    if "lr" not in of_method and isinstance(by_optimizer.get("adam"), Mapping):
        adam = by_optimizer["adam"].get("lr")
    # `RunConfig` names a wrong value.
    with contextlib.suppress(TypeError, ValueError, ArithmeticError):
        if rate and method.without_momentum and optimizer == "sgd":
            return {"lr": rate_without_momentum(borrowed, settings)}
        if adam and optimizer == "adam-bc" and optimizer not in by_optimizer:
            return {"lr": rate_of_adam_bc(adam, settings)}
    return {}


def rate_without_momentum(lender: Settings, settings: Settings) -> float:
    """Return the rate of a method without momentum, from one that was chosen with momentum m.

    The rate is divided by 1 − m. DP-NGD clips in another space, so η C / √λ_safe takes the place
    of the η C of DP-SGD (Eq. 16), and η C where the step is only preconditioned. A normalised clip
    releases gradients of length 1 whatever C is.

    Args:
        lender: settings that the rate was chosen with.
        settings: settings of the method.

    Raises:
        TypeError, ValueError, ArithmeticError: a setting has a value that no run can have.
    """
    rate = _number(lender, "lr")
    rate = rate * (1 - _number(settings, "momentum")) / (1 - _number(lender, "momentum"))
    if settings.get("preconditioner") == "ngd":
        natural = (
            math.sqrt(_number(settings, "lambda_safe")) if settings["readout"] == "natural" else 1.0
        )
        rate *= _longest(lender) / _longest(settings) * natural
    return _positive(rate)


def rate_of_adam_bc(rate: float, settings: Settings) -> float:
    """Return the rate of DP-AdamBC from one of DP-Adam: times √(γ′/Φ), as most of v is noise.

    There DP-Adam divides by √Φ and DP-AdamBC by the root of its floor, which falls to 0.03 Φ times
    `adam_bc_resolution`. The floor of the first steps is larger, so a run of a hundred steps takes
    a larger rate. With a given floor the rate stays: Φ is not known before the plan.

    Args:
        rate: of DP-Adam.
        settings: settings of the method.

    Raises:
        TypeError, ValueError, ArithmeticError: a setting has a value that no run can have.
    """
    if _number(settings, "adam_bc_floor") > 0:
        return rate
    beta = AdamBC.betas[1]
    resolved = math.sqrt(2 * (1 - beta) / (1 + beta))
    return _positive(rate * math.sqrt(_number(settings, "adam_bc_resolution") * resolved))


def _longest(settings: Settings) -> float:
    """Return the length of the longest gradient that one example contributes."""
    if settings.get("clipping", RunConfig.clipping) == "normalised":
        return 1.0
    return _number(settings, "max_grad_norm")


def _number(settings: Settings, name: str) -> float:
    return float(settings.get(name, getattr(RunConfig, name)))


def _positive(rate: float) -> float:
    if not rate > 0:
        raise ValueError("a setting behind the learning rate is outside its range")
    return float(f"{rate:.{_DIGITS}g}")
