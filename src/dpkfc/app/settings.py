"""Every setting of a run: type, range and meaning, in one dataclass for each section of a file.

A setting has one name: its flag, its key in its section of a TOML file, and its attribute. An empty
text, and a zero where the help says so, mean "not given".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from dpkfc.app.methods import METHODS
from dpkfc.app.setting_field import Section, declare
from dpkfc.clipping import CLIPPINGS
from dpkfc.config import SAMPLERS
from dpkfc.privacy.dp_accountants import ACCOUNTANTS
from dpkfc.privacy.grid import AUTO, CORRELATED, NOISES

OPTIMIZERS = ("sgd", "adam", "adam-bc", "sofim")
PRECONDITIONERS = ("none", "kfac", "ngd", "adadps", "gep", "moments")
FILTERS = (
    "none",
    "disk",
    "disk-look-ahead",
    "storm",
    "ema",
    "doppler",
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

_privacy = partial(declare, owners="PrivacyConfig")
_kfac = partial(declare, owners="KFAC")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Section):
    """What is run, and where."""

    recipe: str = declare("", "which recipe, for example mnist-cnn; a wrong name shows the list")
    method: str = declare(
        "dp-kfc-a", "what a run starts from; see `dpkfc methods`", choices=METHODS
    )
    seed: int = declare(0, "public seed of initial weights and probes; never of the noise", least=0)
    smoke: bool = declare(False, "a few steps on a slice of the data, as a trial")
    eval_on: str = declare("test", "what accuracy is measured on", choices=("test", "validation"))
    evaluate_every: int = declare(0, "steps between evaluations; 0: once an epoch or more", least=0)
    patience: int = declare(
        0, "evaluations without a lower loss on public_validation; 0: no early end", least=0
    )
    stop_on: str = declare(
        "public",
        "what decides an early end; private-…: noisy means on the validation split",
        choices=STOPS,
    )
    chosen_by: str = declare(
        RECIPE_DEFAULTS, "how these settings were chosen; printed on the privacy card"
    )
    log: str = declare("", "also log to this tool; empty: none", choices=("", *LOGGERS))
    log_private: bool = declare(False, "log numbers too that ε does not cover; the card names them")
    audit: int = declare(
        0, "canaries that train along and bound ε from below; 0: none, else 20 or more", least=0
    )
    out: str = declare("", "run folder; empty: a new folder below runs/")
    num_workers: int = declare(0, "loader processes", least=0, most=1024)
    threads: int = declare(0, "numerical threads; 0: torch's own choice", least=0, most=1024)
    device: str = declare("cpu", "torch device")
    capture_graphs: bool = declare(
        False, "capture passes as graphs: faster steps after a first one of seconds to a minute"
    )
    compile: bool = declare(
        False, "compile the graphs by inductor: a first step of minutes; needs a C++ compiler"
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings(Section):
    """Examples, private and public: a recipe's, or a user's own."""

    data: str = declare(
        "", "own data: a CSV, Parquet, Feather or JSONL file, or a folder of images"
    )
    target: str = declare("", "column of own data that is learned")
    schema: str = declare("", "TOML file with what is public of own data; dpkfc schema")
    class_weights: str = declare(
        "", "public factors of the losses before the clip, '1 5' for two classes; empty: equal"
    )
    threshold: float = declare(
        0.5,
        "probability of the second of two classes from which it is the answer",
        above=0,
        below=1,
    )
    bounds: str = declare(
        "",
        "private: find bounds that the schema leaves out, for a part of ε",
        choices=("", "private"),
    )
    text: str = declare("", "key of the text in a JSONL file")
    label_file: str = declare("", "table of image files and their labels")
    task: str = declare("", "module:function that returns a dpkfc.app.owndata.tasks.Task")
    data_dir: str = declare(
        "", "folder with the data set; empty: $DPKFC_DATA, then Hugging Face datasets"
    )
    vocabulary: str = declare(
        "hashed", "how a bag of words is made: hashed, which fits nothing to private text"
    )
    keep_encoded: bool = declare(
        False, "keep the encoded rows of a table, which are private, as encoded.npy in the folder"
    )
    validation_size: int = declare(0, "examples cut from the training set for validation", least=0)
    split_seed: int = declare(0, "public seed of the validation split", least=0)
    augment: str = declare(
        "", "random change of every view of an image; empty: none", choices=AUGMENTS
    )
    public_data: str = declare(
        "", "safetensors file of public inputs (and labels) for `public` and pre-training"
    )
    public_validation: str = declare(
        "", "safetensors file of public inputs and labels, whose loss decides an early end"
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """Where weights start from."""

    knots: int = declare(
        16, "places of the curve of a number in a table; 0: a straight line", least=0
    )
    pretrained: str = declare(
        "", "folder or file of public pretrained weights, for recipes that start from some"
    )
    pretrain_epochs: int = declare(
        0, "epochs on labelled public_data before the private run; 0: none", least=0
    )
    pretrain_lr: float = declare(
        0.1, "learning rate of those epochs (SGD, momentum 0.9, cosine)", above=0
    )


@dataclass(frozen=True, kw_only=True)
class PrivacySettings(Section):
    """`PrivacyConfig`, and the arguments of `calibrate` and `with_noise`."""

    epsilon: float = declare(3.0, "target ε of the whole run", above=0)
    delta: float = declare(1e-05, "target δ of the whole run", above=0)
    budget: str = declare(
        "", "budget of the dataset that all runs on it charge (TOML); see dpkfc budget"
    )
    moments_share: float = declare(
        0.3, "part of μ² that the release of second moments takes (dp-moments)", above=0, most=0.9
    )
    bounds_share: float = declare(
        0.25, "part of ε that finding bounds would cost alone", above=0, most=0.9
    )
    private_scores: float = declare(
        0.0,
        "part of ε that noisy scores on the test split would cost alone; 0: scores without noise",
        least=0,
        most=0.9,
    )
    stop_share: float = declare(
        0.25, "part of ε that private evaluations would cost alone", above=0, most=0.9
    )
    stop_most_loss: float = declare(4.0, "bound to which private-loss clamps each loss", above=0)
    noise_multiplier: float = declare(
        0.0, "σ, given; 0: the smallest one that keeps (ε, δ)", least=0
    )
    epochs: float = declare(5.0, "expected passes over the data, where steps is 0", above=0)
    steps: int = declare(0, "number of steps; 0: as epochs say", least=0)
    expected_batch_size: int = _privacy(
        256,
        "B, the mean size of a batch and divisor of every noisy sum; 0: all examples",
        least=0,
    )
    max_grad_norm: float = _privacy(
        1.0,
        "C, in the preconditioned space; auto, stored as 0: as examples, features and ε say",
        least=0,
        words={"auto": 0.0},
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
    weight_average: float = declare(
        0.0, "decay of averaged weights, which are evaluated; 0: none", least=0, below=1
    )
    average_from_start: bool = declare(
        False, "one decay from the first step on, instead of a warm-up that forgets faster"
    )
    max_physical_batch_size: int = _privacy(
        0,
        "rows in memory at once; 0: all; auto, stored as -1: as many as fit",
        least=-1,
        words={"auto": -1},
    )
    test_mode: bool = declare(
        False, "repeatable noise from the seed: NOT PRIVATE, stamped on the card"
    )


@dataclass(frozen=True, kw_only=True)
class PreconditionerSettings(Section):
    """Coordinates of clip and noise, and the probe that curvature is measured on."""

    preconditioner: str = declare("none", "coordinates of clip and noise", choices=PRECONDITIONERS)
    source: str = declare("pink", "where curvature comes from", choices=SOURCES)
    output_source: str = declare(
        "", "another source for output factors G; empty: the same", choices=("", *SOURCES)
    )
    zipf_exponent: float = declare(
        1.0, "exponent of Zipf's law of token noise; 0: uniform tokens", least=0
    )
    power_exponent: float = declare(1.0, owners="PinkNoise", least=0)
    leaves: int = declare(32, owners="DeadLeaves", least=1)
    refine: int = declare(
        0, "moves of probe images towards classes of the released model; 0: none", least=0
    )
    probe_size: int = _kfac(256, least=1)
    every: int = declare(50, owners="KFAC NGD AdaDPS GEP", least=1)
    labels: str = declare("model", "labels of the probe", owners="KFAC NGD", choices=LABELS)
    likelihood: str = declare(
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
    max_factor_size: int = declare(4096, owners="KFAC NGD", least=1)
    oversize: str = _kfac("diagonal", choices=("diagonal", "identity", "low_rank"))
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
    lambda_safe: float = declare(0.0025, owners="NGD", above=0)
    lambda_base: float = declare(
        0, "λ_base of DP-NGD; 0: min(1e-4, λ_safe / 10)", owners="NGD", least=0
    )
    ngd_warm: float = declare(0.1, owners="NGD", key="warm", least=0)
    ngd_power: float = declare(10.0, owners="NGD", key="power", above=0)
    ngd_order: str = declare(
        "split",
        "DP-NGD and its ablations",
        owners="NGD",
        key="order",
        choices=("split", "before", "after"),
    )
    adadps_floor: float = declare(0.001, owners="AdaDPS", key="floor", above=0)
    gep_rank: int = declare(100, owners="GEP", key="rank", least=1)
    gep_embedding_norm: float = declare(5.0, owners="GEP", key="embedding_norm", above=0)
    gep_residual_norm: float = declare(
        2.0,
        "S₂ of GEP; 0 drops the residual (B-GEP)",
        owners="GEP",
        key="residual_norm",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class PostprocessSettings(Section):
    """What happens to releases before the optimizer."""

    filter: str = declare("none", "filter of releases over time; see docs/methods", choices=FILTERS)
    filter_kappa: float = declare(
        0.7,
        "κ, weight of the new release (DiSK, storm, ema)",
        owners="DiSK",
        key="kappa",
        above=0,
    )
    disk_gamma: float = declare(0.5, owners="DiSK", key="gamma")
    doppler_cutoff: float = declare(
        0.1, "cutoff of the Butterworth filter, fraction of the Nyquist rate", above=0
    )
    filter_momentum: bool = declare(
        False, "allow momentum behind a filter", owners="DiSK", key="momentum_allowed"
    )
    adam_bc_floor: float = declare(
        0.0,
        "γ' of DP-AdamBC, on v; auto, stored as 0: as adam_bc_resolution says",
        owners="AdamBC",
        key="floor",
        least=0,
        words={"auto": 0.0},
    )
    adam_bc_resolution: float = declare(
        2.0,
        "γ' of DP-AdamBC in units of what v resolves",
        owners="AdamBC",
        key="resolution",
        above=0,
    )
    sofim_rho: float = declare(0.5, "ρ of the SOFIM step", owners="SOFIM", key="rho", above=0)
    sofim_beta: float = declare(0.9, "β of the SOFIM step", owners="SOFIM", key="beta", least=0)
    sofim_direction: str = declare(
        "gradient", owners="SOFIM", key="direction", choices=("gradient", "momentum")
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Section):
    """The optimizer and its learning rate."""

    optimizer: str = declare(
        "", "which optimizer takes the step; empty: as the method says", choices=("", *OPTIMIZERS)
    )
    lr: float = declare(0.001, "learning rate", above=0)
    momentum: float = declare(0.9, "momentum of SGD", least=0, below=1)
    nesterov: bool = declare(False, "Nesterov momentum")
    weight_decay: float = declare(0.0, "after the release, never in a clipped gradient", least=0)
    schedule: str = declare("constant", "learning rate after the warm-up", choices=SCHEDULES)
    schedule_steps: int = declare(
        0, "steps of schedule and warm-up together; 0: the plan's", least=0
    )
    warmup_steps: int = declare(
        0, "first steps, in which the learning rate rises linearly", least=0
    )
