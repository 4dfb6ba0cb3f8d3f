"""Which weights the releases of a run have made, told from all others by their values.

Three things may write the weights of a model between two releases: the step of an optimizer on a
release, `restore`, and a user who says so by `accept_weights`. Everything else (a write through
`.data`, a NumPy view, a callback that averages) is noticed by a digest of their bytes, which is
taken after each step, compared before the next release, and written next to the ledger at the end.
One comparison, behind the passes of a step, covers both these and what came before them: torch's
counts of writes and the places of tensors tell the two apart, and show most writes before a pass.
Weights are released, so nothing here reads private data.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from dpkfc.distributed.context import SINGLE_PROCESS, DistributedContext
from dpkfc.distributed.fsdp import reshard
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.tensors import NamedTensors
from dpkfc.weights_record import WeightsRecord, read_weights_record, write_weights_record

# --------------------------------------------------------------------------------------------------
# The digest of a tensor: of its type, its shape, and the bytes of its entries in their order.
#
# XXH3 reads a processor's memory as fast as a sum does. Tensors on an accelerator are condensed
# there first: rows of 1,024 words of 32 bits become the sums of their products with random keys,
# modulo 2^64. Two rows have one sum with a probability of at most 2^-33 over the keys.

_WORDS = 1024
_ROW = 4 * _WORDS
_SMALL = 1 << 16  # bytes that are copied from an accelerator as they are
_ROWS_AT_ONCE = 4096
MakeHash = Callable[[bytes], Any]


@torch.no_grad()
def digest_tensors(
    tensors: Mapping[str, Any], make_hash: MakeHash = xxhash.xxh3_128
) -> dict[str, str]:
    """Return the digest of each tensor by its name; other values are left out.

    With the default, digests of one process can be compared with each other.

    Args:
        tensors: of any layout. Of a sharded tensor the part of this process counts, of a quantised
            or wrapped one its inner tensors, of one without memory (meta, sparse) its shape.
        make_hash: of hashlib or xxhash.
    """
    contents: dict[str, list[int]] = {}
    parts: list[Tensor] = []
    # The modes of an Opacus script would follow each operation.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        for name, x in tensors.items():
            if isinstance(x, Tensor):
                own = [part if part.is_cpu else condense(part) for part in _list_parts(x)]
                contents[name] = list(range(len(parts), len(parts) + len(own)))
                parts += own
        parts = _copy_to_host(parts)
    digests = {}
    for name, places in contents.items():
        x = tensors[name]
        digest = make_hash(f"{x.dtype} {tuple(x.shape)}\n".encode())
        for i in places:
            digest.update(parts[i].numpy().data)
        digests[name] = digest.hexdigest()
    return digests


def digest_weights(weights: Mapping[str, Any]) -> str:
    """Return one SHA-256 of the names and values of all tensors of a state dict.

    It does not depend on the device, the order or the file format.
    """
    lines = [f"{name} {digest}" for name, digest in sorted(digest_for_files(weights).items())]
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()


def digest_for_files(weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each tensor that a file can hold, whatever device it is on."""
    on_host = {}
    for name, x in weights.items():
        if isinstance(x, Tensor) and x.layout == torch.strided:
            on_host[name] = x.detach().cpu()
    return digest_tensors(on_host, hashlib.sha256)


def _list_parts(x: Tensor) -> Iterator[Tensor]:
    """Yield the memory of a tensor as bytes `[n]`, in the order of the entries."""
    if is_traceable_wrapper_subclass(x):
        inner = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
        for part in inner:
            # A sharded tensor has a mesh too.
            if isinstance(part, Tensor):
                yield from _list_parts(part)
    elif x.layout == torch.strided and not x.is_meta:
        values = x.detach()
        if values.is_quantized:
            values = values.int_repr()
        plain = values.resolve_conj().resolve_neg().contiguous()
        yield plain.reshape(-1).view(torch.uint8)


def condense(content: Tensor) -> Tensor:
    """Return bytes `[n]` as they are, or as keyed sums of their rows where there are many."""
    if len(content) <= _SMALL:
        return content
    if content.storage_offset() % 4:
        content = content.clone()
    end = len(content) - len(content) % _ROW
    rows = content[:end].view(torch.int32).view(-1, _WORDS)
    keys = _keys(content.device)
    sums = [(block * keys).sum(1) for block in rows.split(_ROWS_AT_ONCE)]
    return torch.cat([*(x.view(torch.uint8) for x in sums), content[end:]])


@functools.cache
def _keys(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (_WORDS,), generator=generator).to(device)


def _copy_to_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return all parts on the processor, after one copy from each device."""
    copied = list(parts)
    places = defaultdict(list)
    for i, x in enumerate(parts):
        if not x.is_cpu:
            places[x.device].append(i)
    for numbers in places.values():
        lengths = [len(parts[i]) for i in numbers]
        whole = torch.cat([parts[i] for i in numbers]).cpu()
        for i, x in zip(numbers, whole.split(lengths), strict=True):
            copied[i] = x
    return copied


# --------------------------------------------------------------------------------------------------


class ReleasedWeights:
    """Knows the weights that a run released last, and tells all others from them.

    Args:
        model: whose parameters and saved buffers count.
        accepted: of an earlier part of the run.

    Attributes:
        model: as given.
        accepted: the numbers of releases after which weights of other code were accepted.
    """

    def __init__(self, model: nn.Module, accepted: Sequence[int] = ()) -> None:
        self.accepted = list(accepted)
        self.model = model
        # Empty before the first release: training may start from any weights.
        self._known: dict[str, str] = {}
        # Those that it does start from, before the passes of the first step.
        self._first: dict[str, str] = {}
        # Where their parameters lay, and torch's count of writes to each.
        self._places: dict[str, tuple[int, int] | None] = {}
        # Parameters whose values lie where no other code reaches them.
        self._aside: set[str] = set()

    def record(self) -> None:
        """Take the weights as they are now for those that were released.

        Frozen tensors are read once, since no release changes them.
        """
        parameters = self._list_tensors(buffers=False)
        if self._known:
            changed = {name: x for name, x in parameters.items() if x.requires_grad}
        else:
            changed = self._list_tensors()
        self._known |= dict.fromkeys(self._aside, "") | digest_tensors(changed)
        self._places = _find_places(parameters)

    def set_aside(self, name: str) -> None:
        """Leave a parameter out until `take_back`: its values move to where no code reaches them.

        Raises:
            RuntimeError: as `check_parameters`.
        """
        tensors = self._list_tensors(buffers=False)
        if self._known:
            self._refuse_written({name: tensors[name]})
        self._aside.add(name)

    def take_back(self, name: str, *, is_written: bool) -> None:
        """Take the values of a parameter, which were put back, for those that were released.

        Args:
            name: of a parameter that was set aside.
            is_written: other code has written in its place meanwhile, which the next check refuses.
        """
        self._aside.remove(name)
        if self._known:
            own = {name: self._list_tensors(buffers=False)[name]}
            self._known[name] = "" if is_written else digest_tensors(own)[name]
            self._places |= _find_places(own)

    def accept(self, releases: int, ranks: DistributedContext = SINGLE_PROCESS) -> None:
        """Take the weights as they are now, and note it where they have changed since a release.

        Args:
            releases: so many were made.
            ranks: the processes of the run, all of which call this method.
        """
        if not releases:
            return
        now = digest_tensors(self._list_tensors())
        if ranks.any(now != self._known):
            self.accepted.append(releases)
        self._known = now
        self._places = _find_places(self._list_tensors(buffers=False))

    def check_before_passes(self) -> None:
        """Raise as `check_parameters` does, without reading values where torch counted no write.

        `check_parameters(after_passes=True)` reads them all.

        Raises:
            RuntimeError: naming the parameter.
        """
        places = _find_places(self._list_tensors(buffers=False))
        if not self._known or None in places.values() or places != self._places:
            self.check_parameters()
        self._places = places

    def check_parameters(self, *, after_passes: bool = False) -> None:
        """Raise if something else than a release has written a parameter since the last one.

        Args:
            after_passes: `check_before_passes` has found nothing before the passes of this step.

        Raises:
            RuntimeError: naming the parameter.
        """
        parameters = self._list_tensors(buffers=False)
        if not self._known and not after_passes:
            self._first = digest_tensors(parameters)
        self._refuse_written(parameters, after_passes=after_passes)

    def _refuse_written(self, parameters: NamedTensors, *, after_passes: bool = False) -> None:
        """Raise as `check_parameters` for some parameters."""
        name = self._find_changed(parameters)
        if name is None:
            return
        place = _find_places(parameters)[name]
        if after_passes and (place is None or place != self._places[name]):
            raise RuntimeError(
                f"the forward pass writes to the parameter '{name}'; use a parametrization, or "
                "write behind each step and call accept_weights()"
            )
        also = ", or the forward pass writes to it" if after_passes else ""
        raise RuntimeError(
            f"parameter '{name}' was written between two releases{also}; leave it to the steps, or "
            "call accept_weights(), which the card names"
        )

    def check(self) -> None:
        """Raise unless the model holds the weights that were released last.

        Raises:
            RuntimeError: nothing was released or restored, or a tensor differs, by its name.
        """
        if not self._known:
            raise RuntimeError(
                "these weights come from no release: train, or restore() a checkpoint, before a"
                " card is written"
            )
        now = self._list_tensors()
        gone = sorted(self._known.keys() - now.keys())
        name = gone[0] if gone else self._find_changed(now)
        if name is not None:
            raise RuntimeError(
                f"'{name}' is not as the last release left it; a card is for released weights:"
                " write it before they change, or restore() them"
            )

    def _find_changed(self, tensors: NamedTensors) -> str | None:
        """Return the name of the first tensor that is not as it was."""
        known = self._known or self._first
        now = digest_tensors(tensors)
        return next((name for name in now if now[name] != known.get(name)), None)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless a state dict holds the parameters and saved buffers of the model alone.

        Hooks of a state dict can add tensors that no release has made, or replace some.

        Args:
            state: of the model, as it is now. Names of tied tensors may be left out.

        Raises:
            RuntimeError: a tensor of another name, or with other values.
        """
        own = self._list_tensors(tied=True)
        # torch saves the weights of a checkpointed module without the name of its wrapper.
        own |= {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in own.items()}
        tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
        other = sorted(tensors.keys() - own.keys())
        if other:
            raise RuntimeError(
                f"'{other[0]}' of the state dict is neither a parameter nor a buffer, so no release"
                " made it; remove the hook that adds it"
            )
        expected = digest_tensors({name: own[name] for name in tensors})
        found = digest_tensors(tensors)
        changed = sorted(name for name in found if found[name] != expected[name])
        if changed:
            raise RuntimeError(
                f"'{changed[0]}' of the state dict is not the tensor of the model, so no release"
                " made it; remove the hook that replaces it"
            )

    @property
    def unprotected_figures(self) -> dict[str, str]:
        """Return what a card has to say about weights that other code wrote."""
        count = len(self.accepted)
        if not count:
            return {}
        where = ", ".join(map(str, self.accepted[:3]))
        if count > 3:
            where += f" and {count - 3} later ones, the last of them {self.accepted[-1]}"
        return {
            "weights that other code has written": f"accepted by accept_weights() after release "
            f"{where}: ε covers them only if they were made from released weights alone"
        }

    def _list_tensors(self, *, buffers: bool = True, tied: bool = False) -> dict[str, Tensor]:
        """Return parameters and saved buffers by name; tied ones once, unless asked for."""
        # An evaluation may have left the model gathered.
        reshard(self.model)
        parameters = self.model.named_parameters(remove_duplicate=not tied)
        tensors: dict[str, Tensor] = {name: p for name, p in parameters if name not in self._aside}
        if not buffers:
            return tensors
        for path, module in self.model.named_modules(remove_duplicate=not tied):
            prefix = f"{path}." if path else ""
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    tensors[prefix + name] = buffer
        return tensors


def _find_places(parameters: NamedTensors) -> dict[str, tuple[int, int] | None]:
    """Return address and count of writes of each parameter; None where torch does not count."""
    places: dict[str, tuple[int, int] | None] = {}
    for name, x in parameters.items():
        is_plain = x.layout == torch.strided and not x.is_inference()
        is_plain = is_plain and not is_traceable_wrapper_subclass(x)
        places[name] = (x.data_ptr(), x._version) if is_plain else None
    return places


# --------------------------------------------------------------------------------------------------
# The weights that the releases of a ledger have made, remembered in a file next to it.

_FORMAT = 1


def record_weights(
    ledger: Ledger, weights: ReleasedWeights, average: Mapping[str, Any] | None = None
) -> None:
    """Write the digests of a model next to its ledger; do nothing for a ledger in memory.

    Args:
        ledger: open, at the release that made the weights.
        weights: of the model.
        average: the state dict with the average of the weights.

    Raises:
        RuntimeError: something else than a release has written a parameter.
        CheckpointError: the disk cannot take it.
    """
    weights.check_parameters()
    if ledger.place is None:
        return
    record = WeightsRecord(
        ledger=ledger.id,
        releases=ledger.count,
        head=ledger.head,
        weights=digest_for_files(weights.model.state_dict()),
        average=digest_for_files(average or {}),
        accepted=weights.accepted,
    )
    write_weights_record(ledger.place, record)


def check_recorded_weights(ledger: Ledger, model: nn.Module) -> None:
    """Check that a model holds the weights that were recorded after the last release of a ledger.

    Raises:
        LedgerError: it holds others, or none were recorded.
        CheckpointError: the record is damaged.
    """
    record = None if ledger.place is None else read_weights_record(ledger.place)
    if (
        record is None
        or record.head != ledger.head
        or not record.describes(digest_for_files(model.state_dict()))
    ):
        raise LedgerError(
            f"the model does not hold the weights of {ledger.name}: restore its checkpoint, or load"
            " the weights that it released last"
        )
