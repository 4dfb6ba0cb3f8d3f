"""What the private Trainer refuses, each before a release and with its fix."""

from dataclasses import fields

import pytest
import torch

pytest.importorskip("transformers")
from transformers import (
    BertForMultipleChoice,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    TrainingArguments,
)

from dpkfc.integrations.huggingface import PrivateTrainer
from dpkfc.privacy.ledger import verify
from dpkfc.session import Session
from tests.integrations.hf_cases import (
    VOCABULARY,
    B,
    N,
    arguments,
    examples,
    model_of,
    plan_of,
    trainer_of,
)

# Releases of transformers differ in this name.
CHECKPOINTING = [
    field.name for field in fields(TrainingArguments) if field.name.endswith("checkpointing_kwargs")
]


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"per_device_train_batch_size": 4}, "expected_batch_size"),
        ({"gradient_accumulation_steps": 2}, "drawn and clipped as one"),
        ({"max_steps": 7}, "PrivacyConfig.steps"),
        ({"num_train_epochs": 2}, "PrivacyConfig.epochs"),
        ({"max_grad_norm": 0.5}, "bounds no example"),
        ({"train_sampling_strategy": "group_by_length"}, "draws them at random"),
        ({"include_num_input_tokens_seen": "all"}, "size of private batches"),
        ({"auto_find_batch_size": True}, "max_physical_batch_size"),
        ({"neftune_noise_alpha": 5.0}, "neftune"),
        *(({name: {"use_reentrant": True}}, "use_reentrant=False") for name in CHECKPOINTING),
        ({"torch_compile": True}, "compiled"),
        ({"use_liger_kernel": True}, "fused"),
    ],
)
def test_arguments_that_contradict_the_plan(settings, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        trainer_of(tmp_path, **settings)


@pytest.mark.parametrize("wrong", [plan_of().config, "plan"])
def test_a_plan_is_what_a_configuration_was_calibrated_to(wrong, tmp_path):
    makers = [
        lambda: trainer_of(tmp_path, plan=wrong),
        lambda: Session(wrong, torch.nn.Linear(2, 2), None, []),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=r"plan is a .* what PrivacyConfig.*calibrate"):
            make()


def test_loss_scaling_is_refused(tmp_path):
    args = arguments(tmp_path)
    args.fp16 = True  # the constructor of TrainingArguments wants a device for it
    with pytest.raises(ValueError, match="bf16=True, which needs no scaling"):
        PrivateTrainer(
            model_of("sequence"), args, plan=plan_of(), train_dataset=examples("sequence")
        )


def test_a_trainer_without_arguments_is_refused():
    with pytest.raises(ValueError, match=r"args is a NoneType; pass TrainingArguments\(output_dir"):
        PrivateTrainer(model_of("sequence"), None, plan=plan_of())


def test_arguments_that_say_the_same_as_the_plan_are_taken(tmp_path, caplog):
    settings = {
        "per_device_train_batch_size": B,
        "num_train_epochs": 1,
        "max_grad_norm": 0.0,
    }
    assert trainer_of(tmp_path, **settings).train().global_step == 3
    assert "no effect" not in caplog.text


def test_arguments_of_the_loop_that_is_not_used_are_named(tmp_path, caplog):
    settings = {
        "average_tokens_across_devices": False,
        "data_seed": 3,
        "dataloader_drop_last": True,
        "dataloader_pin_memory": False,
        "length_column_name": "size",
        "accelerator_config": {"split_batches": True},
    }
    trainer_of(tmp_path, use_cpu=False, **settings)
    assert f"have no effect: {', '.join(settings)}" in caplog.text


def test_keywords_and_subclasses_for_a_batch_loss_are_refused(tmp_path):
    with pytest.raises(ValueError, match="pass per_example_loss="):
        trainer_of(tmp_path, compute_loss_func=len)
    with pytest.raises(ValueError, match="pass model="):
        trainer_of(tmp_path, model_init=model_of)

    class Own(PrivateTrainer):
        def compute_loss(self, model, inputs, **_):
            return model(**inputs).loss

    with pytest.raises(ValueError, match=r"compute_loss\(\) gives one loss for a batch"):
        trainer_of(tmp_path, kind=Own)
    for name in (
        "training_step",
        "get_train_dataloader",
        "_get_train_sampler",
        "get_batch_samples",
    ):
        kind = type("Other", (PrivateTrainer,), {name: lambda self, *_: None})
        with pytest.raises(ValueError, match=rf"Other.{name}\(\) would never be called"):
            trainer_of(tmp_path, kind=kind)


class Tokenizer(list):
    """Has ids from 0 to its length, as the classes of transformers."""

    def __call__(self, *_): ...


def test_a_tokenizer_larger_than_the_embedding_is_named(tmp_path):
    """It is public; a private record with such an id adds nothing, and no message says so."""
    collator = DataCollatorWithPadding(Tokenizer(range(VOCABULARY + 1)))
    model = model_of("sequence")
    with pytest.raises(ValueError, match=r"31 ids and the embedding 30 rows.*resize"):
        trainer_of(tmp_path, model=model, data_collator=collator)
    model.resize_token_embeddings(VOCABULARY + 1)
    trainer_of(tmp_path, model=model, data_collator=collator)


def test_label_smoothing_that_a_loss_of_your_own_never_sees_is_refused(tmp_path):
    with pytest.raises(ValueError, match="per_example_loss= never sees"):
        trainer_of(
            tmp_path, per_example_loss=lambda model, inputs: None, label_smoothing_factor=0.1
        )


def test_training_data_is_not_evaluated_on(tmp_path):
    rows = examples("sequence")
    other = examples("sequence", 4, seed=1)
    for held_out in (rows, rows[3:5], {"a": other, "b": rows[-1:]}):
        with pytest.raises(ValueError, match="holds records of the train_dataset"):
            trainer_of(tmp_path, train_dataset=rows, eval_dataset=held_out)
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match="holds records of the train_dataset"):
        trainer.evaluate(trainer.train_dataset)
    assert trainer.evaluate()["eval_loss"] > 0


def test_models_and_datasets_that_no_session_can_take(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from examples("sequence")

    with pytest.raises(ValueError, match="Stream, which cannot be sampled"):
        trainer_of(tmp_path, train_dataset=Stream())
    with pytest.raises(ValueError, match="the model is compiled"):
        trainer_of(tmp_path, model=torch.compile(model_of("sequence")))
    choices = [{"input_ids": [[3, 4, 5]] * 3, "labels": i % 3} for i in range(N)]
    model = BertForMultipleChoice(model_of("sequence").config)
    trainer = trainer_of(tmp_path, model=model, train_dataset=choices, data_collator=None)
    with pytest.raises(ValueError, match="BertForMultipleChoice holds several sequences"):
        trainer.train()
    scores = [{"input_ids": [3, 4, 5], "labels": float(i % 3)} for i in range(N)]
    config = model_of("sequence").config
    config.num_labels = 1
    trainer = trainer_of(
        tmp_path,
        model=BertForSequenceClassification(config),
        train_dataset=scores,
        data_collator=None,
        label_smoothing_factor=0.1,
    )
    with pytest.raises(ValueError, match="labels that are classes"):
        trainer.train()
    assert (
        not (tmp_path / "ledger.jsonl").exists() or not verify(tmp_path / "ledger.jsonl").releases
    )


def test_schedules_and_datasets_that_do_not_fit(tmp_path):
    with pytest.raises(
        ValueError, match="stepped? .*releases|steps its learning rate schedule on releases"
    ):
        trainer_of(
            tmp_path,
            lr_scheduler_type="reduce_lr_on_plateau",
            eval_strategy="steps",
            metric_for_best_model="loss",
        ).train()

    class Modes(torch.optim.SGD):
        def train(self):
            """Told before every step, as the optimizers without a schedule are."""

    model = model_of("sequence")
    with pytest.raises(ValueError, match="Modes exchanges the weights"):
        trainer_of(tmp_path, model=model, optimizers=(Modes(model.parameters(), 0.1), None)).train()
    with pytest.raises(ValueError, match=f"dataset has {N}"):
        trainer_of(tmp_path, plan=plan_of(n=N + 1)).train()
    with pytest.raises(ValueError, match="no checkpoint in"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)
