"""Torch's SGD and AdamW without `torch.compile`, whose import takes as long as torch's own.

Torch marks methods of its optimizers as not to be compiled, and the first call of each mark imports
the compiler. These classes call the functions below the marks.
"""

from __future__ import annotations

from inspect import unwrap

import torch
from torch.optim import Optimizer


class _Unmarked(Optimizer):
    """What all optimizers of torch have in common, without the marks."""

    add_param_group = unwrap(Optimizer.add_param_group)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    state_dict = unwrap(Optimizer.state_dict)
    zero_grad = unwrap(Optimizer.zero_grad)


class SGD(_Unmarked, torch.optim.SGD):
    """Take the steps of `torch.optim.SGD`."""

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


class AdamW(_Unmarked, torch.optim.AdamW):
    """Take the steps of `torch.optim.AdamW`."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
