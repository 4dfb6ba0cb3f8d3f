"""Keep the digests of the weights that a run released last, next to its ledger.

Reading it, and comparing a file of weights with it, takes no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import deserialize

from dpkfc.checkpoint import MISFIT, CheckpointError, digest_manifest, place_file

_FORMAT = 1
# Types of numbers as safetensors and torch name them.
_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, kw_only=True)
class WeightsRecord:
    """The weights that a run released last, by the SHA-256 of their tensors.

    Attributes:
        ledger: name of the ledger.
        releases, head: of the ledger when the run ended.
        weights: digest of each tensor of the model.
        average: digests where the average of the weights is in the model; {} without an average.
        accepted: as of `ReleasedWeights`.
    """

    ledger: str
    releases: int
    head: str
    weights: Mapping[str, str]
    average: Mapping[str, str] = field(default_factory=dict)
    accepted: Sequence[int] = ()

    def describes(self, digests: Mapping[str, str]) -> bool:
        """Return whether tensors are these weights, or their average.

        A file may leave out a tensor that it holds under another name.

        Args:
            digests: of the tensors, by name.
        """
        for recorded in filter(None, (self.weights, self.average)):
            are_equal = digests.items() <= recorded.items()
            missing = set(recorded.values()) - set(digests.values())
            if are_equal and not missing:
                return True
        return False


def find_record_path(ledger: Path) -> Path:
    """Return the file next to a ledger that holds the record of its weights."""
    return ledger.with_name(f"{ledger.stem}.weights.json")


def write_weights_record(ledger: Path, record: WeightsRecord) -> None:
    """Write the record next to its ledger; a crash leaves the old one or the new one.

    Raises:
        CheckpointError: the disk cannot take it.
    """
    content = {"format": _FORMAT, **asdict(record)}
    text = json.dumps(content | {"hash": digest_manifest(content)}, indent=1) + "\n"
    place_file(find_record_path(ledger), lambda part: part.write_text(text, "utf-8"))


def read_weights_record(ledger: Path) -> WeightsRecord | None:
    """Return the record next to a ledger; None without one.

    Raises:
        CheckpointError: it is damaged, or of a later format.
    """
    path = find_record_path(ledger)
    try:
        content = json.loads(path.read_text("utf-8"))
        stated = content.pop("hash")
        if content.pop("format") != _FORMAT:
            raise ValueError("another format")
        record = WeightsRecord(**content)
        if digest_manifest({"format": _FORMAT, **asdict(record)}) != stated:
            raise ValueError("its hash does not fit")
    except FileNotFoundError:
        return None
    except (OSError, *MISFIT) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the record of the weights {path} is damaged ({reason[:60]}); put it back"
        ) from error
    return record


def digest_file(path: Path) -> dict[str, str]:
    """Return the digest of each tensor in a safetensors file, as a `WeightsRecord` has it.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: it is not a file of safetensors.
    """
    digests = {}
    for name, tensor in deserialize(path.read_bytes()):
        kind = tensor["dtype"]
        known = f"torch.{_TYPES.get(kind, kind)}"
        digest = hashlib.sha256(f"{known} {tuple(tensor['shape'])}\n".encode())
        digest.update(tensor["data"])
        digests[name] = digest.hexdigest()
    return digests
