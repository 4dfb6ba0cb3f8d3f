"""The average of the weights: its decay, its place in a session, and that a run never notices
it.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dpkfc.postprocess import DiSK, WeightEMA
from dpkfc.postprocess.weight_average import WeightAverage
from tests.mutation_cases import Handed, net, plan, session, weights
from tests.sessions import cross_entropy as loss_fn


def test_table_of_the_warm_up():
    table = {0: 0.1, 1: 0.1818, 9: 0.5263, 90: 0.91, 990: 0.991, 8990: 0.999}
    for t, mu in table.items():
        assert WeightEMA(0.9999).decay_at(t) == pytest.approx(mu, abs=5e-5)
    assert WeightEMA(0.999).decay_at(8990) == WeightEMA(0.999).decay_at(20_000) == 0.999
    assert WeightEMA(0.9999).decay_at(89_990) == pytest.approx(0.9999)
    assert (
        WeightEMA(0.999).decay_at(875)
        == WeightEMA(0.9999).decay_at(875)
        == pytest.approx(0.98983, abs=5e-6)
    )
    assert WeightEMA(0.9, warmup=False).decay_at(0) == 0.9


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_equals_its_recursion_and_training_is_untouched(warmup):
    plain, mine = net(), net()
    with session(plan(), plain) as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
    expected = weights(mine).clone()
    with session(plan(weight_average=WeightEMA(0.6, warmup)), mine) as s:
        for t, batch in enumerate(s.batches()):
            s.step(batch, loss_fn)
            mu = min(0.6, (1 + t) / (10 + t)) if warmup else 0.6
            expected = mu * expected + (1 - mu) * weights(mine)
            before = weights(mine).clone()
            with s.averaged_weights():
                assert_close(weights(mine), expected, rtol=1e-12, atol=1e-14)
            assert torch.equal(weights(mine), before)
    assert torch.equal(weights(mine), weights(plain))


def test_with_the_average_in_the_model_nothing_can_be_lost(tmp_path):
    """No step, no checkpoint, no second swap; and nothing is charged for trying."""
    with session(plan(weight_average=WeightEMA(0.5)), net()) as s:
        s.step(next(s.batches()), loss_fn)
        batch = next(s.batches())
        with s.averaged_weights():
            with pytest.raises(RuntimeError, match="averaged weights are in the model"):
                s.step(batch, loss_fn)
            with pytest.raises(RuntimeError, match="averaged weights are in the model"):
                s.save(tmp_path / "checkpoint")
            with (
                pytest.raises(RuntimeError, match="averaged weights are in the model"),
                s.averaged_weights(),
            ):
                pass
        assert s.steps_done == 1
        s.step(batch, loss_fn)
        assert s.steps_done == 2


def test_half_precision_weights_are_averaged_in_single_precision():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    average = WeightAverage(WeightEMA(0.999, warmup=False), {"w": p})
    average.start()
    with torch.no_grad():
        p.fill_(2.0)
    for _ in range(100):
        average.update()
    held = average.state_dict()["average.w"]
    assert held.dtype == torch.float32
    assert_close(held, torch.full((3,), 2 - 0.999**100), rtol=1e-4, atol=0)
    with average.swap_in():
        assert_close(p.float(), held, rtol=1e-2, atol=0)
    assert torch.equal(p, torch.full((3,), 2.0, dtype=torch.bfloat16))


def test_what_is_not_there_or_does_not_belong_is_refused_by_name():
    with (
        session(plan(), net()) as s,
        pytest.raises(RuntimeError, match=r"PrivacyConfig\(weight_average=WeightEMA\(\)\)"),
    ):
        s.averaged_weights().__enter__()
    with pytest.raises(ValueError, match="decay of WeightEMA"):
        WeightEMA(1.0)
    with pytest.raises(
        ValueError, match="weight_average must be WeightEMA.*got DiSK.*postprocess="
    ):
        plan(weight_average=DiSK())
    with pytest.raises(ValueError, match="WeightEMA in postprocess.*weight_average="):
        plan(postprocess=[WeightEMA()])


def test_a_frozen_parameter_is_left_alone():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = Handed(model)
    version = model[0].weight._version
    with session(plan(weight_average=WeightEMA(0.5)), model, optimizer) as s:
        s.step(next(s.batches()), loss_fn)
        with s.averaged_weights():
            pass
    assert model[0].weight._version == version
