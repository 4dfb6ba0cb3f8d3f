"""Inside a process that will be killed: places where it dies, the witness of its releases, and
planted faults.
"""

import hashlib
import os
import random
import resource
import signal
import struct
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import safetensors.torch as tensor_files
import torch

from dpkfc import checkpoint, resume_checks
from dpkfc.privacy import mechanism
from dpkfc.privacy.ledger import Ledger
from dpkfc.session import Session

LIMIT_S = 120


class Aim:
    """Counts how often each place is reached and kills the process at one of them."""

    def __init__(self, place=None, number=0):
        self.place, self.number, self.counts = place, number, Counter[str]()

    def hits(self, place):
        self.counts[place] += 1
        return place == self.place and self.counts[place] == self.number

    def reached(self, place):
        if self.hits(place):
            die()


@contextmanager
def full_disk(cap):
    """No file grows beyond a size: the kernel takes what fits of a write and refuses the next
    one.
    """
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (cap, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LIMIT_S)


def hook_function(aim, site, real, torn=None):
    """The function with a place before it, one after it and, where it writes, one in its middle."""

    def call(*args, **kwargs):
        aim.reached(f"before {site}")
        if torn is not None and aim.hits(f"in the middle of {site}"):
            torn(real, *args, **kwargs)
            die()
        result = real(*args, **kwargs)
        aim.reached(f"after {site}")
        return result

    return call


def _half_write(real, descriptor, data):
    real(descriptor, data[: random.randrange(1, max(2, len(data)))])


def _half_file(position):
    def write_torn(real, *args, **kwargs):
        real(*args, **kwargs)
        os.truncate(args[position], random.randrange(os.path.getsize(args[position])))

    return write_torn


@dataclass(frozen=True)
class Place:
    """Where one scenario lies: the run folder and, beside it, what only the driver knows."""

    root: Path
    name: str

    @property
    def folder(self):
        return self.root / self.name

    @property
    def ledger(self):
        return self.folder / "ledger.jsonl"

    def __getattr__(self, name):
        if name in ("witness", "synced", "seen", "errors", "notes"):
            return self.root / f"{self.name}.{name}"
        raise AttributeError(name)


def instrument(aim, place, mutant):
    """Put places and the witness into this process; it ends soon, so nothing is put back."""
    write, fsync = os.write, os.fsync
    flags = os.O_WRONLY | os.O_CREAT
    witness = os.open(place.witness, flags | os.O_APPEND)
    synced, seen = os.open(place.synced, flags), os.open(place.seen, flags | os.O_APPEND)
    release = mechanism.gaussian_release

    def release_before_witness(*args, **kwargs):
        write(witness, b"r")
        aim.reached("between charge and noise")
        result = release(*args, **kwargs)
        digest = hashlib.sha256(b"".join(x.numpy().tobytes() for x in result.values())).digest()
        write(seen, digest)
        aim.reached("between noise and update")
        return result

    def noted_sync(descriptor):
        fsync(descriptor)
        mine = os.fstat(descriptor)
        with suppress(OSError):
            if os.path.samestat(mine, os.stat(place.ledger)):
                os.pwrite(synced, struct.pack("<q", mine.st_size), 0)

    mechanism.gaussian_release = release_before_witness
    os.write = hook_function(aim, "a write to the ledger", write, _half_write)
    os.fsync = hook_function(aim, "a sync", noted_sync)
    for name in ("ftruncate", "rename", "replace", "unlink", "rmdir", "mkdir"):
        setattr(os, name, hook_function(aim, name, getattr(os, name)))
    kept = hook_function(aim, "tensors of a checkpoint", tensor_files.save_file, _half_file(1))
    delivered = hook_function(aim, "the released model", tensor_files.save_file, _half_file(1))

    def save_file(tensors, path, **header):
        (delivered if header else kept)(tensors, path, **header)

    tensor_files.save_file = save_file
    pq.write_table = hook_function(aim, "metrics", pq.write_table, _half_file(1))
    Path.write_text = hook_function(aim, "a text", Path.write_text, _half_file(0))  # type: ignore[method-assign]
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam):
        kind.step = hook_function(aim, "an update", kind.step)  # type: ignore[method-assign]
    MUTANTS[mutant]()


def _charge_late():
    """Mutant: the accountant is saved with the checkpoint, as in many training scripts."""
    append, save, late = Ledger._append, checkpoint.write, []

    def flush(*args):
        while late:
            append(*late.pop(0))
        save(*args)

    Ledger._append = lambda self, line: late.append((self, line))  # type: ignore[method-assign]
    checkpoint.write = flush


def _forget_momentum():
    """Mutant: a resumed run begins with a new optimizer."""
    resume_checks.load_optimizer = lambda optimizer, state: None


MUTANTS = {
    "": lambda: None,
    "late": _charge_late,
    "forgetful": _forget_momentum,
}


def note_weights(passed):
    """Keep the digest of the weights after every step."""
    step = Session.step

    def step_and_note(self, *args):
        record = step(self, *args)
        passed.append(digest_of(self.model.state_dict()))
        return record

    Session.step = step_and_note  # type: ignore[method-assign]


def digest_of(tensors):
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
