"""Tiny transformers models with random weights, data that a model can learn, and a plan; nothing is
downloaded.
"""

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)

from dpkfc.config import PrivacyConfig
from dpkfc.integrations.huggingface import PrivateTrainer

N, B, VOCABULARY = 48, 16, 30
TASKS = ("sequence", "token", "causal", "masked")


def model_of(task, dropout=0.0):
    torch.manual_seed(0)
    if task == "causal":
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=16,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return GPT2LMHeadModel(config)
    classes = {
        "sequence": BertForSequenceClassification,
        "token": BertForTokenClassification,
        "masked": BertForMaskedLM,
    }
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return classes[task](config)


def examples(task, n=N, seed=0):
    """Sequences of different lengths; the class of one is its first token modulo 3."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        ids = rng.integers(3, VOCABULARY, rng.integers(3, 9)).tolist()
        row = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if task == "sequence":
            row["labels"] = ids[0] % 3
        elif task == "token":
            row["labels"] = [-100 if i % 3 == 2 else x % 3 for i, x in enumerate(ids)]
        elif task == "causal":
            row["labels"] = list(ids)
        else:
            row["labels"] = [x if i % 2 else -100 for i, x in enumerate(ids)]
        rows.append(row)
    return rows


def pad(rows):
    """To the longest of these rows, as the collators of transformers do."""
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], list):
            values = [x + [fill[name]] * (width - len(x)) for x in values]
        batch[name] = torch.tensor(values)
    return batch


def plan_of(noise=1.0, n=N, **settings):
    chosen = {
        "expected_batch_size": B,
        "steps": 3,
        "max_grad_norm": 1.0,
        "accountant": "rdp",
        **settings,
    }
    return PrivacyConfig(**chosen).with_noise(noise, 1e-3, n)


def arguments(folder, **settings):
    chosen = {
        "learning_rate": 0.05,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_steps": 1,
    }
    chosen |= {"save_strategy": "no", "lr_scheduler_type": "constant", "optim": "sgd"}
    return TrainingArguments(output_dir=str(folder), **{**chosen, **settings})


OF_TRAINER = {
    "per_example_loss",
    "log_private_loss",
    "callbacks",
    "compute_loss_func",
    "compute_metrics",
    "data_collator",
    "eval_dataset",
    "model_init",
    "optimizers",
    "train_dataset",
    "units",
}


def trainer_of(
    folder,
    task="sequence",
    plan=None,
    model=None,
    kind=PrivateTrainer,
    dropout=0.0,
    **settings,
):
    """A trainer of a task; settings are its own keywords, or training arguments."""
    own = {name: settings.pop(name) for name in OF_TRAINER & set(settings)}
    chosen = {
        "train_dataset": examples(task),
        "eval_dataset": examples(task, 12, seed=1),
        "data_collator": pad,
        **own,
    }
    if model is None:
        model = model_of(task, dropout)
    return kind(model, arguments(folder, **settings), plan=plan or plan_of(), **chosen)
