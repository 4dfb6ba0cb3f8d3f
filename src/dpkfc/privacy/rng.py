"""Draw the numbers of the mechanism and of the sampler, in streams independent of any seed.

Noise comes from AES-256 in counter mode. Every draw has a fresh 256-bit key of the operating
system (`draw_key`), so no state in memory decides the next draw. Two resumptions of one snapshot of
memory, or two processes after a fork, draw different noise. A snapshot during a draw repeats one
release as a whole, since the sum is fixed before its noise is drawn. An observer of any number of
releases cannot predict another one without breaking the cipher. Batches come from Philox (Salmon
et al. 2011) under fresh keys of their own.

`normal_numbers` makes normal numbers of these words. Correlated noise (`correlated_noise`) keeps
the keys of earlier releases in memory, to make their draws again, and the last noise that came of
them, to do without. Nothing is stored, and a resumed run begins without both.

The guarantee is stated for ideal Gaussian noise. Rounded noise alone (`mechanism`), made of the
float64 numbers, accounts for the floating-point numbers that a sum with noise can become.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import DTypeLike, NDArray

from dpkfc._checks import show_value
from dpkfc.privacy.correlated_noise import BandedNoise, Recursion

# --------------------------------------------------------------------------------------------------
# Keys from the operating system, drawn when they are used and never before.
#
# Memory can repeat: two resumptions of one snapshot and the two processes after a fork begin with
# equal memory. A key in memory would give both of them equal numbers. A key that is drawn at its
# use differs, because the kernel is asked anew.


def draw_key() -> bytes:
    """Draw a fresh 256-bit key from the operating system.

    The key is BLAKE2b (RFC 7693) of two clocks, keyed with 32 bytes of the kernel. The kernel's
    bytes make the key unpredictable. The clocks separate two resumptions of a virtual machine
    without a generation identifier. Its kernel does not notice that it was resumed, and repeats its
    own bytes for a while.

    Returns:
        32 bytes.
    """
    clocks = f"{time.time_ns()} {time.perf_counter_ns()}"
    kernel = os.urandom(32)
    mixed = hashlib.blake2b(clocks.encode(), key=kernel, digest_size=32)
    return mixed.digest()


# --------------------------------------------------------------------------------------------------
# The number of forks between the first process and this one.
#
# A process identifier does not show a fork: with PID namespaces a parent and its child can both be
# process 1.


class _Process:
    """Counts in every child that is forked from a process in which this module was imported."""

    forks = 0

    @classmethod
    def add_fork(cls) -> None:
        cls.forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Process.add_fork)


def count_forks() -> int:
    """Return the number of forks.

    An object that stores it can tell a child from the process that made the object.
    """
    return _Process.forks


# --------------------------------------------------------------------------------------------------

# Numbers drawn from one counter: they and what they are made of fit a cache. No draw depends on the
# number of threads.
CHUNK = 1 << 17
# The keystream is this, encrypted: as many bytes as the largest chunk takes at once.
_ZEROS = memoryview(bytes(8 * CHUNK))
_DOMAINS = {"noise": 1, "sampling": 2, "device": 3}


def _test_words(count: int, seed: int, domain: str, *numbers: int) -> NDArray[Any]:
    """Return words of the test mode; every domain has its own."""
    place = (_DOMAINS[domain], *numbers)
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=place)
    return sequence.generate_state(count, np.uint64)


_AnyStream = TypeVar("_AnyStream", bound="_Stream")


class _Stream:
    """A stream of the system (secure) or of a seed (test mode), never copied or stored."""

    _domain: str

    def __init__(self, seed: int | None = None) -> None:
        # Of any size: a federated party has a seed of 64 bits.
        if seed is not None and (type(seed) is not int or seed < 0):
            raise ValueError(
                f"the seed of a repeatable stream must be an integer >= 0, got {show_value(seed)}"
            )
        self._seed = seed
        self._key = b""
        if seed is not None:
            words = _test_words(4, seed, self._domain)
            self._key = words.astype("<u8").tobytes()

    @classmethod
    def secure(cls: type[_AnyStream]) -> _AnyStream:
        """Return a stream that takes a fresh 256-bit key of the operating system for every draw.

        A repeated step draws something else, as its second charge assumes.
        """
        return cls()

    @classmethod
    def repeatable(cls: type[_AnyStream], seed: int) -> _AnyStream:
        """Return a stream of TEST MODE, NOT PRIVATE.

        Each draw is a function of (seed, step), also after a resume.

        Raises:
            ValueError: the seed is not an integer >= 0.
        """
        return cls(seed)

    @property
    def is_secure(self) -> bool:
        """Return whether keys come from the operating system; test mode is not private."""
        return self._seed is None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is never copied or pickled: its replay exposes the difference"
            " of two sums; make a new one with .secure() on resume"
        )

    def __getstate__(self) -> Any:
        self.__reduce__()


# A thread that makes fewer chunks than this costs more than it saves.
_LEAST_CHUNKS = 4
_MOST_THREADS = 8


@cache
def _start_threads(forks: int) -> ThreadPoolExecutor:
    """Return the threads that draw noise, which stay: each has memory in which it makes chunks.

    Args:
        forks: the present number; a forked process does not have the threads of its parent.
    """
    return ThreadPoolExecutor(_MOST_THREADS - 1, f"dpkfc-noise-{forks}")


Use = Callable[[int, NDArray[Any]], None]
"""Takes the place of a chunk in its draw, and its numbers."""


@dataclass(frozen=True)
class Draw:
    """The numbers of one draw, by chunks that are made when they are asked for.

    The numbers of a large model therefore never lie in memory all at once. Each pass over a draw
    makes the same numbers again, so each release needs its own draw.

    Attributes:
        size: count of numbers.
        dtype: "float32" or "float64".
        fill: makes a chunk in memory of its length, from its number.
    """

    size: int
    dtype: str
    fill: Callable[[NDArray[Any], int], None]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Yield the chunks in order; each is valid until the next one is asked for."""
        # It imports torch, which accounting alone does without.
        from dpkfc.privacy.normal_numbers import make_aligned

        whole = make_aligned(min(self.size, CHUNK), self.dtype)
        for chunk, begin in enumerate(range(0, self.size, CHUNK)):
            out = whole[: self.size - begin]
            self.fill(out, chunk)
            yield out

    def hand_out(self, use: Use, threads: int) -> None:
        """Call a function with the place of each chunk in the draw, and its numbers.

        Args:
            use: is called in the thread that has made the chunk, which is valid until it returns.
            threads: the most that work at a time; they change no number.
        """
        from dpkfc.privacy.normal_numbers import CHUNKS

        begins = range(0, self.size, CHUNK)
        waiting = iter(enumerate(begins))

        def work() -> None:
            for chunk, begin in waiting:
                out = CHUNKS.take(min(CHUNK, self.size - begin), self.dtype)
                self.fill(out, chunk)
                use(begin, out)

        others = min(threads, _MOST_THREADS, len(begins) // _LEAST_CHUNKS) - 1
        working = [_start_threads(count_forks()).submit(work) for _ in range(others)]
        try:
            work()
        finally:
            wait(working)
        for thread in working:
            thread.result()


class NoiseStream(_Stream):
    """Standard normal numbers for the mechanism; make one with `secure` or `repeatable`.

    The key of the last draw stays in `_key`, so that a test can compare the draw with a second
    implementation. No later draw uses this key, and the sum behind its noise lies in the same
    memory.
    """

    _domain = "noise"

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._draws = 0
        # Keys and counters of consecutive releases, the first one first, with what a release must
        # share to be correlated with them.
        self._past: list[tuple[bytes, int]] = []
        self._shared: tuple[Any, ...] = ()
        # Made of `_past` alone, by the number of the chunk.
        self._recursions: dict[int, Recursion] = {}
        self.most_kept_bytes = 1 << 62

    def normal(self, size: int, step: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return independent N(0, 1) numbers `[size]`.

        Args:
            size: count of numbers, >= 0.
            step: number of the step; it decides the draw in test mode and is ignored in secure
                mode.
            dtype: float32 or float64, in which the numbers are generated, never rounded.

        Raises:
            ValueError: a negative size or step.
        """
        key, draw = self._next_draw(size, step)
        out = np.empty(size, dtype)
        for chunk, begin in enumerate(range(0, size, CHUNK)):
            _fill_chunk(out[begin : begin + CHUNK], key, draw, chunk)
        return out

    def draw(self, size: int, step: int, dtype: DTypeLike = np.float32) -> Draw:
        """Return the draw that `normal` would make, whose numbers are not yet made.

        Raises:
            ValueError: a negative size or step.
        """
        key, draw = self._next_draw(size, step)
        return Draw(
            size, np.dtype(dtype).name, lambda out, chunk: _fill_chunk(out, key, draw, chunk)
        )

    def correlated_draw(
        self, size: int, step: int, dtype: DTypeLike, release: int, correlation: BandedNoise
    ) -> Draw:
        """Return the next w = C⁻¹ z, with a new draw z.

        The last vectors of w stay in memory, `bands` − 1 times the numbers of a release. A chunk
        whose vectors are not there, or beyond `most_kept_bytes`, is made of the draws of all
        earlier releases again, from their keys, to the same bit.

        The correlation begins anew after a release that did not come here, in a forked process, in
        another process, or where size or type of the numbers change. The noise of the first of
        these releases is then independent noise.

        Args:
            size: count of numbers, >= 0.
            step: as of `normal`.
            dtype: float32 or float64.
            release: number of the release in the ledger.
            correlation: of the run.

        Raises:
            ValueError: a negative size or step.
        """
        shared = (release, size, np.dtype(dtype), correlation, count_forks())
        if shared != self._shared:
            self._past = []
            self._recursions = {}
        self._shared = (release + 1, *shared[1:])
        self._past.append(self._next_draw(size, step))
        # A later release adds to both, or takes others.
        past, draws, recursions = self._past, len(self._past), self._recursions
        of_a_chunk = max(1, correlation.bands - 1) * CHUNK * np.dtype(dtype).itemsize
        kept_chunks = self.most_kept_bytes // of_a_chunk

        def fill(out: NDArray[Any], chunk: int) -> None:
            # What fails midway leaves no vectors.
            recursion = recursions.pop(chunk, None)
            if recursion is None or recursion.draws >= draws:
                recursion = Recursion(correlation, len(out), dtype)
            for key, counter in past[recursion.draws : draws]:
                _fill_chunk(out, key, counter, chunk)
                recursion.advance(out)
            if chunk < kept_chunks:
                recursions[chunk] = recursion

        return Draw(size, np.dtype(dtype).name, fill)

    @property
    def correlated_draws(self) -> int:
        """The number of draws, the last one included, with which the last release is correlated."""
        return len(self._past)

    def _next_draw(self, size: int, step: int) -> tuple[bytes, int]:
        """Return the key of a draw, fresh in secure mode, and the start of its counter blocks."""
        if size < 0 or step < 0:
            raise ValueError(f"size and step must be >= 0, got size={size}, step={step}")
        draw = self._draws if self.is_secure else step
        self._draws += 1
        # A local name: another thread may begin to draw before this one ends.
        key = draw_key() if self.is_secure else self._key
        self._key = key
        return key, draw

    def device_seed(self, step: int) -> int:
        """Return the 63-bit seed of an accelerator in test mode, a function of (seed, step).

        Raises:
            ValueError: the stream is secure; an accelerator then takes its keys from `draw_key`.
        """
        if self._seed is None:
            raise ValueError(
                "a secure stream has no seed for a device; take a key of dpkfc.privacy.rng.draw_key"
            )
        words = _test_words(1, self._seed, "device", step)
        seed = int(words[0])
        return seed >> 1


class _Cipher(threading.local):
    """AES of the last key of each thread: to begin anew costs as much as a third of a keystream."""

    _key = b""

    def begin(self, key: bytes, counter: bytes) -> Any:
        """Return what encrypts with a key, from a counter on."""
        if key == self._key:
            self._keystream.reset_nonce(counter)
        else:
            self._keystream: Any = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
            self._key = key
        return self._keystream


_CIPHER = _Cipher()


def _fill_chunk(out: NDArray[Any], key: bytes, draw: int, chunk: int) -> None:
    """Fill memory with the numbers of one chunk, from a counter of its own."""
    # It imports torch, which accounting alone does without.
    from dpkfc.privacy.normal_numbers import SCRATCH, fill_array

    counter = draw.to_bytes(8, "big") + chunk.to_bytes(4, "big") + bytes(4)
    keystream = _CIPHER.begin(key, counter)

    def words(count: int, bits: int) -> NDArray[Any]:
        size = count * (4 if bits == 32 else 8)
        buffer = SCRATCH.take(size + 16, "uint8")  # the cipher needs one more block
        keystream.update_into(_ZEROS[:size], buffer.data)
        stream = buffer[:size]
        if bits == 32:
            return stream.view("<u4").astype(np.uint32, copy=False)
        wide = stream.view("<u8").astype(np.uint64, copy=False)
        wide >>= np.uint64(11)
        return wide.view(np.int64)

    fill_array(out, words)


class SamplingStream(_Stream):
    """Generators for the sampler, without any key of noise; make one with `secure` or `repeatable`.

    A secure stream stores one key, for the shuffled order of the present epoch, which all steps of
    the epoch share. Two resumptions of a snapshot therefore finish the epoch in one order. A forked
    child takes a new key, also in the middle of an epoch. Every other draw has a fresh key.
    """

    _domain = "sampling"

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._order: tuple[int, int, int] | None = None  # the epoch of `_key`

    def generator(self, step: int, steps_per_draw: int = 1) -> np.random.Generator:
        """Return the generator for the batch of a step.

        Args:
            step: number of the step, >= 0.
            steps_per_draw: consecutive steps that share one draw (an epoch of a shuffled order),
                and get equal generators; 1 for every other sampler.

        Raises:
            ValueError: a negative step, or steps_per_draw below 1.
        """
        if step < 0 or steps_per_draw < 1:
            raise ValueError(
                f"need step >= 0 and steps_per_draw >= 1, got {step} and {steps_per_draw}"
            )
        draw = step // steps_per_draw
        if not self.is_secure:
            return _philox(self._key, draw)
        if steps_per_draw == 1:
            return _philox(draw_key(), draw)
        order = (count_forks(), steps_per_draw, draw)
        if order != self._order:
            self._order = order
            self._key = draw_key()
        return _philox(self._key, draw)


def _philox(key: bytes, draw: int) -> np.random.Generator:
    """Return a generator from the first 128 bits of a key, at the counter of a draw."""
    start = key[:16]
    number = int.from_bytes(start, "little")
    bits = np.random.Philox(key=number, counter=draw << 192)
    return np.random.Generator(bits)
