"""One client's part of secure aggregation: its keys of a round, and the shares of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from dpkfc.federated.key_agreement import PrivateKey, new_key
from dpkfc.federated.local_model import LocalModel
from dpkfc.federated.messages import (
    CLIENT_FAILED,
    REPEATED,
    Message,
    Received,
    Refusal,
    split_rows,
    stack_rows,
    to_tensor,
)
from dpkfc.federated.secure_aggregation import (
    FEWEST_STEPS,
    ReceivedShares,
    RoundKeys,
    channel_pair_keys,
    encode,
    mask,
    open_shares,
    pair_keys,
    reveal,
    round_scope,
    seal_shares,
)
from dpkfc.tensors import NamedTensors, Tensors


class ClientMasks:
    """Masks the sums of one client, and reveals shares of the others' secrets.

    Args:
        number: of the client.
        local: its model.
        channel: private key of its channels to the others, 32 bytes; None makes one.

    Raises:
        ValueError: a key of another length, or noise that is too small for the grid.
    """

    def __init__(self, number: int, local: LocalModel, channel: bytes | None) -> None:
        self._number = number
        self._config = local.plan.config
        self._contract = local.contract
        self._channel = PrivateKey(new_key() if channel is None else channel)
        self.key = to_tensor(self._channel.public)
        self._grid = local.plan.grid(local.numbers)
        if 0 < local.plan.client_stddev < FEWEST_STEPS * self._grid:
            raise ValueError(
                "the noise of one client is too small for the grid of secure aggregation; raise "
                "the noise"
            )
        # Keys of the last round that this client sent keys for.
        self._keys: RoundKeys | None = None
        # Shares of the last round that this client sent a masked sum for.
        self._shares: ReceivedShares | None = None

    def make_keys(self, message: Received, number: int) -> Message:
        """Make the secrets of an unanswered round, and seal shares of them for the cohort."""
        channels = split_rows(message["channels"], self._read_cohort(message))
        keys = RoundKeys(contract=self._contract, round=number)
        sealed = seal_shares(keys, self._number, self._channel, channels, self._config.survivors)
        self._keys = keys
        return {"key": to_tensor(keys.public), "sealed": stack_rows(sealed)}

    def read_pair_keys(self, message: Received, number: int) -> dict[int, bytes]:
        """Return the key of the mask shared with each other client, before anything is charged."""
        cohort = self._read_cohort(message)
        channels = split_rows(message["channels"], cohort)
        if "mask_keys" in message:
            return self._open_shares(message, number, cohort, channels)
        # No share of a round without recovery is ever revealed.
        self._keys = self._shares = None
        self._check_own_key("channel", channels, self._channel.public, number)
        scope = round_scope(self._contract, number)
        return channel_pair_keys(self._number, self._channel, channels, scope)

    def _read_cohort(self, message: Received) -> list[int]:
        """Return the clients to mask a message with; refuse fewer than the plan needs.

        With fewer clients there would be too few masks and too little noise.
        """
        cohort: list[int] = message["cohort"].tolist()
        are_registered = {self._number} <= set(cohort) <= set(range(self._config.clients))
        is_sorted = cohort == sorted(set(cohort))
        if not are_registered or not is_sorted or len(cohort) < self._config.survivors:
            raise Refusal(CLIENT_FAILED)
        return cohort

    def _open_shares(
        self, message: Received, number: int, cohort: list[int], channels: Mapping[int, bytes]
    ) -> dict[int, bytes]:
        """Open the shares sealed for this client; return its mask key with each other client."""
        keys = self._keys
        public = split_rows(message["mask_keys"], cohort)
        if keys is None or keys.round != number:
            raise ValueError(
                f"this client has no keys for round {number}; the server must request keys first"
            )
        self._check_own_key("mask", public, keys.public, number)
        sealed = split_rows(message["sealed"], cohort)
        self._shares = open_shares(
            keys, self._number, self._channel, channels, public=public, sealed=sealed
        )
        return pair_keys(keys, self._number, public)

    def _check_own_key(self, kind: str, keys: Mapping[int, bytes], own: bytes, number: int) -> None:
        """Check that the server sent this client its own public key."""
        if keys[self._number] != own:
            raise ValueError(
                f"the {kind} key of this client was changed in round {number}; the server must "
                "request keys again, or enrol this client again"
            )

    def mask(self, noisy: NamedTensors, pairs: Mapping[int, bytes]) -> Tensors:
        """Mask the noisy sum, then forget the secrets of the round; others store shares of them."""
        integers = encode(noisy, self._grid)
        keys, self._keys = self._keys, None
        return mask(integers, self._number, pairs, keys)

    def reveal(self, message: Received, number: int) -> torch.Tensor:
        """Reveal one share of each client, for one survivor set of the last answered round."""
        received = self._shares
        survivors = tuple(sorted(message["survivors"].tolist()))
        if received is None or received.round != number or self._keys is not None:
            raise ValueError(
                f"this client has sent no masked sum in round {number}, so it reveals no shares"
            )
        are_enough = len(set(survivors)) == len(survivors) >= self._config.survivors
        are_in_cohort = set(survivors) <= set(received.cohort)
        if self._number not in survivors or not are_enough or not are_in_cohort:
            raise ValueError(
                f"the survivors of round {number} are too few, lack this client or lie outside its "
                "cohort"
            )
        # Shares for a second survivor set would reveal both secrets of a client.
        if received.survivors not in ((), survivors):
            raise Refusal(REPEATED)
        self._shares = replace(received, survivors=survivors)
        return stack_rows(reveal(received, survivors))

    def state_dict(self) -> dict[str, Any]:
        """PRIVATE: return the secrets, for `Client.state_dict`."""
        return {
            "keys": None if self._keys is None else asdict(self._keys),
            "shares": None if self._shares is None else asdict(self._shares),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state_dict` returned."""
        keys = state.get("keys")
        shares = state.get("shares")
        self._keys = None if keys is None else RoundKeys(**keys)
        self._shares = None if shares is None else ReceivedShares(**shares)
