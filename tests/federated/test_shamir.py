"""Shamir's secret sharing: any threshold of shares gives the secret, fewer fit every secret."""

import secrets
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkfc.federated.shamir import (
    PRIME,
    SECRET_BYTES,
    SHARE_BYTES,
    _weights,
    join,
    split,
)


def rows(shares):
    return {holder: [share] for holder, share in shares.items()}


@settings(max_examples=60, deadline=None)
@given(
    secret=st.binary(min_size=32, max_size=32),
    holders=st.sets(st.integers(1, 400), min_size=1, max_size=9),
    data=st.data(),
)
def test_any_threshold_of_shares_gives_the_secret(secret, holders, data):
    threshold = data.draw(st.integers(1, len(holders)))
    shares = split(secret, holders, threshold)
    assert set(shares) == holders and {len(share) for share in shares.values()} == {SHARE_BYTES}
    for chosen in combinations(sorted(holders), threshold):
        assert join({x: [shares[x]] for x in chosen}, threshold) == [secret]
    assert join(rows(shares), threshold) == [secret]  # more than enough


@settings(max_examples=40, deadline=None)
@given(secret=st.binary(min_size=32, max_size=32), threshold=st.integers(2, 6))
def test_fewer_shares_fit_every_secret(secret, threshold):
    """For any other secret there is one missing share with which the shares of threshold - 1
    holders give it.
    """
    shares = split(secret, range(1, 8), threshold)
    known = list(range(2, threshold + 1))
    other = secrets.token_bytes(SECRET_BYTES)
    weights = dict(zip([1, *known], _weights([1, *known]), strict=True))
    rest = sum(weights[x] * int.from_bytes(shares[x], "big") for x in known)
    missing = (int.from_bytes(other, "big") - rest) * pow(weights[1], -1, PRIME) % PRIME
    forged = {1: [missing.to_bytes(SHARE_BYTES, "big")], **{x: [shares[x]] for x in known}}
    assert join(forged, threshold) == [other]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"secret": b"short"}, "a secret has 32 bytes, got 5"),
        ({"holders": (1, 2, 2)}, "different integers >= 1"),
        ({"holders": (0, 1, 2)}, "different integers >= 1"),
        ({"threshold": 0}, "between 1 and the 3 holders, got 0"),
        ({"threshold": 4}, "between 1 and the 3 holders, got 4"),
    ],
)
def test_bad_input_is_one_clear_error(change, message):
    with pytest.raises(ValueError, match=message):
        split(**{"secret": bytes(32), "holders": (1, 2, 3), "threshold": 2, **change})


def test_too_few_or_foreign_shares_are_one_clear_error():
    shares = split(bytes(32), (1, 2, 3), 3)
    with pytest.raises(ValueError, match="2 clients gave shares and a secret needs 3"):
        join({x: [shares[x]] for x in (1, 2)}, 3)
    largest = (PRIME - 1).to_bytes(SHARE_BYTES, "big")
    with pytest.raises(ValueError, match="belong to no secret"):
        join({1: [largest]}, 1)
