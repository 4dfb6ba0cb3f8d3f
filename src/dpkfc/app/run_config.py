"""All settings of a run, as one value that its sections make up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpkfc.app.methods import METHODS
from dpkfc.app.settings import (
    AUGMENTS,
    LOGGERS,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    PostprocessSettings,
    PreconditionerSettings,
    PrivacySettings,
    RunSettings,
)
from dpkfc.app.toml import ConfigError, nearest
from dpkfc.report.officer import Declared


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
                "max_grad_norm = auto (or 0) is for preconditioner = 'moments', got"
                f" {self.preconditioner.preconditioner!r}: give C above 0"
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


_PARTS = {"kfac": "KFAC", "ngd": "NGD", "adadps": "AdaDPS", "gep": "GEP"}
_PARTS |= {"adam-bc": "AdamBC", "sofim": "SOFIM"}


def find_idle(config: RunConfig, names: Iterable[str]) -> list[str]:
    """Return which of these settings are of parts that a run does not have, and of which."""
    kinds = config.preconditioner.preconditioner, config.optimizer.optimizer
    parts = {"PrivacyConfig", *(_PARTS.get(kind, "") for kind in kinds)}
    parts |= {"DiSK"} if config.postprocess.filter != "none" else set()
    parts |= {"PinkNoise", "DeadLeaves"} if kinds[0] in _PARTS else set()
    idle = []
    for name in names:
        owners = SETTINGS[name].metadata.get("owners", ())
        if name == "momentum" and kinds[1] != "sgd":
            idle.append("momentum (sgd)")
        elif owners and name != "likelihood" and parts.isdisjoint(owners):
            idle.append(f"{name} ({', '.join(owners)})")
    return idle


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
