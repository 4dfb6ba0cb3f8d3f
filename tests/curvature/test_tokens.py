import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.curvature import TokenNoise
from tests.models import stream


def _make_noise(**fields):
    return TokenNoise(
        **{"vocab_size": 30, "length": 9, "cls_id": 1, "sep_id": 2, "pad_id": 0, **fields}
    )


@given(
    length=st.integers(5, 20),
    least=st.integers(5, 20),
    cls=st.sampled_from([None, 1]),
    sep=st.sampled_from([None, 2]),
    segments=st.integers(0, 2),
)
def test_every_token_is_in_its_place(length, least, cls, sep, segments):
    """Written out for each example: [cls] text [sep] padding, with the mask one on the text and
    zero after it.
    """
    segments = segments if sep is not None else min(segments, 1)
    probe = _make_noise(
        length=length, min_length=min(least, length), cls_id=cls, sep_id=sep, segments=segments
    )
    inputs, labels = probe.sample(40, stream(length))
    assert labels is None and set(inputs) == {"input_ids", "attention_mask"} | (
        {"token_type_ids"} if segments else set()
    )
    assert all(x.shape == (40, length) and x.dtype == torch.int64 for x in inputs.values())
    for i in range(40):
        ids, mask = inputs["input_ids"][i].tolist(), inputs["attention_mask"][i].tolist()
        own = sum(mask)
        assert mask == [1] * own + [0] * (length - own) and min(least, length) <= own <= length
        assert ids[own:] == [0] * (length - own)
        text = ids[:own]
        if cls is not None:
            assert text.pop(0) == cls
        if sep is not None:
            assert text.pop() == sep
        if segments == 2:
            middle = text.index(2)
            assert 0 < middle < len(text) - 1  # both texts have a token
            types = inputs["token_type_ids"][i].tolist()
            first = middle + 1 + (cls is not None)
            assert types == [0] * first + [1] * (own - first) + [0] * (length - own)
            text = text[:middle] + text[middle + 1 :]
        elif segments:
            assert not inputs["token_type_ids"][i].any()
        assert text and not {0, 1, 2}.intersection(text) - ({1} if cls is None else set()) - (
            {2} if sep is None else set()
        )


def _sample_tokens(probe, n=4000):
    inputs, _ = probe.sample(n, stream(3))
    ids = inputs if isinstance(inputs, torch.Tensor) else inputs["input_ids"]
    return torch.bincount(ids.flatten(), minlength=probe.vocab_size).double() / ids.numel()


def test_tokens_follow_the_law_that_was_asked_for():
    plain = {"vocab_size": 12, "length": 10, "min_length": 10}
    laws = {
        "uniform": (TokenNoise(**plain), torch.ones(12)),
        "zipf": (TokenNoise(**plain, zipf_exponent=1.2), torch.arange(1, 13).pow(-1.2)),
        "offset": (
            TokenNoise(**plain, zipf_exponent=1.0, first_id=4),
            torch.tensor([0.0] * 4 + [1 / k for k in range(1, 9)]),
        ),
        "table": (
            TokenNoise(**plain, frequencies=[0, 5, 0, 1] + [0] * 8, provenance="a book"),
            None,
        ),
        "excluded": (
            TokenNoise(**plain, exclude=(3, 11)),
            torch.tensor([1.0] * 3 + [0.0] + [1.0] * 7 + [0.0]),
        ),
    }
    for name, (probe, weights) in laws.items():
        weights = torch.tensor([0.0, 5, 0, 1] + [0.0] * 8) if weights is None else weights
        exact = weights.double() / weights.sum()
        drawn = _sample_tokens(probe)
        assert torch.allclose(drawn, exact, atol=0.01), name
        assert bool((drawn[exact == 0] == 0).all()), name


def test_bare_ids_are_a_tensor_and_know_their_padding():
    probe = _make_noise(bare=True)
    ids, _ = probe.sample(5, stream())
    assert isinstance(ids, torch.Tensor) and torch.equal(
        ids, _make_noise().sample(5, stream())[0]["input_ids"]
    )
    # padding with the id of a special token says nothing
    assert probe.padding_id == 0 and _make_noise(pad_id=1).padding_id is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be an integer"),
        ({"length": 2.0}, "length must be an integer"),
        ({"cls_id": 30}, r"cls_id must lie in \[0, 30\)"),
        ({"exclude": (-1,)}, "exclude must lie in"),
        ({"min_length": 2}, "min_length must lie between 3"),
        ({"min_length": 10}, "length=9"),
        ({"pad_id": None}, "need pad_id"),
        ({"segments": 3}, "segments must be"),
        ({"segments": 2, "sep_id": None}, "needs sep_id"),
        ({"zipf_exponent": -1.0}, "zipf_exponent"),
        ({"frequencies": torch.ones(30)}, "provenance='...'.*private text void the guarantee"),
        ({"provenance": "a book"}, "none are given"),
        ({"min_length": 3.5}, "min_length must be an integer"),
        (
            {"frequencies": torch.ones(29), "provenance": "x"},
            r"vocab_size=30 tokens, got shape \(29,\)",
        ),
        (
            {"frequencies": [1.0] * 4 + [-2.0] * 26, "provenance": "x"},
            "26 are not; the first belongs to token 4, -2.0",
        ),
        ({"frequencies": torch.ones(30), "provenance": "x", "zipf_exponent": 1.0}, "not both"),
        ({"frequencies": torch.zeros(30), "provenance": "x"}, "no token is left"),
        ({"first_id": 29, "exclude": (29,)}, "no token is left"),
    ],
)
def test_bad_values_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        _make_noise(**fields)


class _Tokenizer:
    """As much of a tokenizer as is asked for."""

    pad_token_id, eos_token_id, all_special_ids, model_input_names = (
        0,
        2,
        [0, 1, 2, 99],
        ("input_ids", "token_type_ids"),
    )

    def __init__(self, before=(1,), after=(2,)):
        self.before, self.after = list(before), list(after)

    def __len__(self):
        return 30

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [*self.before, 7, *self.after] if add_special_tokens else [7]}


def test_special_tokens_are_those_of_a_tokenizer():
    probe = TokenNoise.from_tokenizer(_Tokenizer(), 8, zipf_exponent=1.0)
    assert (probe.cls_id, probe.sep_id, probe.pad_id, probe.vocab_size, probe.segments) == (
        1,
        2,
        0,
        30,
        1,
    )
    # 99 lies outside the vocabulary
    assert probe.exclude == (0, 1, 2) and probe.zipf_exponent == 1.0
    plain = TokenNoise.from_tokenizer(_Tokenizer((), ()), 8, segments=0, pad_id=5)
    assert (plain.cls_id, plain.sep_id, plain.pad_id, plain.segments) == (None, None, 5, 0)
    with pytest.raises(ValueError, match="give cls_id and sep_id yourself"):
        TokenNoise.from_tokenizer(_Tokenizer((1, 3)), 8)
