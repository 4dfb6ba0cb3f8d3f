"""The audit of a step with few canaries and little noise, for tests of what is around it."""

from functools import partial

from dpkfc.audit import changes, noise_tests, replay, sampler_tests, step
from tests.injected_bugs.subjects import select

CANARIES = ("as it is", "loss × 1e4", "loss × -1e4", "NaN", "stretched")


def make_audit_quick(patched):
    """Leave every check in place, with a few canaries, batches and releases each."""
    make_statistics_quick(patched)
    prepare = step.prepare_canaries
    for module in (changes, replay):
        patched.setattr(module, "SIZES", (0, 2))
    patched.setattr(step, "prepare_canaries", lambda subject: select(prepare(subject), *CANARIES))


def make_statistics_quick(patched):
    """Leave every check and canary in place, and sample less noise and fewer batches."""
    noise, run, sizes = step.check_noise, step.check_run_noise, step.check_batch_sizes
    patched.setattr(noise_tests, "NUMBERS", 100_000)
    patched.setattr(sampler_tests, "INCLUSIONS", 1e6)
    patched.setattr(step, "check_noise", partial(noise, steps=24))
    patched.setattr(step, "check_run_noise", partial(run, numbers=60_000))
    patched.setattr(step, "check_batch_sizes", partial(sizes, sizes=(12, 130)))
