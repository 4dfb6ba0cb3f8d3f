"""Which of `transformers.TrainingArguments` a private run can keep, and which contradict its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset

from dpkfc.data.repeats import check_held_out
from dpkfc.plan import Plan

__all__ = ["check_arguments", "check_overrides", "check_schedule", "check_settings", "steps_per_epoch"]

_DEFAULT_BATCH, _DEFAULT_EPOCHS, _DEFAULT_CLIP = 8, 3.0, 1.0


def steps_per_epoch(plan: Plan) -> int:
    """Releases in one pass over the dataset, in expectation; a public number."""
    return max(1, round(plan.dataset_size / plan.expected_batch_size))


def check_arguments(args: Any, plan: Plan) -> None:
    """Raise where an argument would be ignored silently, or would let private data out.

    Args:
        args: `transformers.TrainingArguments`.
        plan: of the run; batch size, steps and clip are its own.

    Raises:
        ValueError: naming the argument and the fix.
    """
    for refused, message in (*_of_the_plan(args, plan), *_of_the_loop(args), *_of_the_machine(args)):
        if refused:
            raise ValueError(message)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise on a keyword of `transformers.Trainer` that private training has no use for.

    Raises:
        ValueError: naming what to pass instead.
    """
    for name, instead in (("model_init", "model="), ("compute_loss_func", "per_example_loss=")):
        if settings.get(name) is not None:
            raise ValueError(f"{name}= is not supported by private training; pass {instead}")
    train, held_out = settings.get("train_dataset"), settings.get("eval_dataset")
    if isinstance(train, IterableDataset) or (train is not None and not hasattr(train, "__getitem__")):
        raise ValueError(
            f"train_dataset is a {type(train).__name__}, which cannot be sampled at random; pass a dataset with a length and "
            "an index"
        )
    for name, dataset in held_out.items() if isinstance(held_out, dict) else (("eval_dataset", held_out),):
        if dataset is not None:
            check_held_out(dataset, train, name if name == "eval_dataset" else f"eval_dataset['{name}']")


def check_overrides(kind: type, base: type, has_loss: bool) -> None:
    """Raise on a method of a subclass that the private loop would pass over in silence.

    Args:
        kind: the class of the trainer.
        base: the trainer that closes the Trainer's own loop.
        has_loss: whether per_example_loss= was given.

    Raises:
        ValueError: naming the method and what to do instead.
    """
    session = "the session draws the batches; pass data_collator= and leave sampling to the plan"
    for name, instead in {
        "training_step": "the session makes the steps; pass per_example_loss=",
        "_inner_training_loop": "the session makes the steps; use callbacks",
        "get_train_dataloader": session,
        "_get_train_sampler": session,
        "get_batch_samples": session,
    }.items():
        if getattr(kind, name) is not getattr(base, name):
            raise ValueError(f"{kind.__name__}.{name}() would never be called: {instead}")
    if kind.compute_loss is not base.compute_loss and not has_loss:  # type: ignore[attr-defined]
        raise ValueError("compute_loss() gives one loss for a batch, which cannot be clipped; pass per_example_loss=")


def check_schedule(optimizer: Any, schedule: Any) -> None:
    """Raise on a learning rate schedule that is not stepped on releases alone, and on an optimizer that has modes.

    Raises:
        ValueError: the schedule reads a metric; the optimizer keeps other weights for training than for evaluation.
    """
    if callable(getattr(optimizer, "train", None)):
        raise ValueError(
            f"{type(optimizer).__name__} exchanges the weights between training and evaluation, which is not supported; choose "
            "another optimizer"
        )
    if isinstance(schedule, ReduceLROnPlateau) or type(schedule).__name__ == "GreedyLR":
        raise ValueError(
            f"{type(schedule).__name__} reads a metric; a private run steps its learning rate schedule on releases. Choose "
            "another one"
        )


def _of_the_plan(args: Any, plan: Plan) -> Iterator[tuple[bool, str]]:
    logical, physical = plan.expected_batch_size, plan.config.max_physical_batch_size
    size = args.per_device_train_batch_size
    yield (
        size not in (_DEFAULT_BATCH, logical, physical),
        f"TrainingArguments.per_device_train_batch_size is {size}, but the plan draws {logical} examples a step in expectation "
        f"and computes them {physical or 'all'} at a time; set PrivacyConfig.expected_batch_size and max_physical_batch_size "
        "and leave this one out",
    )
    yield (
        args.gradient_accumulation_steps != 1,
        f"TrainingArguments.gradient_accumulation_steps is {args.gradient_accumulation_steps}; a logical batch is drawn and "
        "clipped as one. Set PrivacyConfig.expected_batch_size to the whole batch and max_physical_batch_size to what fits "
        "in memory",
    )
    yield (
        args.max_steps > 0 and args.max_steps != plan.steps,
        f"TrainingArguments.max_steps is {args.max_steps} but the noise was calibrated for {plan.steps} releases; leave it "
        "out, and set PrivacyConfig.steps",
    )
    epochs = args.num_train_epochs
    yield (
        args.max_steps <= 0 and epochs != _DEFAULT_EPOCHS and round(epochs * steps_per_epoch(plan)) != plan.steps,
        f"TrainingArguments.num_train_epochs is {epochs} but the noise was calibrated for {plan.steps} releases of "
        f"{steps_per_epoch(plan)} a pass; leave it out, and set PrivacyConfig.epochs",
    )
    yield (
        (args.max_grad_norm or 0) not in (0, _DEFAULT_CLIP),
        f"TrainingArguments.max_grad_norm is {args.max_grad_norm}: it would clip the sum over a batch, which bounds no "
        "example. Examples are clipped by PrivacyConfig.max_grad_norm; leave this one out",
    )


def _of_the_loop(args: Any) -> Iterator[tuple[bool, str]]:
    yield (
        args.train_sampling_strategy != "random",
        f"TrainingArguments.train_sampling_strategy='{args.train_sampling_strategy}' groups or orders the examples; the plan's "
        "sampler draws them at random, which is what ε is computed for. Leave it out",
    )
    yield (
        args.include_num_input_tokens_seen not in ("no", False),
        "TrainingArguments.include_num_input_tokens_seen logs the size of private batches; leave it out",
    )
    yield args.auto_find_batch_size, "auto_find_batch_size repeats steps; set PrivacyConfig.max_physical_batch_size"
    yield (
        args.neftune_noise_alpha is not None,
        "neftune_noise_alpha is not supported; leave it out (the noise of private training is already added)",
    )


def _of_the_machine(args: Any) -> Iterator[tuple[bool, str]]:
    yield (
        args.fp16,
        "TrainingArguments.fp16 multiplies the loss by a factor that follows overflows of private gradients, before they are "
        "clipped; use bf16=True, which needs no scaling",
    )
    yield (
        (args.activation_checkpointing_kwargs or {"use_reentrant": False}) != {"use_reentrant": False},
        "activation checkpointing is taken as torch does it by default (use_reentrant=False): only then do layers show their "
        "inputs when they first run. Leave activation_checkpointing_kwargs out",
    )
    yield (
        args.torch_compile,
        "torch_compile is not supported: a compiled module shows no calls of its layers; leave it out",
    )
    yield args.use_liger_kernel, "use_liger_kernel replaces layers by fused ones that cannot be recorded; leave it out"
    yield (
        bool(args.deepspeed or args.fsdp or args.parallelism_config) or args.world_size > 1,
        "this trainer runs in one process: leave out deepspeed, fsdp, parallelism_config and a launcher of several "
        "processes (a Session shares a batch over the ranks of a process group)",
    )
