"""Train with TRL's `SFTTrainer` or `DPOTrainer`, with adapters of peft or without.

    plan = PrivacyConfig(expected_batch_size=256, epochs=3).calibrate(
        epsilon=3.0, delta=1e-5, dataset_size=len(rows)
    )
    trainer = PrivateSFTTrainer(
        model, SFTConfig("out"), plan=plan, train_dataset=rows, peft_config=LoraConfig()
    )
    trainer.train()

TRL prepares the data set, makes adapters and evaluates; `PrivateTrainer` has the training loop.
TRL divides a loss by the tokens of the batch; here an example is divided by its own. TRL drops rows
that `max_length` leaves without a label; here they stay, and have no gradient, so that the number
of rows is the plan's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset, concatenate_datasets
from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, pack_dataset

from dpkfc.config import Plan
from dpkfc.data.duplicates import check_held_out
from dpkfc.data.loading import Collate
from dpkfc.integrations._hf_checks import check_kind
from dpkfc.integrations._hf_loss import LossFn
from dpkfc.integrations.huggingface import PrivateTrainer
from dpkfc.linalg.blocks import raise_precision

_UNIT = "unit"
_ROWS = ["input_ids", "labels"]


class _TextTrainer(PrivateTrainer):
    """What both trainers share: the rows of the training data set and their units."""

    aux_loss_enabled: bool
    router_aux_loss_coef: float

    def __init__(
        self, model: Any, args: Any, *, plan: Plan, units: Any = None, **settings: Any
    ) -> None:
        rows = settings.get("train_dataset")
        if not isinstance(rows, Dataset):
            raise ValueError(
                f"train_dataset is a {type(rows).__name__}; pass datasets.Dataset.from_list(rows)"
            )
        if {"image", "images"} & set(rows.column_names):
            raise ValueError("train_dataset has images; leave them out, or use a Session")
        if args.activation_offloading:
            raise ValueError(
                "activation_offloading is a part of TRL's own training step, which is never called;"
                " set PrivacyConfig.max_physical_batch_size"
            )
        self._given = rows
        self._ids = None if isinstance(units, str) else units
        if self._ids is not None:
            if len(self._ids) != len(rows):
                raise ValueError(
                    f"units has {len(self._ids)} ids for the {len(rows)} rows of train_dataset;"
                    " give one a row"
                )
            units = _UNIT
        super().__init__(model, args, plan=plan, units=units, **settings)
        if self.aux_loss_enabled:
            raise ValueError(
                f"router_aux_loss_coef is {self.router_aux_loss_coef}: it balances the experts over"
                " a whole batch, which mixes examples; set router_aux_loss_coef=0.0"
            )
        # A frozen copy, from which TRL computes the reference.
        for name, p in self.model.named_parameters():
            if ".ref." in name:
                p.requires_grad_(False)

    def _prepare_dataset(self, dataset: Any, tokenizer: Any, args: Any, *rest: Any) -> Any:
        """Return the tokens of every row, also of those that TRL drops for their length."""
        if rest[-1] == "train":
            args = _replace(args, max_length=None)
            if self._ids is not None:
                # TRL may shuffle the rows.
                dataset = dataset.add_column(_UNIT, list(self._ids))
        return super()._prepare_dataset(dataset, tokenizer, args, *rest)  # type: ignore[misc]

    def evaluate(self, eval_dataset: Any = None, *rest: Any, **settings: Any) -> dict[str, float]:
        """Return metrics, as `trl` does, of data that was not trained on.

        Raises:
            ValueError: the train_dataset, whose metrics would be logged without noise.
        """
        named = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
        for name, dataset in named.items():
            # TRL makes a copy of either, which shows no origin.
            if isinstance(dataset, Dataset):
                check_held_out(dataset, self._given, name)
                check_held_out(dataset, self.train_dataset, name)
        return super().evaluate(eval_dataset, *rest, **settings)

    def _send_telemetry(self) -> None:
        """Send nothing: TRL would report the model's family and the device."""


class PrivateSFTTrainer(_TextTrainer, SFTTrainer):
    """Fine-tunes a language model under a plan, as `trl.SFTTrainer` does; one trainer, one run.

    Args:
        model: a causal language model of transformers, or its name.
        args: an `SFTConfig`.
        plan: from `PrivacyConfig.calibrate`, for the rows (or units) of `train_dataset`.
        units: one id a row `[rows]`, or the name of a column of `train_dataset`. With
            `packing=True` the rows of one unit are packed together.
        settings: as of `PrivateTrainer` and `trl.SFTTrainer`, among them `peft_config`,
            `processing_class` and `formatting_func`.

    Raises:
        ValueError: arguments that do not go with private training, naming each fix.

    Guarantee:
        As in `PrivateTrainer`. An example is a row as TRL prepares it; its loss is the mean over
        its own labelled tokens.
    """

    host = SFTTrainer
    host_arguments = SFTConfig

    def __init__(
        self, model: Any, args: SFTConfig, *, plan: Plan, units: Any = None, **settings: Any
    ) -> None:
        check_kind(args, SFTConfig)
        _check_sft(args, units, settings.get("train_dataset"))
        self._packs = args.packing
        self._unit = units if isinstance(units, str) else _UNIT
        args = _replace(args, packing=False)
        super().__init__(model, args, plan=plan, units=units, **settings)

    def _prepare_dataset(self, dataset: Any, tokenizer: Any, args: Any, *rest: Any) -> Any:
        prepared = super()._prepare_dataset(dataset, tokenizer, args, *rest)
        if rest[-1] != "train" or args.max_length is None:
            return prepared
        if self._packs:
            return _pack_units(prepared, self._unit, args.max_length)
        keeps_start = args.truncation_mode == "keep_start"
        kept = slice(args.max_length) if keeps_start else slice(-args.max_length, None)
        return prepared.map(lambda row: {name: row[name][kept] for name in _ROWS})


def _check_sft(args: SFTConfig, units: Any, rows: Any) -> None:
    """Refuse settings that join people in a row, or that the private loss never sees."""
    is_packed = "seq_lengths" in getattr(rows, "column_names", ())
    if (args.packing or is_packed) and units is None:
        raise ValueError(
            "packing puts several people into one row, which is one example; set packing=False, or"
            " pass units= to pack the rows of each person"
        )
    if args.packing and (args.packing_strategy != "wrapped" or args.max_length is None):
        raise ValueError(
            f"packing_strategy='{args.packing_strategy}' flattens a batch, which mixes examples;"
            " set packing_strategy='wrapped' and max_length"
        )
    if args.padding_free:
        raise ValueError(
            "padding_free=True joins a batch into one row, which mixes examples; leave it out"
        )
    if args.loss_type != "nll":
        raise ValueError(
            f"loss_type='{args.loss_type}' is not supported; leave it out, or pass"
            " per_example_loss="
        )


def _pack_units(rows: Dataset, unit: str, max_length: int) -> Dataset:
    """Return rows of a length, each of tokens of one unit."""
    of_unit: dict[Any, list[int]] = defaultdict(list)
    for i, name in enumerate(rows[unit]):
        of_unit[name].append(i)
    packed = []
    for name, own in of_unit.items():
        part = pack_dataset(rows.select(own).select_columns(_ROWS), max_length, "wrapped")
        packed.append(part.add_column(unit, [name] * len(part)))
    return concatenate_datasets(packed)


# --------------------------------------------------------------------------------------------------


class PrivateDPOTrainer(_TextTrainer, DPOTrainer):
    """Trains on preferences under a plan, as `trl.DPOTrainer` does; one trainer, one run.

    Log-probabilities of the reference are computed once for each pair, before training, as with
    `precompute_ref_log_probs=True`; `datasets` keeps them in its cache, next to the tokens.

    Args:
        model: a causal language model of transformers, or its name.
        args: a `DPOConfig`.
        plan: from `PrivacyConfig.calibrate`, for the pairs (or units) of `train_dataset`.
        units: one id a pair `[pairs]`, or the name of a column of `train_dataset`.
        per_example_loss: maps (model, inputs) to one loss a pair `[N]`; inputs are as of
            `PairCollate`.
        settings: as of `PrivateTrainer` and `trl.DPOTrainer`, among them `ref_model` and
            `peft_config`.

    Raises:
        ValueError: arguments that do not go with private training, naming each fix.

    Guarantee:
        As in `PrivateTrainer`; an example is one pair.
    """

    host = DPOTrainer
    host_arguments = DPOConfig

    def __init__(
        self,
        model: Any,
        args: DPOConfig,
        *,
        plan: Plan,
        units: Any = None,
        per_example_loss: LossFn | None = None,
        **settings: Any,
    ) -> None:
        check_kind(args, DPOConfig)
        if per_example_loss is None:
            _check_dpo(args)
        if args.sync_ref_model:
            raise ValueError(
                "sync_ref_model=True moves the reference of pairs whose log-probabilities are"
                " computed once; leave it out"
            )
        super().__init__(
            model,
            _replace(args, precompute_ref_log_probs=True),
            plan=plan,
            units=units,
            per_example_loss=per_example_loss,
            **settings,
        )

    def make_default_loss(self) -> LossFn:
        """Return the losses of the pairs of a batch."""
        return PairLoss(dict(zip(self.loss_types, self.loss_weights, strict=True)), self.beta)

    def make_collate(self, collate: Collate) -> Collate:
        """Return a collate function with one row a pair."""
        return PairCollate(collate)


def _check_dpo(args: DPOConfig) -> None:
    """Refuse losses that mix pairs, or that `PairLoss` does not know."""
    unknown = [name for name in args.loss_type if name not in _PAIR_LOSSES]
    if unknown:
        raise ValueError(
            f"loss_type '{unknown[0]}' is unknown; choose {', '.join(_PAIR_LOSSES)}, or pass"
            " per_example_loss="
        )
    settings = {"ld_alpha": None, "use_weighting": False, "f_divergence_type": "reverse_kl"}
    for name, default in settings.items():
        if getattr(args, name) != default:
            raise ValueError(
                f"{name}={getattr(args, name)!r} is not supported; leave it out, or pass"
                " per_example_loss="
            )


@dataclass(frozen=True)
class PairCollate:
    """A collate function with one row a pair, from TRL's, which has the rejected ones at the end.

    Args:
        collate: of TRL.
    """

    collate: Collate

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        """Return `input_ids`, `attention_mask` and `completion_mask` `[N, 2, L]`.

        The chosen text is the first of the two. `ref_logps` `[N, 2]` are log-probabilities of the
        completions under the reference.
        """
        batch = self.collate(examples)
        names = ("input_ids", "attention_mask", "completion_mask")
        pairs = {name: torch.stack(batch[name].chunk(2), 1) for name in names}
        references = (batch["ref_chosen_logps"], batch["ref_rejected_logps"])
        return {**pairs, "ref_logps": torch.stack(references, 1)}


_PAIR_LOSSES = ("sigmoid", "hinge", "ipo", "apo_zero", "apo_down", "sft")


@dataclass(frozen=True)
class PairLoss:
    """The losses of pairs, as of `trl.DPOTrainer` for one pair alone.

    Args:
        weights: of each loss, by its name in `DPOConfig.loss_type`.
        beta: of `DPOConfig`.
    """

    weights: Mapping[str, float]
    beta: float

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the losses `[N]` of a batch of `PairCollate`."""
        ids, mask = inputs["input_ids"], inputs["completion_mask"][..., 1:]
        logits = model(
            input_ids=ids.flatten(0, 1), attention_mask=inputs["attention_mask"].flatten(0, 1)
        ).logits
        wide = raise_precision(logits[:, :-1])
        labels = ids[..., 1:].flatten(0, 1)
        losses = F.cross_entropy(wide.transpose(1, 2), labels, reduction="none")
        logps = -(losses.unflatten(0, ids.shape[:2]) * mask).sum(2)
        ratios = logps - inputs["ref_logps"]
        lengths = mask.sum(2).clamp(min=1)
        total = torch.zeros_like(ratios[:, 0])
        for name, weight in self.weights.items():
            total = total + weight * self._loss_of(name, ratios, logps, lengths)
        return total

    def _loss_of(self, name: str, ratios: Tensor, logps: Tensor, lengths: Tensor) -> Tensor:
        """Return one of the losses `[N]`.

        Args:
            name: in `DPOConfig.loss_type`.
            ratios: log-probabilities less the reference model's `[N, 2]`, chosen texts first.
            logps: log-probabilities of the completions `[N, 2]`.
            lengths: tokens of the completions `[N, 2]`.
        """
        chosen, rejected = ratios.unbind(1)
        margin = self.beta * (chosen - rejected)
        if name == "sigmoid":
            return -F.logsigmoid(margin)
        if name == "hinge":
            return torch.relu(1 - margin)
        if name == "ipo":
            mean_chosen, mean_rejected = (ratios / lengths).unbind(1)
            return (mean_chosen - mean_rejected - 1 / (2 * self.beta)).square()
        if name == "apo_zero":
            return 1 - torch.sigmoid(self.beta * chosen) + torch.sigmoid(self.beta * rejected)
        if name == "apo_down":
            return torch.sigmoid(self.beta * chosen) + 1 - torch.sigmoid(margin)
        return -logps[:, 0] / lengths[:, 0]


def _replace(args: Any, **changes: Any) -> Any:
    """Return a copy of training arguments with other settings."""
    changed = copy(args)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed
