"""ChaCha20 in operations of torch: its keystream against another implementation, its normal numbers
against the CPU stream.
"""

import os
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpkfc.privacy import chacha20, mechanism, normal_numbers, rng
from dpkfc.privacy.chacha20 import compute_keystream, draw_normal
from dpkfc.privacy.rng import NoiseStream

CPU = torch.device("cpu")
KEY = bytes(range(32))
# RFC 8439, section 2.3.2: the block of counter 1.
RFC_NONCE = bytes.fromhex("000000090000004a00000000")
RFC_BLOCK = (
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
)


def keystream(key, nonce, counter, blocks, device=CPU):
    return (
        compute_keystream(key, nonce, counter, blocks, device).cpu().numpy().astype("<i4").tobytes()
    )


def reference(key, nonce, counter, blocks):
    cipher = Cipher(algorithms.ChaCha20(key, counter.to_bytes(4, "little") + nonce), mode=None)
    return cipher.encryptor().update(bytes(64 * blocks))


class Words:
    """The words of a keystream in the order in which they are used; every request begins with a new
    block.
    """

    def __init__(self, key, chunk):
        self.key, self.nonce, self.counter = key, chunk.to_bytes(12, "little"), 0

    def __call__(self, count, dtype):
        size = count * np.dtype(dtype).itemsize
        blocks = -(-size // 64)
        stream = reference(self.key, self.nonce, self.counter, blocks)
        self.counter += blocks
        return np.frombuffer(stream[:size], dtype).astype(object)


def box_muller(size, bits, words, rare):
    """The numbers of a chunk by the formula, in integers, fractions and float64 of numpy."""
    half = -(-size // 2)
    drawn = words(2 * half, "<u4" if bits == 32 else "<u8") >> (0 if bits == 32 else 11)
    places = [i for i in range(half) if drawn[i] < rare]
    fine = dict(zip(places, words(len(places), "<u8") >> 11, strict=True)) if places else {}
    parts = [Fraction(2 * fine[i] + 1, 2**54) if i in fine else Fraction(1, 2) for i in range(half)]
    uniform = [float((drawn[i] + parts[i]) / 2**bits) for i in range(half)]
    radius = np.sqrt(-2 * np.log(uniform))
    angle = drawn[half:].astype(float) * (2 * np.pi * 2.0**-bits)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[
        [*range(half), *range(half, size)]
    ]


def test_the_block_of_the_rfc():
    assert keystream(KEY, RFC_NONCE, 1, 1).hex() == RFC_BLOCK


@settings(max_examples=50, deadline=None)
@given(
    key=st.binary(min_size=32, max_size=32),
    nonce=st.binary(min_size=12, max_size=12),
    counter=st.integers(0, 2**32 - 40),
    blocks=st.integers(1, 40),
)
@example(key=b"\xff" * 32, nonce=b"\xff" * 12, counter=2**31 - 3, blocks=6)
@example(key=bytes(32), nonce=bytes(12), counter=2**32 - 6, blocks=6)
def test_the_keystream_is_that_of_another_implementation(key, nonce, counter, blocks):
    assert keystream(key, nonce, counter, blocks) == reference(key, nonce, counter, blocks)


@pytest.mark.gpu
def test_the_keystream_of_a_gpu_is_that_of_another_implementation():
    key = os.urandom(32)
    assert keystream(key, RFC_NONCE, 2**31 - 9, 10_000, torch.device("cuda")) == reference(
        key, RFC_NONCE, 2**31 - 9, 10_000
    )


@pytest.mark.parametrize("rare", [None, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 1001, 3 * 4096 + 5])
def test_the_normal_numbers_follow_the_formula(size, dtype, rare, monkeypatch):
    """Also where half of the radii are refined."""
    bits = {"float32": 32, "float64": 53}[dtype]
    bounds = {32: normal_numbers._RARE, 53: normal_numbers._RARE_FINE}
    if rare:
        bounds = {32: 2**32 // rare, 53: 2**53 // rare}
        monkeypatch.setattr(normal_numbers, "_RARE", bounds[32])
        monkeypatch.setattr(normal_numbers, "_RARE_FINE", bounds[53])
    monkeypatch.setattr(chacha20, "NONCE_CHUNK", 4096)
    numbers = draw_normal(KEY, size, getattr(torch, dtype), CPU)
    expected = [
        box_muller(min(4096, size - begin), bits, Words(KEY, begin // 4096), bounds[bits])
        for begin in range(0, size, 4096)
    ]
    assert numbers.shape == (size,) and numbers.dtype == getattr(torch, dtype)
    tolerance = {"float32": 3e-6, "float64": 1e-14}[dtype]
    np.testing.assert_allclose(
        numbers.numpy(), np.concatenate([[], *expected]), rtol=tolerance, atol=tolerance
    )


def test_chunks_and_keys_share_no_numbers(monkeypatch):
    monkeypatch.setattr(chacha20, "NONCE_CHUNK", 100)
    rows = [draw_normal(os.urandom(32), 300, torch.float64, CPU).view(3, 100) for _ in range(3)]
    assert len(torch.cat(rows).unique()) == 900


def test_a_device_that_computes_a_wrong_keystream_is_refused(monkeypatch):
    right = compute_keystream
    monkeypatch.setattr(chacha20, "compute_keystream", lambda *given: right(*given) ^ 1)
    chacha20._check_device.cache_clear()
    with pytest.raises(
        RuntimeError, match="cpu computes a wrong ChaCha20 keystream; train on the CPU"
    ):
        draw_normal(KEY, 1, torch.float32, CPU)


@pytest.mark.parametrize(
    ("key", "nonce", "counter"),
    [
        (bytes(16), bytes(12), 0),
        (KEY, bytes(8), 0),
        (KEY, bytes(12), -1),
        (KEY, bytes(12), 2**32 - 1),
    ],
)
def test_bad_arguments_of_the_keystream(key, nonce, counter):
    with pytest.raises(ValueError, match="ChaCha20 needs a key of 32 bytes, a nonce of 12"):
        compute_keystream(key, nonce, counter, 2, CPU)


def test_a_large_draw_on_a_gpu_is_chacha20_under_a_fresh_key(monkeypatch):
    drawn = []
    monkeypatch.setattr(mechanism, "draw_normal", lambda *given: drawn.append(given))
    stream, gpu = NoiseStream.secure(), torch.device("cuda")
    normal = mechanism._choose_source(stream, 0, gpu, rng.CHUNK + 1)
    for _ in range(2):
        normal(rng.CHUNK + 1, torch.float32)
    (one, *first), (other, *second) = drawn
    assert len(one) == len(other) == 32 and one != other
    assert first == second == [rng.CHUNK + 1, torch.float32, gpu]
    assert stream._draws == 0


def test_a_small_draw_and_one_for_another_device_are_copied_from_the_stream():
    stream, device = NoiseStream.secure(), torch.device("meta")
    numbers = mechanism._choose_source(stream, 0, device, rng.CHUNK + 1)(
        rng.CHUNK + 1, torch.float64
    )
    assert (
        numbers.device == device
        and numbers.shape == (rng.CHUNK + 1,)
        and numbers.dtype == torch.float64
    )
    assert stream._draws == 1


def test_a_secure_stream_has_no_seed_for_a_device():
    with pytest.raises(ValueError, match="a secure stream has no seed for a device"):
        NoiseStream.secure().device_seed(0)
