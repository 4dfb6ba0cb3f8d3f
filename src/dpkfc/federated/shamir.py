"""Shamir's secret sharing: any `threshold` shares give the secret, and fewer reveal nothing.

A secret has 32 bytes. It is the value at 0 of a polynomial over the integers modulo the prime
2²⁵⁶ + 297. The other coefficients are uniform, and the polynomial has degree `threshold` − 1. The
share of holder x ≥ 1 is the value at x. Python's integers take a time that depends on their values:
keep the timing of `split` from an adversary on the same machine. Source: Shamir 1979, How to share
a secret.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33


def split(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, bytes]:
    """Split a secret into one share for each holder.

    Args:
        secret: 32 bytes.
        holders: different numbers >= 1.
        threshold: shares that give the secret.

    Returns:
        Holder to a share of 33 bytes.

    Raises:
        ValueError: a secret of another length, a holder below 1 or twice, a threshold below 1 or
            above the holders.
    """
    points = list(holders)
    different = {x for x in points if 1 <= x < PRIME}
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if len(different) != len(points):
        raise ValueError(f"holders must be different integers >= 1, got {points[:8]}")
    if not 1 <= threshold <= len(points):
        raise ValueError(
            f"threshold must lie between 1 and the {len(points)} holders, got {threshold}"
        )
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    constant = int.from_bytes(secret, "big")
    coefficients.append(constant)
    shares = {}
    for x in points:
        value = _value(coefficients, x)
        shares[x] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def join(shares: Mapping[int, Sequence[bytes]], threshold: int) -> list[bytes]:
    """Compute several secrets from the shares of the same holders.

    Args:
        shares: holder to its shares, one a secret, in the same order for every holder.
        threshold: shares that give a secret; the holders with the smallest numbers are used.

    Returns:
        The secrets, 32 bytes each.

    Raises:
        ValueError: fewer holders than the threshold, or shares that belong to no secret.
    """
    if len(shares) < threshold:
        raise ValueError(
            f"{len(shares)} clients gave shares and a secret needs {threshold}; no secret can be "
            "computed"
        )
    points = sorted(shares)[:threshold]
    weights = _weights(points)
    rows = [shares[x] for x in points]
    values = []
    for row in zip(*rows, strict=True):
        value = 0
        for weight, share in zip(weights, row, strict=True):
            value += weight * int.from_bytes(share, "big")
        value %= PRIME
        if value >= 2 ** (8 * SECRET_BYTES):
            raise ValueError("the shares belong to no secret: a client gave a wrong one")
        values.append(value.to_bytes(SECRET_BYTES, "big"))
    return values


def _value(coefficients: Sequence[int], x: int) -> int:
    """Evaluate a polynomial, its highest coefficient first, by Horner's rule."""
    value = 0
    for coefficient in coefficients:
        value = (value * x + coefficient) % PRIME
    return value


def _weights(points: Sequence[int]) -> list[int]:
    """Return Lagrange's weights for the value at 0."""
    weights = []
    for x in points:
        others = [other for other in points if other != x]
        numerator = math.prod(others)
        denominator = math.prod(other - x for other in others)
        inverse = pow(denominator, -1, PRIME)
        weights.append(numerator * inverse % PRIME)
    return weights
