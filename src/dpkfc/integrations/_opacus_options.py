"""The keywords of `make_private`: what is taken, and what is refused with its fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from dpkfc.checkpoint import StrPath
from dpkfc.clipping import CLIPPINGS
from dpkfc.integrations._opacus_step import LINE_BY_LINE

# How Opacus computes gradients of single examples. Here every mode gives the same values.
GRADIENT_MODES = ("hooks", "functorch", "ew", "ghost")

_UNITS_NEED_SESSION = (
    "an engine protects examples; take a Session: PrivacyConfig(unit=, max_records_per_unit=)"
)
_OTHER_CALL = "give it to make_private_with_epsilon(...)"
# Keywords of other calls, and where they go.
_MISPLACED_KEYWORDS = {
    "unit": _UNITS_NEED_SESSION,
    "units": _UNITS_NEED_SESSION,
    "max_records_per_unit": _UNITS_NEED_SESSION,
    "max_physical_batch_size": (
        "give it to BatchMemoryManager(data_loader=, max_physical_batch_size=, optimizer=)"
    ),
    "noise": "take a Session: PrivacyConfig(noise=)",
    "bands": "take a Session: PrivacyConfig(noise='correlated', bands=)",
    "accountant": "give it to PrivacyEngine(...)",
    "secure_mode": "give it to PrivacyEngine(...)",
    "target_epsilon": _OTHER_CALL,
    "target_delta": _OTHER_CALL,
    "epochs": _OTHER_CALL,
    "steps": "write epochs=steps / len(data_loader)",
    "noise_multiplier": "the target (ε, δ) decides the noise; leave it out, or use make_private",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The other keywords of `make_private` and `make_private_with_epsilon`.

    Arguments of Opacus come first.

    Attributes:
        criterion: the script's loss, returned as it is where `grad_sample_mode="ghost"`.
        batch_first: only True.
        loss_reduction: of the script's loss, "mean" or "sum"; with "sum" the gradient is not
            divided by the batch size.
        poisson_sampling: False shuffles, which needs `uncertified=True`.
        clipping: "flat", "per_layer" with one max_grad_norm C (each of L layers is clipped to C /
            √L), or this library's "normalised" or "automatic".
        noise_generator: only None.
        grad_sample_mode: "hooks", "functorch", "ew", or "ghost" for the four return values of such
            a script; all compute the same.
        wrap_model: ignored; the module itself is always returned.
        rand_on_empty: only False; an empty batch has a leading axis of size 0.
        preconditioner: for example `curvature.KFAC(probe=PinkNoise((1, 28, 28)))`; None is plain
            DP-SGD.
        readout: how a release becomes a step, "whitened", "natural" or "inverse", as in
            `PrivacyConfig`.
        ledger_path: file of the privacy ledger; None keeps it in memory.
        resume: go on with a ledger that holds releases, after the script has loaded the weights of
            its last checkpoint. If the plan is spent, only evaluation is left.
        uncertified: accept shuffled batches, whose ε is not a guarantee, and a δ of 1 / N or more.
        test_mode_seed: repeatable noise and sampling; NOT PRIVATE.
        verify: check on public rows, at the first call of the model, that examples do not mix.
            Every batch is proved either way.

    Raises:
        ValueError: a value is not supported, naming the fix.
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
    ledger_path: StrPath | None = None
    resume: bool = False
    uncertified: bool = False
    test_mode_seed: int | None = None
    verify: bool = True

    @classmethod
    def parse(cls, keywords: Mapping[str, Any]) -> Options:
        """Return the options of a call.

        Raises:
            ValueError: an unknown keyword, naming the nearest known one or its replacement; a value
                that is not supported.
        """
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                if name in _MISPLACED_KEYWORDS:
                    raise ValueError(
                        f"keyword {name!r} is not supported: {_MISPLACED_KEYWORDS[name]}"
                    )
                near = difflib.get_close_matches(name, known, 1, cutoff=0.8)
                hint = f"did you mean {near[0]!r}?" if near else LINE_BY_LINE
                raise ValueError(f"unknown keyword {name!r}; {hint}")
        return cls(**keywords)

    def __post_init__(self) -> None:
        _check_options(self)


def _check_options(options: Options) -> None:
    """Refuse an option that is not supported."""
    if not options.batch_first:
        raise ValueError("batch_first=False is not supported; put the batch on the leading axis")
    if options.loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {options.loss_reduction!r}")
    if options.clipping == "adaptive":
        raise ValueError(
            "clipping='adaptive' is not supported: it spends a budget on norms; write "
            "clipping='automatic', which needs no bound"
        )
    if options.clipping not in CLIPPINGS:
        raise ValueError(
            f"clipping={options.clipping!r} is not supported; choose one of {', '.join(CLIPPINGS)}"
        )
    if options.noise_generator is not None:
        raise ValueError(
            "noise_generator is not supported; leave it out, or use test_mode_seed= for a"
            " repeatable run that is not private"
        )
    if options.grad_sample_mode not in GRADIENT_MODES:
        raise ValueError(
            f"grad_sample_mode={options.grad_sample_mode!r} is not supported; leave it out: every"
            " mode computes the same, in one process"
        )
    if options.rand_on_empty:
        raise ValueError(
            "rand_on_empty=True is not supported; where the model takes no empty batch, write:"
            " if len(y) == 0: optimizer.step(); continue"
        )

    if not options.poisson_sampling and not options.uncertified:
        raise ValueError(
            "poisson_sampling=False has no certified ε: leave it out, or write uncertified=True,"
            " which is stamped on the ledger"
        )
    if options.criterion is not None and not isinstance(options.criterion, nn.Module):
        raise ValueError(
            f"criterion must be a torch module, got {type(options.criterion).__name__}; wrap it in"
            " one, or leave criterion out"
        )
    reduction = getattr(options.criterion, "reduction", options.loss_reduction)
    if reduction != options.loss_reduction:
        raise ValueError(
            f"criterion has reduction={reduction!r} but loss_reduction={options.loss_reduction!r};"
            " make them equal"
        )
