"""Random streams of the mechanism and of the sampler, apart from each other and from every other seed.

Noise comes from a cipher: AES-256 in counter mode under a key of the operating system. The counter block holds the number
of the draw and of the chunk within it, so that no two draws of one key overlap, and who sees any number of releases can
predict no other without breaking the cipher. Batches are drawn from Philox (Salmon et al. 2011) under a key of their own.

Normal numbers are made by the transform of Box and Muller (1958). In float32 32 bits decide the angle and 32 the radius, and
53 more where the radius exceeds 5.5; the tail ends at 10.9 standard deviations. In float64 both have 53 bits, and 53 more
where the radius exceeds 3.3; the tail ends at 12.1. The guarantee is stated for ideal Gaussian noise. Which floating-point
numbers a sum with noise can become is accounted for by rounded noise alone (`grid`), which is made of the float64 numbers.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import DTypeLike, NDArray

__all__ = ["NoiseStream", "SamplingStream"]

CHUNK = 1 << 17  # numbers drawn from one counter: fits a cache, few waits between threads; no draw depends on their number
_DOMAINS = {"noise": 1, "sampling": 2, "device": 3}
_RARE = 1 << 10  # radii whose 32 bits fall below this are given more bits: about one in four million
_RARE_FINE = 1 << 45  # the same for 53 bits: one in 256, so that the radius is known to 2⁻⁴⁵ of its probability anywhere


def _test_key(seed: int, domain: str) -> bytes:
    """A 256-bit key of the test mode; every domain has its own."""
    words = np.random.SeedSequence(entropy=seed, spawn_key=(_DOMAINS[domain],)).generate_state(4, np.uint64)
    return words.astype("<u8").tobytes()


class _Keyed:
    """A stream keyed by the operating system (secure) or by a seed (test mode). Never copied, never stored."""

    _domain: str

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ValueError(f"the seed of a repeatable stream must be an integer >= 0, got {seed!r}")
        self._seed = seed
        self._rekey()

    def _rekey(self) -> None:
        self._pid = os.getpid()
        self._draws = 0
        self._key = secrets.token_bytes(32) if self._seed is None else _test_key(self._seed, self._domain)

    def _fresh(self) -> None:
        """A forked child must not repeat its parent: it takes a key of its own."""
        if self._seed is None and os.getpid() != self._pid:
            self._rekey()

    @property
    def is_secure(self) -> bool:
        """Whether the key came from the operating system; False in test mode, which is not private."""
        return self._seed is None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is never copied, pickled or put into a checkpoint: a restored stream that is "
            "replayed on another batch exposes the difference of two sums. Make a new one with .secure() on resume."
        )

    def __getstate__(self) -> Any:
        self.__reduce__()


class NoiseStream(_Keyed):
    """Standard normal numbers for the mechanism; make one with `secure` or `repeatable`."""

    _domain = "noise"

    @classmethod
    def secure(cls) -> NoiseStream:
        """A stream under a fresh 256-bit key of the operating system; no two draws ever repeat."""
        return cls()

    @classmethod
    def repeatable(cls, seed: int) -> NoiseStream:
        """TEST MODE, NOT PRIVATE: the draw of a step is a function of (seed, step), also after a resume.

        Raises:
            ValueError: the seed is not an integer >= 0.
        """
        return cls(seed)

    def normal(self, size: int, step: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Independent N(0, 1) numbers `[size]`.

        Args:
            size: how many, >= 0.
            step: number of the step; decides the draw in test mode, is ignored in secure mode.
            dtype: float32 or float64; the numbers are generated in it, never rounded to a narrower one.

        Raises:
            ValueError: a negative size or step.
        """
        draw = self._next_draw(size, step)
        out = np.empty(size, dtype=dtype)
        chunks = -(-size // CHUNK)
        workers = min(8, os.cpu_count() or 1, chunks)
        if workers <= 1:
            self._fill(out, draw, range(chunks))
        else:
            spans = [range(i * chunks // workers, (i + 1) * chunks // workers) for i in range(workers)]
            with ThreadPoolExecutor(max_workers=workers) as pool:
                list(pool.map(lambda span: self._fill(out, draw, span), spans))
        return out

    def pieces(self, size: int, step: int, dtype: DTypeLike = np.float32) -> Iterator[NDArray[Any]]:
        """The numbers of `normal` in their order, a chunk at a time, made a little ahead of their use.

        For numbers that are used up one after the other: those of a large model never lie in memory all at once.

        Raises:
            ValueError: a negative size or step.
        """
        return self._pieces(size, self._next_draw(size, step), dtype)

    def _pieces(self, size: int, draw: int, dtype: DTypeLike) -> Iterator[NDArray[Any]]:
        def made(chunk: int) -> NDArray[Any]:
            out = np.empty(min(CHUNK, size - chunk * CHUNK), dtype=dtype)
            self._fill(out, draw, range(chunk, chunk + 1), chunk)
            return out

        chunks, workers = -(-size // CHUNK), min(8, os.cpu_count() or 1)
        with ThreadPoolExecutor(max_workers=workers) as pool:
            ahead = deque(pool.submit(made, chunk) for chunk in range(min(chunks, 4 * workers)))
            for chunk in range(len(ahead), chunks + len(ahead)):
                yield ahead.popleft().result()
                if chunk < chunks:
                    ahead.append(pool.submit(made, chunk))

    def _next_draw(self, size: int, step: int) -> int:
        if size < 0 or step < 0:
            raise ValueError(f"size and step must be >= 0, got size={size}, step={step}")
        self._fresh()
        draw = self._draws if self.is_secure else step
        self._draws += 1
        return draw

    def _fill(self, out: NDArray[Any], draw: int, chunks: range, first: int = 0) -> None:
        """Fill some chunks of a draw, each from a counter of its own; `out` begins with chunk number `first`."""
        zeros = bytes((min(CHUNK, out.size) + 1) * out.itemsize)
        held = bytearray(len(zeros) + 16)  # the cipher asks for room of one block more

        for chunk in chunks:
            start = draw.to_bytes(8, "big") + chunk.to_bytes(4, "big") + bytes(4)
            keystream = Cipher(algorithms.AES(self._key), modes.CTR(start)).encryptor()

            def words(count: int, dtype: str, keystream: Any = keystream) -> NDArray[Any]:
                size = count * np.dtype(dtype).itemsize
                if size > len(zeros):
                    return np.frombuffer(keystream.update(bytes(size)), dtype)
                keystream.update_into(memoryview(zeros)[:size], held)
                return np.frombuffer(held, dtype, count)

            _fill_normal(out[(chunk - first) * CHUNK : (chunk - first + 1) * CHUNK], words)

    def device_seed(self, step: int) -> int:
        """63 bits that seed the generator of an accelerator for one release: fresh, or a function of (seed, step)."""
        if self._seed is None:
            return secrets.randbits(63)
        state = np.random.SeedSequence(entropy=self._seed, spawn_key=(_DOMAINS["device"], step))
        return int(state.generate_state(1, np.uint64)[0] >> np.uint64(1))


def _fill_normal(out: NDArray[Any], words: Callable[[int, str], NDArray[Any]]) -> None:
    """Fill out with independent N(0, 1) numbers made of uniform words (count, dtype) of a keystream, valid until the next."""
    half = -(-out.size // 2)
    if out.dtype == np.float32:
        bits = words(2 * half, "<u4")
        radius: NDArray[Any] = bits[:half].astype(np.float64)
        angle: NDArray[Any] = bits[half:].astype(np.float32)
        rare, unit = np.flatnonzero(bits[:half] < _RARE), 2.0**-32
    else:
        fine = words(2 * half, "<u8") >> np.uint64(11)
        radius, angle = fine[:half].astype(np.float64), fine[half:].astype(np.float64)
        rare, unit = np.flatnonzero(fine[:half] < _RARE_FINE), 2.0**-53
    more = (words(rare.size, "<u8") >> np.uint64(11)) * 2.0**-53 + 2.0**-54 + radius[rare]
    radius += 0.5
    radius[rare] = more
    radius *= unit
    angle *= angle.dtype.type(2 * np.pi * unit)
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    scale = radius.astype(out.dtype, copy=False)
    np.multiply(np.cos(angle), scale, out=out[:half])
    np.multiply(np.sin(angle[: out.size - half]), scale[: out.size - half], out=out[half:])


class SamplingStream(_Keyed):
    """Generators for the sampler; make one with `secure` or `repeatable`. Shares no key with any noise."""

    _domain = "sampling"

    @classmethod
    def secure(cls) -> SamplingStream:
        """Every generator is fresh: a step that is repeated draws another batch, as its second charge assumes."""
        return cls()

    @classmethod
    def repeatable(cls, seed: int) -> SamplingStream:
        """TEST MODE, NOT PRIVATE: the generator of a step is a function of (seed, step).

        Raises:
            ValueError: the seed is not an integer >= 0.
        """
        return cls(seed)

    def generator(self, step: int, steps_per_draw: int = 1) -> np.random.Generator:
        """The generator from which the batch of a step is drawn.

        Args:
            step: number of the step, >= 0.
            steps_per_draw: consecutive steps that share one draw (an epoch of a shuffled order), and therefore get
                equal generators; 1 for every sampler that draws each batch anew.

        Raises:
            ValueError: a negative step, or steps_per_draw below 1.
        """
        if step < 0 or steps_per_draw < 1:
            raise ValueError(f"need step >= 0 and steps_per_draw >= 1, got {step} and {steps_per_draw}")
        self._fresh()
        if self.is_secure and steps_per_draw == 1:
            return np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        key = int.from_bytes(self._key[:16], "little")
        return np.random.Generator(np.random.Philox(key=key, counter=(step // steps_per_draw) << 192))
