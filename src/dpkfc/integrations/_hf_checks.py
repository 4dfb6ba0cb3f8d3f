"""What a Trainer of transformers can be given in private training; all else is refused.

Which of `transformers.TrainingArguments` a private run can keep, and which contradict its plan.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from dpkfc.config import Plan
from dpkfc.data.loading import is_map_style
from dpkfc.integrations._shared import steps_per_epoch

_log = logging.getLogger(__name__)

_DEFAULT_BATCH, _DEFAULT_EPOCHS, _DEFAULT_CLIP = 8, 3.0, 1.0


# Methods that the private loop never calls, each with what to do instead.
_SAMPLING = "the session draws the batches; pass data_collator= and leave sampling to the plan"
_UNCALLED = {
    "training_step": "the session makes the steps; pass per_example_loss=",
    "_inner_training_loop": "the session makes the steps; use callbacks",
    "get_train_dataloader": _SAMPLING,
    "_get_train_sampler": _SAMPLING,
    "get_batch_samples": _SAMPLING,
}

# Arguments that only the Trainer's own loop and training loader read.
_WITHOUT_EFFECT = (
    "average_tokens_across_devices",
    "data_seed",
    "dataloader_drop_last",
    "dataloader_in_order",
    "dataloader_multiprocessing_context",
    "dataloader_persistent_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "debug",
    "ignore_data_skip",
    "length_column_name",
    "skip_memory_metrics",
    "torch_empty_cache_steps",
)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse keywords of a Trainer that private training does not take."""
    for name, instead in (("model_init", "model="), ("compute_loss_func", "per_example_loss=")):
        if settings.get(name) is not None:
            raise ValueError(f"{name}= is not supported by private training; pass {instead}")
    train = settings.get("train_dataset")
    if train is not None and not is_map_style(train):
        raise ValueError(
            f"train_dataset is a {type(train).__name__}, which cannot be sampled at random; pass a"
            " dataset with a length and an index"
        )


def check_overrides(kind: Any, base: Any, has_loss: bool, model: nn.Module) -> None:
    """Refuse methods of a subclass or a model that the private loop never calls.

    Args:
        kind: the class of the trainer.
        base: `PrivateTrainer`.
        has_loss: whether per_example_loss= was given.
        model: of the trainer.
    """
    for name, instead in _UNCALLED.items():
        if getattr(kind, name) is not getattr(base, name):
            raise ValueError(f"{kind.__name__}.{name}() would never be called: {instead}")
    if kind.compute_loss is not kind.host.compute_loss and not has_loss:
        raise ValueError(
            "compute_loss() gives one loss for a batch, which cannot be clipped; pass"
            " per_example_loss="
        )
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "the model is compiled, and shows no calls of its layers; pass the plain module"
        )


def check_schedule(optimizer: Any, schedule: Any) -> None:
    """Refuse an optimizer or a schedule that does not fit private training."""
    if callable(getattr(optimizer, "train", None)):
        raise ValueError(
            f"{type(optimizer).__name__} exchanges the weights between training and evaluation,"
            " which is not supported; choose another optimizer"
        )
    kind = type(schedule).__name__
    if isinstance(schedule, ReduceLROnPlateau) or kind == "GreedyLR":
        raise ValueError(
            f"{kind} reads a metric; a private run steps its learning rate schedule on releases."
            " Choose another one"
        )


def check_kind(args: Any, kind: type[TrainingArguments]) -> None:
    """Refuse training arguments of another class."""
    if not isinstance(args, kind):
        raise ValueError(f"args is a {type(args).__name__}; pass {kind.__name__}(output_dir)")


def check_arguments(args: TrainingArguments, plan: Plan, has_loss: bool) -> None:
    """Refuse an argument that would be ignored, or would let private data out.

    Args:
        args: the training arguments.
        plan: of the run.
        has_loss: whether per_example_loss= was given.
    """
    logical, physical = plan.expected_batch_size, plan.config.max_physical_batch_size
    size = args.per_device_train_batch_size
    if size not in (_DEFAULT_BATCH, logical, physical):
        raise ValueError(
            f"per_device_train_batch_size is {size}, but the plan draws {logical} examples,"
            f" {physical or 'all'} at a time; set PrivacyConfig.expected_batch_size instead"
        )
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, but a"
            " logical batch is drawn and clipped as one; set"
            " PrivacyConfig.max_physical_batch_size"
        )
    if args.max_steps > 0 and args.max_steps != plan.steps:
        raise ValueError(
            f"TrainingArguments.max_steps is {args.max_steps} but the noise was calibrated for"
            f" {plan.steps} releases; leave it out, and set PrivacyConfig.steps"
        )
    epochs = args.num_train_epochs
    if (
        args.max_steps <= 0
        and epochs != _DEFAULT_EPOCHS
        and round(epochs * steps_per_epoch(plan)) != plan.steps
    ):
        raise ValueError(
            f"num_train_epochs is {epochs}, but the noise was calibrated for {plan.steps}"
            f" releases of {steps_per_epoch(plan)} a pass; leave it out, and set"
            " PrivacyConfig.epochs"
        )
    if args.max_grad_norm not in (None, 0, _DEFAULT_CLIP):
        raise ValueError(
            f"TrainingArguments.max_grad_norm is {args.max_grad_norm}: it clips a sum, which"
            " bounds no example; leave it out: PrivacyConfig.max_grad_norm clips examples"
        )

    if has_loss and args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor is {args.label_smoothing_factor}, which per_example_loss="
            " never sees; leave it out, and smooth labels in per_example_loss"
        )
    if args.train_sampling_strategy != "random":
        raise ValueError(
            f"train_sampling_strategy is '{args.train_sampling_strategy}', but the plan's"
            " sampler draws them at random, which is what ε is computed for; leave it out"
        )
    if args.include_num_input_tokens_seen not in ("no", False):
        raise ValueError(
            "TrainingArguments.include_num_input_tokens_seen logs the size of private batches;"
            " leave it out"
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size repeats steps; set PrivacyConfig.max_physical_batch_size"
        )
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "neftune_noise_alpha is not supported; leave it out (the noise of private training is"
            " already added)"
        )

    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    ignored = [x for x in _WITHOUT_EFFECT if getattr(args, x) not in (defaults[x], [], None)]
    if args.use_cpu and "dataloader_pin_memory" in ignored:
        ignored.remove("dataloader_pin_memory")  # transformers itself has turned it off
    # transformers removes an entry that it has read.
    plain, chosen = AcceleratorConfig().to_dict(), args.accelerator_config
    assert isinstance(chosen, AcceleratorConfig)  # transformers has converted it
    if any(plain[name] != value for name, value in chosen.to_dict().items()):
        ignored.append("accelerator_config")
    if ignored:
        _log.warning("in private training these arguments have no effect: %s", ", ".join(ignored))
    if args.fp16:
        raise ValueError(
            "TrainingArguments.fp16 scales the loss by a factor that follows overflows of"
            " private gradients; use bf16=True, which needs no scaling"
        )
    # Releases of transformers before 5.23 have the second name alone.
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if vars(args).get(name) not in (None, {}, {"use_reentrant": False}):
            raise ValueError(
                "activation checkpointing shows the inputs of layers with use_reentrant=False"
                f" only, torch's default; leave {name} out"
            )
    if args.torch_compile:
        raise ValueError(
            "torch_compile is not supported: a compiled module shows no calls of its layers; leave"
            " it out"
        )
    if args.use_liger_kernel:
        raise ValueError(
            "use_liger_kernel replaces layers by fused ones that cannot be recorded; leave it out"
        )
    if bool(args.deepspeed or args.fsdp or args.parallelism_config) or args.world_size > 1:
        raise ValueError(
            "this trainer runs in one process: leave out deepspeed, fsdp, parallelism_config"
            " and launchers; a Session shares batches over processes"
        )


def check_own_settings(
    args: TrainingArguments, known_by: type[TrainingArguments] = TrainingArguments
) -> None:
    """Name settings that a subclass of `TrainingArguments` adds, which another trainer would read.

    Settings of a user's own class are a warning, since the script may read them itself.

    Args:
        args: the training arguments.
        known_by: the class whose settings the trainer reads.

    Raises:
        ValueError: settings of an installed package, as `SFTConfig(packing=True)` of trl.
    """
    kind = type(args)
    known = {field.name for field in fields(known_by)}
    own = {field.name: field.default for field in fields(args) if field.name not in known}
    # A class may resolve its defaults when it is made.
    with suppress(Exception):
        plain = kind(output_dir=str(args.output_dir), use_cpu=args.use_cpu, bf16=args.bf16)
        own = {name: getattr(plain, name) for name in own}
    changed = [name for name, default in own.items() if getattr(args, name) != default]
    in_force = [name for name in own if getattr(args, name) not in (None, False)]
    file = Path(getattr(sys.modules[kind.__module__], "__file__", None) or "")
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    if changed and is_installed:
        raise ValueError(
            f"{kind.__name__} sets {_name_some(changed)}, which PrivateTrainer would ignore: pass"
            " TrainingArguments, or take a trainer of dpkfc.integrations.trl"
        )
    if changed or (in_force and is_installed):
        _log.warning(
            "PrivateTrainer ignores what %s adds to TrainingArguments: %s; cut, pack and mask the"
            " dataset yourself, and pass per_example_loss= for another loss",
            kind.__name__,
            _name_some(changed or in_force),
        )


def check_vocabulary(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Compare a tokenizer, which is public, with the embedding of the model.

    A private record that holds an id without a row adds nothing, and no message says so.

    Raises:
        ValueError: the tokenizer has ids for which the embedding has no row.
    """
    collator = getattr(settings.get("data_collator"), "tokenizer", None)
    tokenizer = settings.get("processing_class", collator)
    embedding: Any = None
    # Not every model has one, and some say so by an exception.
    with suppress(AttributeError, NotImplementedError):
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    if (
        isinstance(tokenizer, Sized)
        and isinstance(embedding, nn.Embedding)
        and len(tokenizer) > embedding.num_embeddings
    ):
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} ids and the embedding {embedding.num_embeddings}"
            " rows: call model.resize_token_embeddings(len(tokenizer)) first"
        )


def _name_some(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
