"""Methods combined through a session: each step against brute force, resumed to the bit, and wrong
ones refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dpkfc.gradients.discovery import find_layers
from dpkfc.postprocess import EMA, SOFIM, AdamBC, DiSK, LowPass, WeightEMA
from dpkfc.postprocess.pipeline import check_with_optimizer
from dpkfc.postprocess.protocol import PostProcess
from tests.gradients.whitened import whiten
from tests.mutation_cases import B, data, kfac, loss_fn, net, plan, session, weights

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
COMBINATIONS: dict[str, tuple[tuple[PostProcess, ...], type, dict]] = {
    "DP-KFC + DiSK + AdamBC": (
        (DiSK(0.5), AdamBC(floor=1e-4)),
        SGD,
        {"preconditioner": kfac(), "readout": "natural"},
    ),
    "DiSK + AdamW": ((DiSK(0.3, mode="storm", init="bias_corrected"),), ADAMW, {}),
    "low-pass + inverse": ((LowPass(),), ADAM, {"preconditioner": kfac(), "readout": "inverse"}),
    "EMA + SOFIM": (
        (EMA(0.5), SOFIM(direction="momentum", bias_correction=True, warmup=2)),
        SGD,
        {},
    ),
    "low-pass + DiSK": (
        (LowPass.first_order(0.5), DiSK(0.5)),
        SGD,
        {"weight_average": WeightEMA(0.9)},
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_train_and_resume_to_the_bit(name: str, tmp_path: Path) -> None:
    steps, optimizer, settings = COMBINATIONS[name]
    p = plan(postprocess=steps, **settings)
    results = []
    for part, stop in (("whole", None), ("first", 3), ("second", None)):
        model = net()
        ledger = None if part == "whole" else tmp_path / "ledger.jsonl"
        with session(p, model, optimizer(model.parameters(), 0.05), ledger_path=ledger) as s:
            if part == "second":
                s.restore(tmp_path / "checkpoint")
            for done, batch in enumerate(s.batches(), 1):
                record = s.step(batch, loss_fn)
                if done == stop:
                    s.save(tmp_path / "checkpoint")
                    break
        results.append(weights(model).clone())
    assert torch.isfinite(results[0]).all() and not torch.equal(results[0], weights(net()))
    assert torch.equal(results[0], results[2])
    assert ("adam_bc/floor_fraction" in record.notes) == any(
        isinstance(step, AdamBC) for step in steps
    )


@pytest.mark.parametrize(
    ("disk", "optimizer"),
    [
        (DiSK(0.4, 0.5), SGD),
        (DiSK(0.6, mode="look_ahead"), ADAM),
        (DiSK(0.3, mode="storm"), ADAMW),
    ],
    ids=["two points", "look ahead", "storm"],
)
def test_dp_kfc_with_disk_equals_brute_force(disk: DiSK, optimizer: type) -> None:
    """Without noise: P (c g(θ + γ d) + (1 − c) g(θ)), clipped once, averaged, stepped; the metric
    is rebuilt on the way.
    """
    p = plan(0.0, preconditioner=kfac(), postprocess=[disk], max_grad_norm=0.4)
    model, theirs, (x, y) = net(), net(), data()
    reference, layers = optimizer(theirs.parameters(), 0.05), find_layers(theirs)
    average: dict[str, Tensor] = {}
    before: dict[str, Tensor] | None = None
    with session(p, model, optimizer(model.parameters(), 0.05)) as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
            own = {n: q.detach().clone() for n, q in theirs.named_parameters()}
            points = (
                [(0.0, 1.0)]
                if before is None
                else [(e.lookahead, e.weight) for e in disk.evaluations]
            )
            rows = []
            for i in batch.indices:
                row = {n: torch.zeros_like(q) for n, q in own.items()}
                for ahead, weight in points:
                    with torch.no_grad():
                        for n, q in theirs.named_parameters():
                            q.copy_(
                                own[n] if before is None else own[n] + ahead * (own[n] - before[n])
                            )
                    loss = loss_fn(theirs, (x[i : i + 1], y[i : i + 1])).sum()
                    for n, g in zip(
                        row, torch.autograd.grad(loss, list(theirs.parameters())), strict=True
                    ):
                        row[n] += weight * g
                z = {
                    k: v
                    for layer in layers
                    for k, v in whiten(layer, s.preconditioner.metric.get(layer.name), row).items()
                }
                length = float(torch.stack([v.square().sum() for v in z.values()]).sum().sqrt())
                rows.append({n: min(1.0, 0.4 / length) * v for n, v in z.items()})
            with torch.no_grad():
                for n, q in theirs.named_parameters():
                    q.copy_(own[n])
                    g = sum((row[n] for row in rows), torch.zeros_like(q)) / B
                    average[n] = (
                        g if before is None else (1 - disk.kappa) * average[n] + disk.kappa * g
                    )
                    q.grad = average[n].clone()
            reference.step()
            before = own
    torch.testing.assert_close(weights(model), weights(theirs), rtol=1e-7, atol=1e-9)


# -- what does not go together ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            [AdamBC(), AdamBC()],
            "AdamBC needs the variance of the noise, which is not known behind the adaptive step"
            " AdamBC",
        ),
        (
            [SOFIM(), AdamBC()],
            "AdamBC needs the variance of the noise.*behind the adaptive step SOFIM",
        ),
        ([DiSK(), LowPass(), AdamBC()], "not known behind two filters \\(DiSK and LowPass\\)"),
        (
            [AdamBC(), DiSK()],
            "the filter DiSK stands behind the adaptive step AdamBC; filters come first",
        ),
        ([AdamBC(), SOFIM()], "SOFIM would rescale what AdamBC has rescaled"),
        ([DiSK(), DiSK(0.2)], "only one step can decide where gradients are taken"),
        ([kfac()], "KFAC in postprocess.*preconditioner="),
        (
            [torch.optim.Adam([torch.zeros(1)])],
            "Adam in postprocess.*give a torch optimizer to the session",
        ),
    ],
    ids=str,
)
def test_steps_that_do_not_go_together_are_refused_when_the_config_is_made(
    steps: list, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        plan(postprocess=steps)


@pytest.mark.parametrize("filter_", [DiSK(), EMA(), LowPass(), AdamBC(), SOFIM()], ids=str)
def test_a_filter_is_no_preconditioner(filter_: PostProcess) -> None:
    with pytest.raises(
        ValueError, match=f"{type(filter_).__name__} acts on releases.*postprocess="
    ):
        plan(preconditioner=filter_)


@pytest.mark.parametrize("filter_", [DiSK, EMA, LowPass], ids=lambda kind: kind.__name__)
def test_momentum_on_a_filter_is_refused_unless_asked_for(filter_: type) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(
        ValueError, match=f"momentum on top of the filter {filter_.__name__}.*momentum_allowed=True"
    ):
        session(plan(postprocess=[filter_()]), model, optimizer)
    with session(plan(postprocess=[filter_(momentum_allowed=True)]), model, optimizer) as s:
        s.step(next(s.batches()), loss_fn)


OPTIMIZERS = {"Adam": {}, "RMSprop": {}, "Rprop": {}, "LBFGS": {}, "SGD": {"momentum": 0.9}}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("step", [AdamBC(), SOFIM()], ids=["AdamBC", "SOFIM"])
def test_nothing_but_plain_sgd_stands_behind_an_adaptive_step(step: PostProcess, name: str) -> None:
    model = net()
    with pytest.raises(
        ValueError,
        match=f"so {name} .*use torch.optim.SGD without momentum|LBFGS steps with a closure",
    ):
        session(
            plan(postprocess=[step]),
            model,
            getattr(torch.optim, name)(model.parameters(), lr=0.1, **OPTIMIZERS[name]),
        )
    check_with_optimizer([step], torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1))


def test_a_checkpoint_of_another_chain_is_refused(tmp_path: Path) -> None:
    from dpkfc.checkpoint import CheckpointError

    for steps in ([DiSK(0.5)], [DiSK(0.6)]):
        model = net()
        ledger = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        with session(
            plan(postprocess=steps),
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            ledger_path=ledger,
        ) as s:
            if steps[0].kappa == 0.6:
                with pytest.raises(CheckpointError, match="belongs to plan"):
                    s.restore(tmp_path / "checkpoint")
                break
            s.step(next(s.batches()), loss_fn)
            s.save(tmp_path / "checkpoint")
