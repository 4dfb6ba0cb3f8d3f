"""The private Trainer: that its steps are the session's releases, and that the rest of a Trainer
works as ever.
"""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertForSequenceClassification,
    EarlyStoppingCallback,
    MixtralConfig,
    MixtralForCausalLM,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
)

from dpkfc.integrations._hf_checks import check_own_settings
from dpkfc.integrations.huggingface import per_example_cross_entropy
from dpkfc.privacy.ledger import verify
from dpkfc.session import Session
from tests.integrations.hf_cases import (
    TASKS,
    VOCABULARY,
    examples,
    model_of,
    pad,
    plan_of,
    trainer_of,
)
from tests.models import weights
from tests.recording import Heard


class Calls(TrainerCallback):
    """Counts the steps of the optimizer and the events, and raises at a step where asked to."""

    def __init__(self, raise_at=None):
        self.raise_at, self.steps, self.events = raise_at, 0, []

    def on_train_begin(self, args, state, control, optimizer=None, **_):
        optimizer.register_step_post_hook(lambda *_: setattr(self, "steps", self.steps + 1))

    def on_epoch_end(self, args, state, control, **_):
        self.events.append(("epoch", state.global_step))

    def on_step_end(self, args, state, control, **_):
        self.events.append(("step", state.global_step))
        if state.global_step == self.raise_at:
            raise ZeroDivisionError


class CutOff(TrainerCallback):
    """Ends the process, so to speak, behind the first checkpoint."""

    def on_save(self, args, state, control, **_):
        raise ZeroDivisionError


# -- the private path really runs ------------------------------------------------------------------


@pytest.mark.quick("token")
@pytest.mark.parametrize("task", TASKS)
def test_the_updates_are_the_releases_of_a_session(task, tmp_path):
    """In test mode noise and sampling repeat, so that trainer and session must make the same
    weights.
    """
    plan = plan_of(0.7, test_mode_seed=3, max_physical_batch_size=5)
    calls = Calls()
    mine, theirs = model_of(task), model_of(task)
    trainer_of(tmp_path, task, plan, mine, callbacks=[calls]).train()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.05)

    def losses(model, batch):
        labels = batch["labels"]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        if task == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
        rows = []
        for row, wanted in zip(logits, labels, strict=True):  # by hand, one example after the other
            wanted, row = (wanted[None], row[None]) if task == "sequence" else (wanted, row)
            rows.append(F.cross_entropy(row[wanted != -100], wanted[wanted != -100]))
        return torch.stack(rows)

    theirs.train()
    with Session(plan, theirs, optimizer, examples(task), collate_fn=pad) as session:
        for batch in session.batches():
            session.step(batch, losses)
    start = weights(model_of(task))
    assert (weights(theirs) - start).norm() > 0.01
    assert (weights(mine) - weights(theirs)).norm() < 1e-5 * (weights(theirs) - start).norm()
    assert calls.steps == 3
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 3


def test_nothing_but_a_release_can_step_the_optimizer(tmp_path):
    class Intruder(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
            model(**pad(examples("sequence", 4))).loss.backward()
            self.before = weights(model)
            optimizer.step()

    intruder = Intruder()
    trainer = trainer_of(tmp_path, callbacks=[intruder])
    with pytest.raises(RuntimeError, match="without a release of the session"):
        trainer.train()
    assert torch.equal(weights(trainer.model), intruder.before)
    assert all(p.grad is None for p in trainer.model.parameters())
    with pytest.raises(RuntimeError, match="without noise"):
        trainer.training_step(trainer.model, pad(examples("sequence", 4)))
    with pytest.raises(RuntimeError, match="budget of its own"):
        trainer.hyperparameter_search()


# -- the loss --------------------------------------------------------------------------------------


def test_positions_are_averaged_within_each_example():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 4, dtype=torch.float64), torch.randint(0, 4, (3, 5))
    labels[0, 2:], labels[2] = -100, -100
    losses = per_example_cross_entropy(logits, labels, label_smoothing=0.1)
    for i, count in enumerate((2, 5)):
        expected = F.cross_entropy(logits[i, :count], labels[i, :count], label_smoothing=0.1)
        torch.testing.assert_close(losses[i], expected)
    assert losses[2] == 0
    torch.testing.assert_close(per_example_cross_entropy(logits[:1], labels[:1], 0.1), losses[:1])


def test_a_model_with_another_loss_of_its_own_is_found_before_anything_is_spent(tmp_path):
    class Weighted(BertForSequenceClassification):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            outputs = super().forward(input_ids, attention_mask, labels=labels)
            outputs["loss"] = None if outputs["loss"] is None else 2 * outputs["loss"]
            return outputs

    model = Weighted(model_of("sequence").config)
    with pytest.raises(ValueError, match="Weighted computes another loss.*per_example_loss="):
        trainer_of(tmp_path, model=model).train()
    assert not (tmp_path / "ledger.jsonl").exists()

    def double_loss(model, inputs):
        return 2 * per_example_cross_entropy(model(**inputs).logits, inputs["labels"])

    assert trainer_of(tmp_path, model=model, per_example_loss=double_loss).train().global_step == 3


def test_a_balance_of_experts_is_refused_however_small_it_is(tmp_path):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    config = MixtralConfig(**sizes, **heads, num_hidden_layers=1, output_router_logits=True)
    with pytest.raises(ValueError, match="balances its experts.*output_router_logits=False"):
        trainer_of(tmp_path, "causal", model=MixtralForCausalLM(config)).train()
    assert not (tmp_path / "ledger.jsonl").exists()


def encoder_decoder():
    """A tiny T5, whose attention to a row without a mask is spread over the padding."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).double()


@pytest.mark.slow
def test_an_encoder_decoder_is_trained_on_labels_of_its_own_lengths(tmp_path):
    rows = [{**row, "labels": row["labels"][1:]} for row in examples("causal")]

    def pad_both(records):
        batch = pad([{k: r[k] for k in ("input_ids", "attention_mask")} for r in records])
        labels = [torch.tensor(r["labels"]) for r in records]
        return {**batch, "labels": pad_sequence(labels, True, padding_value=-100)}

    plan = plan_of(1e-9, steps=1, test_mode_seed=3)
    data = Dataset.from_list(rows)
    model, other = encoder_decoder(), encoder_decoder()
    settings = {"train_dataset": data, "eval_dataset": None, "data_collator": pad_both}
    trainer = trainer_of(tmp_path, model=model, plan=plan, learning_rate=1.0, **settings)
    trainer.train()
    assert trainer.session.gradients.startswith("whole micro-batches")
    total = 0
    for i in plan.draw(0, plan.sampling_stream()):
        loss = other(**pad_both([rows[i]])).loss
        row = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*other.parameters()])])
        total = total + row * (1 / row.norm()).clamp(max=1)
    moved = weights(encoder_decoder()) - weights(model)
    assert torch.allclose(moved, total / plan.expected_batch_size, atol=1e-8)
    unmasked = {**settings, "data_collator": lambda r: {**pad_both(r), "attention_mask": None}}
    with pytest.raises(ValueError, match="an example padded to the length of a longer one"):
        trainer_of(tmp_path / "2", model=other, plan=plan, **unmasked).train()


def masking(rows):
    """Draws the labelled positions anew at every call, as the collators for masked language models
    do.
    """
    batch = pad(rows)
    masked = torch.bernoulli(torch.full(batch["input_ids"].shape, 0.3)) > 0
    return {
        **batch,
        "labels": torch.where(masked & (batch["attention_mask"] > 0), batch["input_ids"], -100),
    }


def test_settings_that_another_trainer_would_read_are_named(tmp_path, caplog):
    args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, predict_with_generate=True)
    with pytest.raises(ValueError, match="sets predict_with_generate, which PrivateTrainer would"):
        check_own_settings(args)

    @dataclass
    class OwnArguments(TrainingArguments):
        packing: bool = False
        place: str = "here"

    check_own_settings(OwnArguments(str(tmp_path), use_cpu=True))
    assert not caplog.text
    check_own_settings(OwnArguments(str(tmp_path), use_cpu=True, packing=True))
    assert "OwnArguments adds to TrainingArguments: packing;" in caplog.text


def test_a_collator_that_mixes_at_random_is_refused(tmp_path):
    def mixup(rows):
        batch = masking(rows)
        return {**batch, "input_ids": batch["input_ids"][torch.randperm(len(rows))]}

    with pytest.raises(ValueError, match="collate_fn mixes the rows of a batch"):
        trainer_of(tmp_path, "masked", data_collator=mixup).train()


# -- what else a Trainer does ----------------------------------------------------------------------


def accuracy(predicted):
    return {"accuracy": float((np.argmax(predicted.predictions, 1) == predicted.label_ids).mean())}


def test_logs_hold_epsilon_and_nothing_private(tmp_path):
    calls = Calls()
    trainer = trainer_of(
        tmp_path,
        callbacks=[calls],
        compute_metrics=accuracy,
        eval_strategy="epoch",
        learning_rate=0.08,
        lr_scheduler_type="linear",
    )
    result = trainer.train()
    logged = [row for row in trainer.state.log_history if "epsilon" in row]
    assert [row["releases"] for row in logged] == [1, 2, 3]
    assert [row["epsilon"] for row in logged] == pytest.approx(
        [trainer.plan.epsilon(k) for k in (1, 2, 3)]
    )
    assert [row["learning_rate"] for row in logged] == pytest.approx([0.08 * 2 / 3, 0.08 / 3, 0.0])
    shown = {name for row in trainer.state.log_history for name in row}
    assert shown >= {"eval_accuracy", "eval_loss"}
    assert not shown & {"loss", "grad_norm", "train_loss"}
    assert result.training_loss != result.training_loss
    assert result.metrics["epsilon"] == trainer.plan.epsilon()
    assert calls.events == [("step", 1), ("step", 2), ("step", 3), ("epoch", 3)]
    summary = json.loads((tmp_path / "privacy.json").read_text())
    assert summary["spent"] == {"epsilon": trainer.plan.epsilon(), "delta": 1e-3}
    assert summary["ledger"]["releases"] == 3
    assert summary["not_private"] == [
        "eval_*, in logs and trainer_state.json: of eval_dataset, which the plan does not cover"
    ]


def test_the_private_loss_is_logged_only_when_asked_for(tmp_path):
    trainer = trainer_of(tmp_path, log_private_loss=True)
    trainer.train()
    rows = [row["loss (NOT private)"] for row in trainer.state.log_history if "epsilon" in row]
    assert len(rows) == 3
    assert all(0.5 < x < 2 for x in rows)
    assert "NOT private" in json.loads((tmp_path / "privacy.json").read_text())["not_private"][0]


@pytest.mark.quick("False")
@pytest.mark.parametrize("preconditioned", [False, True])
def test_a_run_that_is_cut_off_goes_on(preconditioned, tmp_path):
    from dpkfc.curvature.kfac import KFAC
    from dpkfc.curvature.token_noise import TokenNoise

    kfac = (
        KFAC(sides="both", probe=TokenNoise(VOCABULARY, 6, pad_id=0), probe_size=8, every=2)
        if preconditioned
        else None
    )
    plan = plan_of(0.5, test_mode_seed=1, steps=5, preconditioner=kfac)
    how = {
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "cosine",
        "optim": "adamw_torch",
    }
    how |= {"learning_rate": 0.01}
    whole = trainer_of(tmp_path / "whole", plan=plan, **how)
    whole.train()
    folder = tmp_path / "cut"
    with pytest.raises(ZeroDivisionError):
        trainer_of(folder, plan=plan, callbacks=[Calls(raise_at=3)], **how).train()
    assert len(verify(folder / "ledger.jsonl").releases) == 3
    other = trainer_of(folder, plan=plan_of(0.5, test_mode_seed=1, steps=6), **how)
    with pytest.raises(ValueError, match="other settings: choose another output_dir, or give its"):
        other.train()
    assert other.session is None
    with pytest.raises(ValueError, match="holds 3 releases of an earlier run"):
        trainer_of(folder, plan=plan, **how).train()
    later = trainer_of(folder, plan=plan, **how)
    assert later.train(resume_from_checkpoint=True).global_step == 5
    # release 3 stays charged, so two are left after the checkpoint
    assert len(verify(folder / "ledger.jsonl").releases) == 5
    assert later.lr_scheduler.last_epoch == 5
    clean = tmp_path / "clean"
    with pytest.raises(ZeroDivisionError):
        trainer_of(clean, plan=plan, callbacks=[CutOff()], **how).train()
    assert len(verify(clean / "ledger.jsonl").releases) == 2
    rest = trainer_of(clean, plan=plan, **how)
    rest.train(resume_from_checkpoint=str(clean / "checkpoint-2"))
    torch.testing.assert_close(weights(rest.model), weights(whole.model), rtol=1e-6, atol=1e-8)


def test_the_best_model_is_loaded_and_early_stopping_leaves_whole_batches(tmp_path):
    trainer = trainer_of(
        tmp_path,
        plan=plan_of(3.0, steps=8),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(1)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        learning_rate=1e-6,
    )
    result = trainer.train()
    assert result.global_step == 2
    # Releases may have decided the end, so the rest of the plan is charged.
    assert result.metrics["epsilon"] == pytest.approx(trainer.plan.epsilon(8))
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 8
    assert trainer.evaluate()["eval_accuracy"] == trainer.state.best_metric


def test_adapters_train_and_the_rest_stays(tmp_path):
    peft = pytest.importorskip("peft")
    base = model_of("causal", 0.1)
    before = weights(model_of("causal"))
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    )
    start = weights(model)
    trainer = trainer_of(tmp_path, "causal", model=model)
    trainer.train()
    trainer.save_model()
    frozen = torch.cat(
        [p.detach().double().flatten() for n, p in model.named_parameters() if "lora" not in n]
    )
    assert torch.equal(frozen, before)
    assert not torch.equal(weights(model), start)
    again = peft.PeftModel.from_pretrained(model_of("causal"), tmp_path)
    assert torch.equal(weights(again), weights(model))


def test_unused_columns_are_removed(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{**row, "text": "x", "idx": i} for i, row in enumerate(examples("sequence"))]
    trainer = trainer_of(tmp_path, train_dataset=datasets.Dataset.from_list(rows))
    assert trainer.train().global_step == 3


def test_bfloat16_is_autocast_and_nothing_of_the_model_is_replaced(tmp_path):
    dtypes = Heard()

    def losses(model, inputs):
        logits = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits
        dtypes.append((model.training, logits.dtype))
        return per_example_cross_entropy(logits, inputs["labels"])

    trainer = trainer_of(
        tmp_path, per_example_loss=losses, bf16=True, eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    assert (True, torch.bfloat16) in dtypes
    assert "forward" not in vars(trainer.model)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
