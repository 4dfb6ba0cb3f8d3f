"""TRL's trainers under a plan: their examples, the gradients of these, and what is refused."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("trl")
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, SFTConfig

from dpkfc.config import PrivacyConfig
from dpkfc.integrations.huggingface import open_session
from dpkfc.integrations.trl import PrivateDPOTrainer, PrivateSFTTrainer
from dpkfc.privacy.ledger import verify
from dpkfc.step_record import Batch

N, CLIP, LONGEST = 12, 0.09, 10
WORDS = ["<pad>", "<s>", "</s>", *"abcdefghijklm"]


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    disable_progress_bars()


def tokenizer():
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "a"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def model_of(dtype=torch.float64):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)


def adapter():
    """Not the identity at the start, so that both of its matrices have gradients."""
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def texts(rng, most):
    return " ".join(rng.choice(WORDS[3:], rng.integers(1, most)))


def prompts():
    """Prompts and completions of several lengths; the last prompt alone fills `LONGEST`."""
    rng = np.random.default_rng(0)
    rows = [{"prompt": texts(rng, 4), "completion": " " + texts(rng, 6)} for _ in range(N - 1)]
    return Dataset.from_list([*rows, {"prompt": "a " * LONGEST + "b", "completion": " c d"}])


def pairs():
    rng = np.random.default_rng(1)
    rows = [
        {"prompt": texts(rng, 4), "chosen": " " + texts(rng, 6), "rejected": " " + texts(rng, 6)}
        for _ in range(N - 1)
    ]
    long = {"prompt": "a " * LONGEST + "b", "chosen": " c d", "rejected": " e"}
    return Dataset.from_list([*rows, long])


def plan_of(n=N, **settings):
    chosen = {"expected_batch_size": 4, "steps": 2, "max_grad_norm": CLIP, "accountant": "rdp"}
    chosen |= {"max_physical_batch_size": 5}
    return PrivacyConfig(**{**chosen, **settings}).with_noise(1.0, 1e-3, n)


QUIET = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
QUIET |= {"save_strategy": "no"}
KEYWORDS = {"plan", "train_dataset", "eval_dataset", "units", "peft_config", "per_example_loss"}


def trainer_of(kind, config, rows, folder, model=None, **settings):
    own = {name: settings.pop(name) for name in KEYWORDS & set(settings)}
    chosen = {"plan": plan_of(), "train_dataset": rows(), "peft_config": adapter(), **own}
    args = config(str(folder), **{"max_length": LONGEST, **QUIET, **settings})
    model = model_of() if model is None else model
    return kind(model, args, processing_class=tokenizer(), **chosen)


sft = partial(trainer_of, PrivateSFTTrainer, SFTConfig, prompts)
dpo = partial(trainer_of, PrivateDPOTrainer, DPOConfig, pairs)


# -- gradients, against a loop over single examples ------------------------------------------------


def log_probabilities(model, ids):
    """Of each token after the first, from a text alone and without padding."""
    row = torch.tensor([ids])
    logits = model(input_ids=row).logits[0, :-1]
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), row[0, 1:]]


def completion_loss(model, row):
    prompt, own = (tokenizer()(row[name])["input_ids"] for name in ("prompt", "completion"))
    labels = len([*own, 2][: max(0, LONGEST - len(prompt))])
    logps = log_probabilities(model, [*prompt, *own, 2][:LONGEST])
    return -logps[logps.numel() - labels :].mean() if labels else 0 * logps.sum()


def preference_loss(model, row, beta=0.1):
    prompt = tokenizer()(row["prompt"])["input_ids"]
    ratios = []
    for name in ("chosen", "rejected"):
        own = [*tokenizer()(row[name])["input_ids"], 2]
        labels = len(own[: max(0, LONGEST - len(prompt))])
        ids = [*prompt, *own][:LONGEST]
        with torch.no_grad(), model.disable_adapter():
            before = log_probabilities(model, ids)
        ratio = log_probabilities(model, ids) - before
        ratios.append(ratio[ratio.numel() - labels :].sum())
    return -F.logsigmoid(beta * (ratios[0] - ratios[1]))


def loop_over(model, rows, loss):
    """The clipped sum and the norms, one example after the other."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total, norms = 0, []
    for row in rows:
        gradients = torch.autograd.grad(loss(model, row), parameters, allow_unused=True)
        flat = torch.cat([g.flatten() for g in gradients])
        norms.append(flat.norm())
        total = total + flat * (CLIP / flat.norm().clamp(min=CLIP))
    return total, torch.stack(norms)


def sft_of_experts(folder):
    """With an adapter of rank 4 and one of rank 2 for each expert."""
    torch.manual_seed(0)
    sparse = MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    model = MixtralForCausalLM(sparse).double()
    model.set_experts_implementation("eager")  # the other takes no float64
    names = ["q_proj", "w1", "w2", "w3"]
    return sft(
        folder,
        model,
        router_aux_loss_coef=0.0,
        peft_config=LoraConfig(r=2, target_modules=names, init_lora_weights=False),
    )


@pytest.mark.parametrize(
    "make, rows, loss",
    [
        (sft, prompts, completion_loss),
        (dpo, pairs, preference_loss),
        (sft_of_experts, prompts, completion_loss),
    ],
    ids=["sft", "dpo", "experts"],
)
def test_the_clipped_sum_is_a_loop_over_single_examples(make, rows, loss, tmp_path):
    trainer = make(tmp_path)
    with open_session(trainer, None) as session:
        found, norms = session._clipped_sum(Batch(0, np.arange(N)), trainer.per_example_loss)
        # Whole micro-batches were differentiated at once, but where tokens are sorted by experts.
        is_proved = session._gradient_mode.unproved_operation is None
        assert is_proved == (make is not sft_of_experts)
        assert session._gradient_mode.unproved_on_private_rows is None
    expected, expected_norms = loop_over(trainer.model, rows(), loss)
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    flat = torch.cat([found[name].double().flatten() for name in names])
    # Log-probabilities of the reference are stored in float32.
    torch.testing.assert_close(flat, expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(norms.double(), expected_norms, rtol=1e-5, atol=1e-9)
    assert norms[-1] == 0  # nothing is left of the last completion
    assert float(expected_norms.max()) > CLIP
    assert make is sft_of_experts or CLIP > float(expected_norms[:-1].min())


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "apo_zero", "apo_down", "sft"])
def test_the_loss_of_a_pair_is_that_of_trl_for_the_pair_alone(kind, tmp_path):
    weights = [0.7, 0.3] if kind == "sft" else None
    kinds = ["sigmoid", "sft"] if weights else [kind]
    trainer = dpo(tmp_path, loss_type=kinds, loss_weights=weights, beta=0.4)
    trainer.model.eval()
    rows = trainer.train_dataset.select(range(N - 1))
    collate = trainer.make_collate(trainer.data_collator)
    check_alone(trainer, trainer.per_example_loss(trainer.model, collate(list(rows))), rows)


def check_alone(trainer, found, rows):
    """Check that losses are TRL's own of each row alone."""
    alone = [trainer.compute_loss(trainer.model, trainer.data_collator([row])) for row in rows]
    torch.testing.assert_close(found, torch.stack(alone).double(), rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_text_is_that_of_trl_for_the_text_alone(tmp_path):
    trainer = sft(tmp_path, truncation_mode="keep_end")
    trainer.model.eval()
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in trainer.train_dataset]
    with open_session(trainer, None):
        found = trainer.per_example_loss(trainer.model, trainer.data_collator(rows))
    check_alone(trainer, found, rows)
    assert max(len(row["input_ids"]) for row in rows) == LONGEST


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sft, dpo], ids=["sft", "dpo"])
def test_a_run_logs_no_private_number(make, tmp_path):
    rows = (prompts if make is sft else pairs)()
    held_out = rows.select([0, 1]).map(lambda row: {"prompt": "m " + row["prompt"]})
    settings = {"train_dataset": rows, "eval_dataset": held_out, "eval_strategy": "epoch"}
    trainer = make(tmp_path, model_of(torch.float32), **settings)
    trainer.train()
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 2
    shown = {name for row in trainer.state.log_history for name in row}
    assert shown >= {"epsilon", "eval_loss", "eval_mean_token_accuracy"}
    assert ("eval_rewards/margins" in shown) == (make is dpo)
    kept = {"epsilon", "releases", "learning_rate", "epoch", "step"}
    assert {name for name in shown if not name.startswith("eval_")} == kept
    for trained_on in (rows, trainer.train_dataset):
        with pytest.raises(ValueError, match="eval_dataset holds records of the train_dataset"):
            trainer.evaluate(trained_on)
    with pytest.raises(ValueError, match="eval_dataset holds records of the train_dataset"):
        make(tmp_path, train_dataset=rows, eval_dataset=rows, units=list(range(N)))


def test_an_adapter_that_goes_on_keeps_its_reference(tmp_path):
    model = get_peft_model(model_of(torch.float32), adapter())
    trainer = dpo(tmp_path, model, peft_config=None)
    trainable = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trainable
    assert all(".default." in name for name in trainable)


def test_packing_joins_the_rows_of_one_unit(tmp_path):
    units = [i % 3 for i in range(N)]
    plan = plan_of(3, unit="person", max_records_per_unit=2, expected_batch_size=1)
    rows = Dataset.from_list(
        [{"text": f"{WORDS[3 + unit]} {WORDS[3 + unit]}"} for unit in units]
    ).shuffle(0)
    by_word = [WORDS.index(row["text"][0]) - 3 for row in rows]
    settings = {"packing_strategy": "wrapped", "shuffle_dataset": True, "units": by_word}
    trainer = sft(tmp_path, plan=plan, train_dataset=rows, packing=True, **settings)
    packed = trainer.train_dataset
    assert len(packed) < N
    for row in packed:
        assert set(row["input_ids"]) <= {3 + row["unit"], 2}
    assert trainer.train().global_step == 2


# -- what is refused -------------------------------------------------------------------------------


def refusals():
    yield sft, {"packing": True}, "packing puts several people into one row"
    yield sft, {"packing": True, "units": "prompt"}, "packing_strategy='wrapped'"
    yield sft, {"padding_free": True}, "joins a batch into one row"
    yield sft, {"loss_type": "dft"}, "loss_type='dft' is not supported"
    yield sft, {"activation_offloading": True}, "never called"
    yield sft, {"train_dataset": [{"text": "a"}]}, r"Dataset.from_list\(rows\)"
    yield sft, {"units": [0, 1]}, "units has 2 ids for the 12 rows"
    yield sft, {"gradient_accumulation_steps": 2}, "drawn and clipped as one"
    yield dpo, {"loss_type": ["sigmoid", "aot"]}, "loss_type 'aot' is unknown; choose sigmoid"
    yield dpo, {"ld_alpha": 0.5}, "ld_alpha=0.5 is not supported"
    yield dpo, {"use_weighting": True}, "use_weighting=True is not supported"
    yield dpo, {"f_divergence_type": "js_divergence"}, "not supported"
    yield dpo, {"sync_ref_model": True}, "moves the reference"


@pytest.mark.parametrize("make, settings, match", list(refusals()))
def test_settings_that_join_people_or_would_be_ignored(make, settings, match, tmp_path):
    with pytest.raises(ValueError, match=match) as refusal:
        make(tmp_path, **settings)
    assert len(str(refusal.value)) <= 160


def test_rows_that_were_packed_before_need_units(tmp_path):
    rows = Dataset.from_list([{"input_ids": [3, 2, 4, 2], "seq_lengths": [2, 2]}] * N)
    with pytest.raises(ValueError, match="pass units="):
        sft(tmp_path, train_dataset=rows)


def test_experts_that_are_balanced_over_a_batch_are_refused(tmp_path):
    sparse = MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ValueError, match="router_aux_loss_coef=0.0"):
        sft(tmp_path, MixtralForCausalLM(sparse))
    trainer = sft(tmp_path, MixtralForCausalLM(sparse), router_aux_loss_coef=0.0)
    assert trainer.train().global_step == 2


def test_rounding_in_bfloat16_is_not_taken_for_a_layer_that_changes(tmp_path, caplog):
    """TRL computes in bfloat16 by default, while the weights of norms are in float32."""
    dpo(tmp_path, model_of(torch.float32), peft_config=None, bf16=True).train()
    assert "one example at a time" not in caplog.text
