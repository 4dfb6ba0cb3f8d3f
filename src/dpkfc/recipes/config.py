"""Every field of a run, where its value comes from, and the TOML file that replays it.

Values are laid over one another: the defaults here, the recipe's TOML (its common part, then the part of the method,
then that of the optimizer under the method), a file given with `--config`, and flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["METHODS", "SECTIONS", "ConfigError", "RunConfig", "flatten", "layered", "nearest", "read_toml", "to_toml"]

METHODS = ("dp-sgd", "dp-adam", "dp-kfc")
OPTIMIZERS = ("sgd", "adam")
RECIPE_DEFAULTS = "defaults of the recipe; the search behind them, if any, is not covered by ε"
PROBES = ("pink", "white", "tokens", "public")
SCALES = ("probe", "trace", "balanced", "raw")
SECTIONS = ("run", "privacy", "optimizer", "curvature", "machine")


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

    recipe: str = _setting("", "run", "which recipe: digits, mnist-cnn, fashion-mnist-cnn, cifar10-cnn, sst2-minilm")
    method: str = _setting("dp-kfc", "run", "DP-SGD, DP-Adam, or either with the preconditioner", choices=METHODS)
    data_dir: str = _setting("", "run", "folder with the data set; empty: $DPKFC_DATA, then Hugging Face datasets")
    seed: int = _setting(0, "run", "public seed of initial weights and probes; never of the noise", least=0)
    validation_size: int = _setting(0, "run", "examples cut from the training set for validation", least=0)
    split_seed: int = _setting(0, "run", "public seed of the validation split", least=0)
    eval_on: str = _setting("test", "run", "what accuracy is measured on", choices=("test", "validation"))
    evaluate_every: int = _setting(0, "run", "steps between evaluations; 0: once an epoch or more", least=0)
    chosen_by: str = _setting(RECIPE_DEFAULTS, "run", "how these settings were chosen; printed on the privacy card")
    out: str = _setting("", "run", "run folder; empty: a new folder below runs/")

    epsilon: float = _setting(3.0, "privacy", "target ε of the whole run", above=0)
    delta: float = _setting(1e-5, "privacy", "target δ of the whole run", above=0)
    epochs: float = _setting(5.0, "privacy", "expected passes over the data; ignored when steps is given", above=0)
    steps: int = _setting(0, "privacy", "number of steps; 0: as epochs say", least=0)
    expected_batch_size: int = _setting(256, "privacy", "expected size of a logical batch, the divisor", least=1)
    max_grad_norm: float = _setting(1.0, "privacy", "clipping bound C", above=0)
    clipping: str = _setting("flat", "privacy", "how examples are bounded", choices=("flat", "automatic", "normalised"))
    automatic_gamma: float = _setting(0.01, "privacy", "stabiliser of automatic clipping", above=0)
    sampler: str = _setting("poisson", "privacy", "how batches are drawn", choices=("poisson", "fixed", "shuffle"))
    uncertified: bool = _setting(False, "privacy", "allow a sampler without a certified ε (stamped on the card)")
    accountant: str = _setting("", "privacy", "pld or rdp; empty: what suits the sampler", choices=("", "pld", "rdp"))
    test_mode: bool = _setting(False, "privacy", "repeatable noise from the seed: NOT PRIVATE, stamped on the card")

    optimizer: str = _setting("", "optimizer", "sgd or adam; empty: what the method says", choices=("", *OPTIMIZERS))
    lr: float = _setting(1e-3, "optimizer", "learning rate", above=0)
    momentum: float = _setting(0.9, "optimizer", "momentum of SGD", least=0)
    weight_decay: float = _setting(0.0, "optimizer", "after the release, never in a clipped gradient", least=0)

    sides: str = _setting("both", "curvature", "factors that whiten", choices=("both", "input", "output"))
    damping: float = _setting(0.1, "curvature", "damping, relative to the mean eigenvalue or absolute", above=0)
    damping_mode: str = _setting("relative", "curvature", "meaning of damping", choices=("relative", "absolute"))
    gamma: float = _setting(0.0, "curvature", "γ inside the root, absolute damping only", least=0)
    exponent: float = _setting(0.5, "curvature", "exponent of the inverse root of each factor, at most 1/2", above=0)
    scale: str = _setting("balanced", "curvature", "scale of the factors and of the whole metric", choices=SCALES)
    every: int = _setting(50, "curvature", "steps between refreshes", least=1)
    sharing: str = _setting("expand", "curvature", "K-FAC for shared weights", choices=("expand", "reduce"))
    probe: str = _setting("pink", "curvature", "where curvature comes from", choices=PROBES)
    zipf_exponent: float = _setting(1.0, "curvature", "exponent of Zipf's law of token noise; 0: uniform tokens", least=0)
    power_exponent: float = _setting(1.0, "curvature", "exponent of the power spectrum of pink noise", least=0)
    probe_size: int = _setting(256, "curvature", "probe examples a refresh", least=1)
    labels: str = _setting("model", "curvature", "labels of the probe", choices=("model", "uniform", "given"))
    max_factor_size: int = _setting(4096, "curvature", "largest matrix that is decomposed", least=1)
    max_rank: int = _setting(64, "curvature", "most eigenpairs a wide side keeps; 0: all of them", least=0)
    oversize: str = _setting("diagonal", "curvature", "what a wider side becomes", choices=("diagonal", "identity"))
    layer_rules: str = _setting("", "curvature", "kinds of layers to whiten, for example 'linear conv'; empty: all")
    public_data: str = _setting("", "curvature", "safetensors file of public images for --probe public")

    max_physical_batch_size: int = _setting(0, "machine", "rows in memory at once; 0: all; -1: as many as fit", least=-1)
    pad_to_multiple: int = _setting(0, "machine", "micro-batches are padded to a multiple; 0: not at all", least=0)
    num_workers: int = _setting(0, "machine", "loader processes", least=0)
    threads: int = _setting(0, "machine", "numerical threads; 0: torch's own choice", least=0)
    device: str = _setting("cpu", "machine", "torch device")

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            object.__setattr__(self, setting.name, _checked(setting, getattr(self, setting.name)))
        wanted = {"dp-sgd": "sgd", "dp-adam": "adam"}.get(self.method)
        if wanted and self.optimizer not in ("", wanted):
            raise ConfigError(
                f"method = {self.method!r} means optimizer = {wanted!r}, got {self.optimizer!r}; leave optimizer out, "
                "or use method = 'dp-kfc', which takes either"
            )
        if not self.optimizer:
            object.__setattr__(self, "optimizer", wanted or "adam")
        if self.eval_on == "validation" and self.validation_size == 0:
            raise ConfigError("eval_on = 'validation' needs validation_size > 0, examples cut from the training set")
        if self.exponent > 0.5:
            raise ConfigError(f"exponent must be at most 0.5, got {self.exponent}")
        if self.method == "dp-kfc" and self.probe == "public" and not self.public_data:
            raise ConfigError("probe = 'public' needs public_data, a safetensors file with `inputs` (and `labels`)")

    @property
    def uses_preconditioner(self) -> bool:
        """Whether gradients are whitened."""
        return self.method == "dp-kfc"


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known word, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
            raise ConfigError(f"{where}: unknown section [{key}]; {nearest(key, SECTIONS)}")
        for name, inner in value.items():
            section = _known_key(name, where).metadata["section"]
            if section != key:
                raise ConfigError(f"{where}: {name} stands in [{key}] and belongs into [{section}]")
            flat[name] = inner
    return flat


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
    of_method = dict(per_method.get(method, {})) if isinstance(method, str) else {}
    tables = {key: of_method.pop(key) for key in OPTIMIZERS if key in of_method}
    settings |= flatten(of_method, f"{where} [method.{method}]")
    optimizer = chosen.get("optimizer") or settings.get("optimizer") or ("sgd" if method == "dp-sgd" else "adam")
    settings |= flatten(tables.get(optimizer, {}), f"{where} [method.{method}.{optimizer}]")
    return RunConfig(**{**settings, **{_known_key(key, "settings").name: value for key, value in chosen.items()}})


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
