"""The contenders of the speed benchmark: each takes one whole training step, from drawing a batch
to the updated model.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models import Case

warnings.filterwarnings("ignore", "Full backward hook is firing")  # Opacus, on every first layer

LR, CLIP, NOISE, DELTA, EVERY = 1e-3, 1.0, 1.0, 1e-6, 50
STEPS = 1_000_000  # the plan is never exhausted


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all contenders of one model share; without `copies` the only one takes the model itself,
    so that it is held once.
    """

    case: Case
    model: nn.Module
    data: tuple[Tensor, Tensor]
    folder: Path
    device: str = "cpu"
    copies: bool = True

    @property
    def size(self) -> int:
        return len(self.data[1])

    def fresh(self, make: Any = torch.optim.SGD) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A copy of the model at the same weights and an optimizer over it."""
        model = (copy.deepcopy(self.model) if self.copies else self.model).to(self.device).train()
        return model, make([p for p in model.parameters() if p.requires_grad], lr=LR)

    def draw(self, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Exactly B distinct examples, drawn and gathered as the session's fixed-size sampler
        does.
        """
        chosen = np.sort(
            generator.choice(self.size, size=self.case.batch_size, replace=False, shuffle=False)
        )
        rows = torch.from_numpy(chosen)
        return self.data[0][rows].to(self.device), self.data[1][rows].to(self.device)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One step, and what a reader should know.

    `refresh` rebuilds the preconditioner on top of the last step's, or with `first=True` as
    the first step does; `built_at` names the last time.
    """

    step: Callable[[], None]
    note: str = ""
    refresh: Callable[[], Any] | None = None
    built_at: Callable[[], Any] = lambda: None
    close: Callable[[], None] = lambda: None


def plain(setting: Setting) -> Contender:
    """Plain SGD on the mean loss."""
    model, optimizer = setting.fresh()
    generator = np.random.default_rng()

    def step() -> None:
        x, y = setting.draw(generator)
        for part in setting.case.parts(x, y):
            (setting.case.losses(model, *part).sum() / (len(y) * setting.case.views)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step=step)


def by_hand(setting: Setting) -> Contender:
    """DP-SGD without proof, checks, secure noise or ledger: what the passes themselves cost."""
    from written_by_hand import HandWritten

    if setting.case.views > 1:
        raise ValueError("several views of an example are one gradient each to it")
    model, optimizer = setting.fresh()
    private = HandWritten(model, CLIP, NOISE)
    generator = np.random.default_rng()

    def step() -> None:
        x, y = setting.draw(generator)
        private.backward(lambda model: setting.case.losses(model, x, y))
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step=step)


def open_session(
    setting: Setting, make: Any = torch.optim.SGD, ledger: str = "", **settings: Any
) -> tuple[Any, Callable[[], None]]:
    """Return a session of this project and its step.

    Args:
        setting: of the model.
        make: the class of the optimizer.
        ledger: name of its file; empty keeps it in memory.
        settings: of `PrivacyConfig`, and of `Session` those that choose how passes run.
    """
    from dpkfc.config import PrivacyConfig
    from dpkfc.session import Session

    ways = ("augment", "capture_graphs", "compile")
    options = {name: settings.pop(name) for name in ways if name in settings}
    if ledger:
        options["ledger_path"] = setting.folder / f"{ledger}.jsonl"
    sizes = {"expected_batch_size": setting.case.batch_size, "steps": STEPS, "max_grad_norm": CLIP}
    config = PrivacyConfig(**{**sizes, "sampler": "fixed", **settings})
    plan = config.with_noise(NOISE, DELTA, setting.size)
    session = Session(plan, *setting.fresh(make), setting.data, **options)
    batches, case = session.batches(), setting.case

    # The loss reaches no other model, as a user's does not: what it reaches is looked at.
    def step() -> None:
        session.step(next(batches), lambda model, batch: case.losses(model, *batch))

    return session, step


def session_with(
    setting: Setting,
    name: str,
    preconditioner: Any,
    *,
    captures: bool = False,
    compiles: bool = False,
) -> Contender:
    """A session of this project with a preconditioner, ledger on disk.

    `captures`: its passes are captured as graphs; `compiles`: which inductor compiles.
    """
    from dpkfc.gradients.layer_contributions import capture
    from dpkfc.preconditioning import refresh_microbatch_size

    session, step = open_session(
        setting,
        ledger=name,
        preconditioner=preconditioner,
        augmentations=setting.case.views,
        max_physical_batch_size=setting.case.micro_batch,
        augment=setting.case.augment,
        capture_graphs=captures,
        compile=compiles,
    )

    def refresh(*, first: bool = False) -> Any:
        rules = {layer.name: layer.rule for layer in session.layers}
        # As many examples at once as the session's own refresh.
        most = session.plan.config.refresh_rows().most
        rows = refresh_microbatch_size(preconditioner, most, first=first)
        of = replace(preconditioner, chunk=rows or preconditioner.chunk)
        more = {} if first or not of.uses_previous_state else {"previous": session.preconditioner}
        return of.build(
            session.model, lambda m, loss: capture(m, session.layers, loss), 0, rules=rules, **more
        )

    return Contender(
        step=step,
        refresh=None if preconditioner is None else refresh,
        built_at=lambda: session.preconditioner and session.preconditioner.step,
        close=session.close,
    )


def dp_sgd(setting: Setting) -> Contender:
    """This project's DP-SGD, ledger on disk."""
    return session_with(setting, "dp_sgd", None)


def dp_sgd_graph(setting: Setting) -> Contender:
    """This project's DP-SGD with captured graphs, ledger on disk."""
    return session_with(setting, "dp_sgd_graph", None, captures=True)


def dp_sgd_compiled(setting: Setting) -> Contender:
    """This project's DP-SGD with compiled graphs, ledger on disk."""
    return session_with(setting, "dp_sgd_compiled", None, compiles=True)


def _kfac(setting: Setting, sides: str) -> Any:
    """K-FAC on the model's probe, else at its defaults."""
    from dpkfc.curvature import KFAC

    return KFAC(
        probe=setting.case.probe(), probe_size=setting.case.probe_size, every=EVERY, sides=sides
    )


def dp_kfc_inputs(setting: Setting) -> Contender:
    """This project's DP-KFC as it is by default, inputs whitened; ledger on disk."""
    return session_with(setting, "dp_kfc_inputs", _kfac(setting, "input"))


def dp_kfc(setting: Setting) -> Contender:
    """This project's DP-KFC with both sides, as in the paper; ledger on disk."""
    return session_with(setting, "dp_kfc", _kfac(setting, "both"))


def _opacus(setting: Setting, mode: str) -> tuple[nn.Module, Any, Any]:
    """(model, optimizer, criterion) from Opacus' engine; batches are drawn by `Setting.draw` for
    all contenders alike.
    """
    if setting.case.language_model:
        raise ValueError("the mean over positions is not a per-example loss to Opacus' criterion")
    if setting.case.views > 1:
        raise ValueError("several views of an example are one gradient each to Opacus")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        model, optimizer = setting.fresh()
        loader = DataLoader(
            TensorDataset(*setting.data), batch_size=setting.case.batch_size, drop_last=True
        )
        criterion = nn.CrossEntropyLoss()
        made = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=criterion,
            noise_multiplier=NOISE,
            max_grad_norm=CLIP,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
    made[1].expected_batch_size = setting.case.batch_size
    return made[0], made[1], made[2] if mode == "ghost" else criterion


def opacus_hooks(setting: Setting) -> Contender:
    """Opacus DP-SGD on materialised per-example gradients (grad_sample_mode="hooks")."""
    model, optimizer, criterion = _opacus(setting, "hooks")
    return Contender(step=_opacus_step(setting, model, optimizer, criterion))


def opacus_ghost(setting: Setting) -> Contender:
    """Opacus DP-SGD with ghost clipping: norms first, then a second backward pass."""
    model, optimizer, criterion = _opacus(setting, "ghost")
    owners = [
        m
        for m in model._module.modules()
        if any(p.requires_grad for p in m.parameters(recurse=False))
    ]
    formed = sorted({type(m).__name__ for m in owners if type(m) not in model.NORM_SAMPLERS})
    note = (
        "fast gradient clipping (one layer's per-example gradients at a time) for"
        f" {', '.join(formed)}"
        if formed
        else ""
    )
    return Contender(step=_opacus_step(setting, model, optimizer, criterion), note=note)


def _opacus_step(
    setting: Setting,
    model: nn.Module,
    optimizer: Any,
    criterion: Any,
    between: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    generator = np.random.default_rng()

    def step() -> None:
        x, y = setting.draw(generator)
        optimizer.zero_grad()
        criterion(setting.case.logits(model, x), y).backward()
        between()
        optimizer.step()

    return step


def opake(setting: Setting, microbatch: int | None = None) -> Contender:
    """DP-SGD of opake: gradients of single examples by `vmap`, noise of a seeded generator."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.random import key

    model, optimizer = setting.fresh()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss_fn(values: Any, x: Tensor, y: Tensor) -> Tensor:
        def call(*arguments: Any, **more: Any) -> Any:
            return torch.func.functional_call(model, values, arguments, more)

        losses = setting.case.losses(call, x.unsqueeze(0), y.unsqueeze(0))
        return losses.squeeze(0)

    gradient, clip_state = clipped_grad(
        loss_fn, batch_argnums=(1, 2), clipping_norm=CLIP, microbatch_size=microbatch
    )
    add_noise, noise_state = gaussian_noise(noise_multiplier=NOISE, key=key(0))
    generator = np.random.default_rng()

    def step() -> None:
        nonlocal clip_state, noise_state
        x, y = setting.draw(generator)
        values = {name: p.detach() for name, p in parameters.items()}
        total, clip_state = gradient(values, x, y, state=clip_state)
        noisy, noise_state = add_noise(total, noise_state)
        for name, p in parameters.items():
            p.grad = noisy.pytree[name] / len(y)
        optimizer.step()

    return Contender(step=step)


def materialised(setting: Setting) -> Contender:
    """DP-KFC as it is usually written: Opacus' per-example gradients, each multiplied by both roots
    before the clip.
    """
    from dpkfc.gradients.discovery import find_layers
    from dpkfc.gradients.layer_contributions import capture

    layers = find_layers(setting.model)
    built = _kfac(setting, "both").build(setting.model, lambda m, loss: capture(m, layers, loss), 0)
    model, optimizer, criterion = _opacus(setting, "hooks")
    modules = dict(model._module.named_modules())
    roots = {}
    for layer in layers:
        if layer.rule in ("linear", "conv") and layer.name in built.metric:
            entry = built.metric[layer.name]
            d_out, d_in = layer.tensor("weight").flatten(1).shape
            d_in += "bias" in layer.parameters
            sides = entry.output.apply(torch.eye(d_out)), entry.input.apply(torch.eye(d_in))
            roots[layer.name] = [side.to(setting.device) for side in sides]

    def whiten() -> None:
        for name, (u_out, u_in) in roots.items():
            module = modules[name]
            g = module.weight.grad_sample.flatten(2)
            if module.bias is not None:
                g = torch.cat([g, module.bias.grad_sample.unsqueeze(-1)], -1)
            g = torch.einsum("ij,njk->nik", u_out, g)
            g = torch.einsum("nik,kl->nil", g, u_in)
            if module.bias is not None:
                module.bias.grad_sample = g[..., -1].contiguous()
                g = g[..., :-1]
            module.weight.grad_sample = g.reshape(module.weight.grad_sample.shape)

    return Contender(
        step=_opacus_step(setting, model, optimizer, criterion, whiten),
        note="linear and conv layers only",
    )


CONTENDERS: dict[str, Callable[[Setting], Contender]] = {
    f.__name__: f
    for f in (
        plain,
        by_hand,
        dp_sgd,
        dp_sgd_graph,
        dp_sgd_compiled,
        dp_kfc_inputs,
        dp_kfc,
        opacus_hooks,
        opacus_ghost,
        opake,
        materialised,
    )
}


def setting_for(case: Case, folder: Path, device: str = "cpu", *, copies: bool = True) -> Setting:
    torch.manual_seed(0)
    size = max(1024, 4 * case.batch_size)
    return Setting(
        case=case,
        model=case.build(),
        data=case.data(size),
        folder=folder,
        device=device,
        copies=copies,
    )


def time_call(function: Callable[[], Any], device: str = "cpu") -> tuple[float, float]:
    """Seconds on the clock, until a card has done its work too, and seconds of processor time of
    all threads together.
    """
    waited = torch.cuda.synchronize if device != "cpu" else lambda: None
    waited()
    started, processor = time.perf_counter(), time.process_time()
    function()
    waited()
    return time.perf_counter() - started, time.process_time() - processor
