"""Token probes through the whole loop: BERT and GPT-2 as they are, with adapters, against loops;
and bad probes by name.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from dpkfc.curvature import FeatureNoise, PinkNoise, Probe, PublicData, TokenNoise
from dpkfc.curvature.probe_pass import public_generator
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.linalg.metric import Kronecker
from dpkfc.linalg.sides import Diagonal
from tests.curvature.toys import make_kfac
from tests.models import VOCABULARY, add_lora, bert, gpt2
from tests.sessions import open_session

N, V, T = 20, VOCABULARY, 7
ENDS = {"cls_id": 1, "sep_id": 2, "pad_id": 0}
UNIFORM = TokenNoise(V, T, **ENDS)
PROBES = {
    "uniform": UNIFORM,
    "zipf": TokenNoise(V, T, **ENDS, zipf_exponent=1.0, first_id=3),
    "table": TokenNoise(
        V,
        T,
        **ENDS,
        frequencies=[k % 5 for k in range(V)],
        provenance="a public word list",
        min_length=4,
    ),
}


LENGTH = {"max_position_embeddings": T + 1}
MODELS = {
    "bert": lambda: bert(**LENGTH),
    "bert-one-type": lambda: bert(type_vocab_size=1, **LENGTH),
    "gpt2": lambda: gpt2(n_positions=T + 1),
    "bert-lora": lambda: add_lora(
        bert(**LENGTH), ["query", "value"], modules_to_save=["classifier"]
    ),
    "linear": lambda: nn.Sequential(nn.Linear(6, 3)),
}


class Texts(torch.utils.data.Dataset):
    """Padded texts as dictionaries."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["labels"])

    def __getitem__(self, index):
        return {name: x[index] for name, x in self.batch.items()}


def _texts(n=N):
    inputs, _ = UNIFORM.sample(n, torch.Generator().manual_seed(5))
    return {**inputs, "labels": torch.arange(n) % 3}


def _losses(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    if logits.dim() == 2:
        return F.cross_entropy(logits, batch["labels"], reduction="none")
    targets = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    return losses.sum(1) / (targets != -100).sum(1)


_kfac = partial(make_kfac, probe=UNIFORM, probe_size=24, every=2)


@pytest.mark.quick("table")
@pytest.mark.parametrize("law", PROBES)
def test_the_table_of_a_model_is_scaled_by_how_often_the_probe_reads_its_rows(law):
    """Rows of padding count nothing, and a row that is read more often is scaled less."""
    model, kfac = bert(**LENGTH), _kfac(probe=PROBES[law], probe_size=200)
    layers = find_layers(model)

    def build(f):
        rules = {x.name: x.rule for x in layers}
        return f(model, lambda m, loss: capture(m, layers, loss), 0, rules)

    name = "bert.embeddings.word_embeddings"
    inputs, _ = PROBES[law].sample(200, public_generator(0, 0))
    reads = torch.bincount(inputs["input_ids"][inputs["attention_mask"] == 1], minlength=V).double()
    found = build(kfac.factors)[name].sides["input"].values
    smoothed = (reads + 1) * reads.sum() / (reads.sum() + V) / 200
    assert_close(found, smoothed, rtol=1e-10, atol=0.0)
    entry = build(kfac.build).metric[name]
    assert isinstance(entry, Kronecker) and isinstance(entry.input, Diagonal)
    exact = (smoothed / smoothed.mean() + 0.1).pow(-0.5)
    assert_close(entry.input.scale / entry.input.scale[0], exact / exact[0], rtol=1e-9, atol=0.0)
    assert int(reads[0]) == 0 and float(entry.input.scale.max()) == float(entry.input.scale[0])


# -- bad probes: one error that names the fault, and nothing is released


class Odd(Probe):
    """A probe that returns what it is given."""

    def __init__(self, returned):
        self.returned = returned

    def sample(self, n, generator):
        return self.returned(n) if callable(self.returned) else self.returned

    def describe(self):
        return {"source": "synthetic"}


PAIR = TokenNoise(V, T, **ENDS, segments=2)
BAD = {
    "vocabulary": (
        "bert",
        TokenNoise(V + 400, T, **ENDS),
        r"row \d+ of the embedding .bert.embeddings.word_emb.* 23 rows",
    ),
    "tied vocabulary": (
        "gpt2",
        TokenNoise(V + 400, T, **ENDS),
        "row .* of the embedding 'transformer.wte'",
    ),
    "adapter": ("bert-lora", TokenNoise(V + 400, T, **ENDS), "the probe TokenNoise reads row"),
    "length": (
        "gpt2",
        TokenNoise(V, 3 * T, **ENDS),
        "row 20 of the embedding 'transformer.wpe', of 8 rows",
    ),
    "length of BERT": ("bert", TokenNoise(V, 3 * T, **ENDS), r"input_ids \(3, 21\) torch.int64"),
    "segments": (
        "bert-one-type",
        PAIR,
        "row 1 of the embedding 'bert.embeddings.token_type_embeddings', of 1 rows",
    ),
    "negative": (
        "bert",
        PublicData(-torch.ones(4, T).long(), provenance="x"),
        "row -1 of the embedding",
    ),
    "names": (
        "bert",
        PublicData({"tokens": torch.ones(4, T).long()}, provenance="x"),
        "dtype and names of private examples",
    ),
    "dtype": (
        "bert",
        PublicData(torch.ones(4, T), provenance="x"),
        r"PublicData gives it \(\(3, 7\) torch.float64\)",
    ),
    "shape": (
        "linear",
        FeatureNoise(5),
        r"FeatureNoise gives it \(\(3, 5\) torch.float32\): .*6.*; match shape",
    ),
    "image": ("linear", PinkNoise((1, 4, 4)), "PinkNoise gives it"),
    "integers": ("linear", PublicData(torch.ones(4, 6).long(), provenance="x"), "torch.int64"),
    "no pair": (
        "linear",
        Odd(lambda n: torch.zeros(n, 6)),
        r"Odd.sample\(\) must return inputs and labels",
    ),
    "a list": (
        "linear",
        Odd(lambda n: ([0.0] * n, None)),
        r"Odd.sample\(\) must return a tensor or a mapping of tensors",
    ),
    "too few": (
        "linear",
        Odd(lambda n: (torch.zeros(n - 1, 6), None)),
        "Odd returned 23 examples, not 24",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_probe_that_does_not_fit_the_model_is_named_before_any_release(fault):
    kind, probe, message = BAD[fault]
    model = MODELS[kind]()
    settings = {"expected_batch_size": 6, "preconditioner": _kfac(probe=probe)}
    with open_session(model, Texts(_texts()), **settings) as s:
        before = [p.detach().clone() for p in model.parameters()]
        loss_fn = (
            _losses
            if kind != "linear"
            else lambda m, batch: m(batch["input_ids"][:, :6].float()).square().sum(1)
        )
        with pytest.raises(ValueError, match=message):
            s.step(next(s.batches()), loss_fn)
        assert s.steps_done == 0 and all(map(torch.equal, before, model.parameters()))
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
