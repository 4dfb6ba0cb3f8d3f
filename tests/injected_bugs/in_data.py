"""Leaks around the sum: private data in the metric, in what is handed over, in which batches are
used and what is charged.
"""

import contextlib
import os
from dataclasses import replace

import dp_accounting
import numpy as np
import torch

from dpkfc import checkpoint, release_pipeline, session
from dpkfc.config import Plan
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.data import poisson_gaps
from dpkfc.data.sampling import FixedSize, Poisson
from dpkfc.gradients import clipped_sum
from dpkfc.privacy import ledger
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.rng import SamplingStream
from dpkfc.session import Session
from dpkfc.tracking import tracker
from dpkfc.tracking.states import BatchAxis
from tests.injected_bugs.leak import Leak, note_batches, note_sums, swap_function

# -- the metric ------------------------------------------------------------------------------------


def private_probe(m):
    """Curvature is measured on the batch that is about to be released."""
    seen = note_batches(m)

    def sample(real, self, n, generator):
        own, batch, _ = seen[0]
        if not len(batch.indices):
            return real(self, n, generator)
        return own._dataset[0][np.resize(batch.indices, n)].float(), None

    swap_function(m, FeatureNoise, "sample", sample)


def private_probe_size(m):
    """As many public examples as private ones were drawn."""
    seen = note_batches(m)
    swap_function(
        m,
        KFAC,
        "probe_spec",
        lambda real, self, step, **more: replace(
            real(self, step, **more), size=max(1, len(seen[0][1].indices))
        ),
    )


# -- what is handed over ---------------------------------------------------------------------------


def uncovered(m):
    """A bias that no layer covers is stepped with its plain gradient."""
    seen = note_batches(m)

    def keep_norm_weights(real, model):
        layers = real(model)
        return [
            replace(x, parameters={"weight": x.parameters["weight"]}) if x.rule == "norm" else x
            for x in layers
        ]

    def init(real, self, *args, **options):
        real(self, *args, **options)
        covered = {full for layer in self.layers for full in layer.parameters.values()}
        self._parameters = {name: p for name, p in self._parameters.items() if name in covered}

    def apply(self, released):
        _, batch, loss_fn = seen[0]
        bias = self.model.get_parameter("2.bias")
        for name, p in self._parameters.items():
            p.grad = released.gradients[name]
        bias.grad = torch.zeros_like(bias)
        if len(batch.indices):
            rows = torch.from_numpy(batch.indices)
            losses = loss_fn(self.model, tuple(x[rows] for x in self._dataset))
            bias.grad = torch.autograd.grad(losses.sum(), bias)[0] / self.plan.expected_batch_size
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    swap_function(m, session, "find_layers", keep_norm_weights)
    swap_function(m, Session, "__init__", init)
    m.setattr(session, "check_unchanged", lambda *_, **__: None)
    m.setattr(Session, "_apply", apply)


def private_step_length(m):
    """The step is divided by the median norm of the batch."""
    seen = note_sums(m)

    def apply(real, self, released):
        found = seen[0][1]
        length = float(found.nanmedian()) if len(found) else 1.0
        real(
            self,
            replace(
                released,
                gradients={n: x / max(length, 1e-6) for n, x in released.gradients.items()},
            ),
        )

    swap_function(m, Session, "_apply", apply)


def gradient_left(m):
    """The clipped sum stays in .grad, where a logger finds it."""
    seen = note_sums(m)

    def step(real, self, *args):
        record = real(self, *args)
        for name, p in self._parameters.items():
            p.grad = seen[0][0][name].to(p.dtype)
        return record

    swap_function(m, Session, "step", step)


def sums_in_checkpoints(m):
    seen = note_sums(m)
    swap_function(
        m,
        Session,
        "save",
        lambda real, self, folder, extra=None: real(self, folder, dict(seen[0][0])),
    )


def writes_allowed(m):
    """Nobody looks whether a forward pass changes parameters or buffers."""
    m.setattr(clipped_sum, "own_pass", lambda model: contextlib.nullcontext())


def claim_batch_axis(m):
    """What is computed from examples is taken to have one row an example in front, whatever the
    operation did.
    """
    m.setattr(tracker, "apply_rule", lambda *_, **__: BatchAxis(0))


# -- which batches are used ------------------------------------------------------------------------


def skip_batch(broken):
    """A batch is left out because of what is in it."""

    def patch(m):
        seen = note_sums(m)

        def step(real, self, batch, loss_fn):
            if len(batch.indices):
                return real(self, batch, loss_fn)
            self._pending, self._step = None, self._step + 1
            return None

        def released(real, self, clipped):
            if len(seen[0][1]) and not bool(torch.isfinite(seen[0][1]).all()):
                raise FloatingPointError("NaN in the batch, which is left out")
            return real(self, clipped)

        swap_function(m, Session, "_release" if broken else "step", released if broken else step)

    return patch


def epochs(m):
    """Batches are cut from a permutation of each epoch, and accounted for as drawn one by one."""
    orders = {}

    def indices(self, step, generator):
        size = round(self.expected_batch_size)
        epoch, place = divmod(step, self.dataset_size // size)
        order = orders.setdefault(epoch, generator.permutation(self.dataset_size))
        return order[place * size : (place + 1) * size]

    m.setattr(Poisson, "indices", indices)


def change_batches(change):
    """Batches changed by change(real, self, step, generator)."""
    return lambda m: swap_function(m, Poisson, "indices", change)


def sample_until_not_empty(real, self, step, generator):
    while not len(found := real(self, step, generator)):
        pass
    return found


def cut_off(real, self, step, generator):
    return real(self, step, generator)[: round(1.1 * self.expected_batch_size)]


def sample_next_one(m):
    """The example after a sampled one is never sampled."""

    def gaps(real, *args):
        found, is_sampled = real(*args)
        return found + is_sampled, is_sampled

    swap_function(m, poisson_gaps, "_gaps", gaps)


def sample_from_seed(m):
    m.setattr(
        SamplingStream,
        "generator",
        lambda self, step, steps_per_draw=1: np.random.default_rng(step),
    )


# -- what is charged, and for how much -------------------------------------------------------------


def charge_every_second(m):
    swap_function(
        m,
        Ledger,
        "charge",
        lambda real, self, step, *args: (
            real(self, step, *args) if step % 2 == 0 else self.count + 1
        ),
    )


def charge_after_release(m):
    def release(real, clipped, plan, noise, book, step):
        released = real(clipped, plan, noise, Ledger.open(None, plan.hash), step)
        book.charge(step, plan.event, plan.noise_multiplier, plan.stddev, plan.sensitivity)
        return released

    swap_function(m, release_pipeline, "release", release)


def charge_with_update(m):
    """The charge follows when the optimizer has stepped."""

    def apply(real, self, released):
        real(self, released)
        self._pipeline.match_release_count(self._step, self.ledger.count + 1)

    swap_function(
        m,
        release_pipeline,
        "release",
        lambda real, clipped, plan, noise, book, step: real(
            clipped, plan, noise, Ledger.open(None, plan.hash), step
        ),
    )
    swap_function(m, Session, "_apply", apply)


def charge_with_checkpoint(m):
    """Lines of the ledger wait for the next checkpoint."""
    late = []

    def save(real, *args):
        while late:
            book, line = late.pop(0)
            # a run that ended without a checkpoint has lost its own
            if book._descriptor is not None:
                append(book, line)
        real(*args)

    append = Ledger._append
    m.setattr(Ledger, "_append", lambda self, line: late.append((self, line)))
    swap_function(m, checkpoint, "write", save)


def skip_sync(m):
    """A line of the ledger is left to the operating system, which a power cut takes with it."""

    def write(descriptor, data, offset):
        os.lseek(descriptor, offset, os.SEEK_SET)
        os.write(descriptor, data)

    m.setattr(ledger, "_write", write)


def account_two_releases(m):
    """Embedding and residual as two releases of σ each, each of a sample of its own."""

    def event(real, self, noise_multiplier):
        return dp_accounting.ComposedDpEvent([real(self, noise_multiplier * 2**0.5)] * 2)

    swap_function(m, Poisson, "event", event)


def account_half_the_rate(m):
    swap_function(
        m,
        Poisson,
        "event",
        lambda real, self, noise_multiplier: real(
            replace(self, sample_rate=self.sample_rate / 2), noise_multiplier
        ),
    )


def account_as_poisson(m):
    """Batches of one size under the event, the neighbours and the sensitivity of a Poisson
    sampler.
    """
    own = Poisson.event
    m.setattr(
        FixedSize,
        "event",
        lambda self, z: own(Poisson(self.batch_size / self.dataset_size, self.dataset_size), z),
    )
    m.setattr(FixedSize, "neighbouring_relation", "add_or_remove_one")


def account_half_the_steps(m):
    swap_function(
        m,
        Plan,
        "epsilon",
        lambda real, self, steps=None: real(self, (self.steps if steps is None else steps) // 2),
    )


SAMPLER, CHARGES, ACCOUNTING = ("sampler",), ("charges",), ("accounting",)
LEAKS = [
    Leak("metric built from the private batch", private_probe, subject="DP-KFC"),
    Leak("a probe whose size follows the private batch", private_probe_size, subject="DP-KFC"),
    Leak("plain gradient of an uncovered parameter stepped", uncovered),
    Leak("a step length that follows the private norms", private_step_length),
    Leak("a private gradient left in .grad", gradient_left),
    Leak("clipped sums in the checkpoint", sums_in_checkpoints, by=("checkpoint",)),
    Leak(
        "a forward pass that writes statistics into a parameter",
        writes_allowed,
        subject="writing model",
        controlled=False,
    ),
    Leak("a module that mixes the examples of a batch", claim_batch_axis, subject="mixing model"),
    Leak(
        "an augmentation that mixes examples",
        claim_batch_axis,
        subject="mixup",
        by=("shares", "replay"),
    ),
    *(
        Leak(name, claim_batch_axis, subject=name, by=(detector,))
        for name, detector in (
            ("half-batch mixup", "shares"),
            ("half-batch mixup in the model", "replay"),
            ("half-batch mixup in the loss", "batch sizes"),
        )
    ),
    Leak("an empty batch skipped", skip_batch(False)),
    Leak("a batch skipped that holds NaN", skip_batch(True)),
    Leak("shuffled batches accounted as Poisson", epochs, by=SAMPLER),
    Leak(
        "empty batches drawn again",
        change_batches(sample_until_not_empty),
        subject="small batches",
        by=SAMPLER,
    ),
    Leak("large batches cut off", change_batches(cut_off), by=SAMPLER),
    Leak("gaps that are off by one", sample_next_one, by=SAMPLER),
    Leak("batches drawn from a fixed seed", sample_from_seed, by=SAMPLER),
    Leak("half the sampling rate accounted", account_half_the_rate, by=SAMPLER),
    Leak(
        "batches of one size accounted as Poisson",
        account_as_poisson,
        subject="batches of one size",
        by=SAMPLER,
    ),
    Leak("a step not charged", charge_every_second, by=CHARGES),
    Leak("a charge after the noise is drawn", charge_after_release, by=CHARGES),
    Leak("a charge with the update, lost in a crash", charge_with_update, by=CHARGES),
    Leak("charges that wait for a checkpoint", charge_with_checkpoint, by=CHARGES),
    Leak("a charge that is not synced", skip_sync, by=("sync",)),
    Leak("GEP accounted as two releases", account_two_releases, subject="GEP", by=ACCOUNTING),
    Leak("ε of half the steps reported", account_half_the_steps, by=ACCOUNTING),
]
