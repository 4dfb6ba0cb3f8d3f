"""The keywords of `make_private`: what is taken, and what is refused with its fix."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from dpkfc.gradients.clipping import CLIPPINGS

__all__ = ["Options"]

_ADAPTIVE = (
    "adaptive clipping would spend a budget of its own on norms; leave it out: max_grad_norm is fixed, and clipping='normalised' "
    "or 'automatic' scales every gradient, so that no bound has to be found"
)
_UNITS = "an engine protects single examples; patients need a Session: PrivacyConfig(unit=..., max_records_per_unit=...)"
_PLANNED = "noise, clip and batch size have no schedules, a plan is fixed for its whole run; leave it out"
_ELSEWHERE = {
    **dict.fromkeys(("target_unclipped_quantile", "clipbound_learning_rate", "unclipped_num_std"), _ADAPTIVE),
    **dict.fromkeys(("min_clipbound", "max_clipbound"), _ADAPTIVE),
    **dict.fromkeys(("unit", "units", "max_records_per_unit"), _UNITS),
    **dict.fromkeys(("noise_scheduler", "grad_clip_scheduler", "noise_multiplier_schedule"), _PLANNED),
    "max_physical_batch_size": "give it to BatchMemoryManager(data_loader=..., max_physical_batch_size=..., optimizer=...)",
    "noise": "an engine adds Gaussian noise; noise='rounded' needs a Session: PrivacyConfig(noise='rounded')",
    **dict.fromkeys(("accountant", "secure_mode"), "give it to PrivacyEngine(...)"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The further keywords of `make_private` and `make_private_with_epsilon`, those of Opacus first.

    Attributes:
        criterion: the script's loss, returned as it is where `grad_sample_mode="ghost"`.
        batch_first: only True.
        loss_reduction: of the script's loss, "mean" or "sum"; with "sum" the gradient is not divided by the batch size.
        poisson_sampling: False shuffles, which needs `uncertified=True`.
        clipping: "flat", "per_layer" with one max_grad_norm C (each of L layers is clipped to C / √L), or this library's
            "normalised" or "automatic".
        noise_generator: only None.
        grad_sample_mode: "hooks", or "ghost" for the four return values of such a script; both compute the same.
        wrap_model: only True; the module itself is returned, no wrapper.
        rand_on_empty: only False; an empty batch has a leading axis of size 0.
        preconditioner: for example `curvature.KFAC(probe=PinkNoise((1, 28, 28)))`; None is plain DP-SGD.
        readout: from the preconditioner's coordinates to the step, as in `PrivacyConfig`.
        ledger_path: file of the privacy ledger, continued where it exists; None keeps it in memory.
        uncertified: accept shuffled batches, whose ε is no guarantee.
        test_mode_seed: repeatable noise and sampling; NOT PRIVATE.
        verify: check on public rows, at the first call of the model, that examples do not mix. "strict" refuses operations whose
            batch axis cannot be followed. Every batch is proved either way.

    Raises:
        ValueError: a value that this library does not take, naming the fix.
    """

    criterion: nn.Module | None = None
    batch_first: bool = True
    loss_reduction: str = "mean"
    poisson_sampling: bool = True
    clipping: str = "flat"
    noise_generator: torch.Generator | None = None
    grad_sample_mode: str = "hooks"
    wrap_model: bool = True
    rand_on_empty: bool = False
    preconditioner: Any = None
    readout: str = "whitened"
    ledger_path: str | os.PathLike[str] | None = None
    uncertified: bool = False
    test_mode_seed: int | None = None
    verify: bool | str = True

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Options:
        """The options of a call.

        Raises:
            ValueError: an unknown keyword, naming the nearest known one or what there is in its place; a value that is not taken.
        """
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                if name in _ELSEWHERE:
                    raise ValueError(f"keyword {name!r} is not supported: {_ELSEWHERE[name]}")
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known ones are {', '.join(known)}"
                raise ValueError(f"unknown keyword {name!r}; {hint}")
        return cls(**keywords)

    def __post_init__(self) -> None:
        for refused, message in (*_refused_values(self), *_refused_pairs(self)):
            if refused:
                raise ValueError(message)


def _refused_values(options: Options) -> Iterator[tuple[bool, str]]:
    yield not options.batch_first, "batch_first=False is not supported; put the batch on the leading axis"
    yield (
        options.loss_reduction not in ("mean", "sum"),
        f"loss_reduction must be 'mean' or 'sum', got {options.loss_reduction!r}",
    )
    yield (
        options.clipping not in CLIPPINGS,
        f"clipping={options.clipping!r} is not supported; choose one of {', '.join(CLIPPINGS)}",
    )
    yield (
        options.noise_generator is not None,
        "noise_generator is not supported: the noise is keyed by the operating system; leave it out, or use "
        "test_mode_seed= for a repeatable run that is not private",
    )
    yield (
        options.grad_sample_mode not in ("hooks", "ghost"),
        f"grad_sample_mode={options.grad_sample_mode!r} is not supported; leave it out: norms are taken without per-sample "
        "gradients, and modules without a rule are covered by torch.func, in every mode",
    )
    yield (
        not options.wrap_model,
        "wrap_model=False is not supported; leave it out: the module itself is returned, close() takes its hooks off",
    )
    yield (
        options.rand_on_empty,
        "rand_on_empty=True is not supported; leave it out: an empty batch has a leading axis of size 0. Where the model cannot "
        "take that (packed sequences), call only optimizer.step() when the batch is empty: if len(y) == 0: optimizer.step(); "
        "continue",
    )


def _refused_pairs(options: Options) -> Iterator[tuple[bool, str]]:
    yield (
        not options.poisson_sampling and not options.uncertified,
        "poisson_sampling=False has no certified guarantee: leave it out, or set uncertified=True to run shuffled "
        "batches with that stamped on the ledger",
    )
    yield (
        options.poisson_sampling and options.uncertified,
        "uncertified=True goes with poisson_sampling=False; leave it out for Poisson sampling",
    )
    yield (
        options.criterion is not None and not isinstance(options.criterion, nn.Module),
        f"criterion must be a torch module, whose calls can be seen, got {type(options.criterion).__name__}; wrap the function "
        "in one, or leave criterion out",
    )
    reduction = getattr(options.criterion, "reduction", options.loss_reduction)
    yield (
        reduction != options.loss_reduction,
        f"criterion has reduction={reduction!r} but loss_reduction={options.loss_reduction!r}; make them equal",
    )
