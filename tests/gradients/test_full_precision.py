"""Norms and sums are in full float32 whatever the user has set, and the user's settings are back
afterwards.
"""

from contextlib import suppress

import pytest
import torch

from dpkfc.gradients.full_precision import full_precision

backends = torch.backends
pytestmark = pytest.mark.skipif(
    not hasattr(backends.cuda.matmul, "fp32_precision"), reason="torch has one set of switches"
)


def _operations():
    held = {
        "cuda.matmul": backends.cuda.matmul,
        "cudnn.conv": backends.cudnn.conv,
        "cudnn.rnn": backends.cudnn.rnn,
    }
    return held | {
        f"mkldnn.{name}": getattr(backends.mkldnn, name) for name in ("matmul", "conv", "rnn")
    }


def _state():
    state = {name: x.fp32_precision for name, x in _operations().items()}
    old = {
        "float32": torch.get_float32_matmul_precision,
        "cudnn": lambda: backends.cudnn.allow_tf32,
        "cuda": lambda: backends.cuda.matmul.allow_tf32,
    }
    for name, read in old.items():
        # torch refuses to read the older switches of a state that the newer ones made
        try:
            state[name] = read()
        except RuntimeError:
            state[name] = "unreadable"
    return state


@pytest.fixture(autouse=True)
def _as_before():
    held, old, tops = (
        _state(),
        torch.get_float32_matmul_precision(),
        (backends, backends.cudnn, backends.mkldnn),
    )
    before = [x.fp32_precision for x in tops]
    yield
    for x, value in zip(tops, before, strict=True):
        x.fp32_precision = value
    for x in _operations().values():
        x.fp32_precision = "none"
    torch.set_float32_matmul_precision(old)
    with suppress(RuntimeError):
        backends.cudnn.allow_tf32 = held["cudnn"]
    for name, x in _operations().items():
        x.fp32_precision = held[name]
    assert _state() == held


def _new(path, value):
    owner = backends
    for name in path.split(".") if path else ():
        owner = getattr(owner, name)
    return lambda: setattr(owner, "fp32_precision", value)


@pytest.mark.parametrize(
    "choose",
    [
        lambda: None,
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
        lambda: setattr(backends.cudnn, "allow_tf32", False),
        _new("cuda.matmul", "tf32"),
        _new("mkldnn.matmul", "bf16"),
        _new("mkldnn.conv", "bf16"),
        _new("cudnn.conv", "ieee"),
        _new("mkldnn", "bf16"),
        _new("", "tf32"),
    ],
    ids=[
        "nothing",
        "high",
        "medium",
        "tf32 as of old",
        "no tf32 as of old",
        "tf32",
        "bf16",
        "bf16 conv",
        "ieee conv",
        "mkldnn",
        "all",
    ],
)
def test_every_switch_is_off_inside_and_back_afterwards(choose):
    choose()
    before = _state()
    with full_precision():
        assert {x.fp32_precision for x in _operations().values()} == {"ieee"}
        assert not torch.is_autocast_enabled("cpu")
    assert _state() == before
    with pytest.raises(ZeroDivisionError), full_precision():
        raise ZeroDivisionError
    assert _state() == before


def test_a_later_choice_of_the_user_still_reaches_every_operation():
    backends.fp32_precision = "tf32"
    with full_precision():
        pass
    backends.fp32_precision = "ieee"
    assert {x.fp32_precision for x in _operations().values()} == {"ieee"}
