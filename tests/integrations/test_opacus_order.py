"""Steps, batches and passes in the wrong order, and what only running the model and the loss can
show.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
)

from dpkfc.integrations.opacus import BatchMemoryManager
from tests.integrations.opacus_cases import (
    B,
    N,
    backward,
    clipped_sum,
    data,
    loader,
    mlp,
    private,
    sgd,
    train,
)
from tests.mutation_cases import weights

# -- the order of things ---------------------------------------------------------------------------


def test_leaving_the_loop_or_an_exception_never_leaks_into_the_next_release():
    """Invariant 8: after a break the run goes on as one that never saw the broken part."""
    _, model, optimizer, batches = private()
    for batch in batches:
        backward(model, batch)
        break
    with pytest.raises(ZeroDivisionError):
        for batch in batches:
            backward(model, batch)
            _ = 1 / 0
    before = weights(model)
    batch = next(iter(batches))
    backward(model, batch)
    optimizer.step()
    expected = 0.1 * clipped_sum(mlp(), batch, 1.0) / B
    torch.testing.assert_close(before - weights(model), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("layer", ["", "0"])
def test_hooks_added_after_make_private_are_part_of_the_model(layer):
    def halve(module, args):
        return (args[0] / 2,)

    def centre(module, args):
        return (args[0] - args[0].mean(0),)

    _, model, optimizer, batches = private()
    plain = mlp()
    for each in (model, plain):
        each.get_submodule(layer).register_forward_pre_hook(halve)
    before = weights(model)
    batch = next(iter(batches))
    backward(model, batch)
    optimizer.step()
    expected = 0.1 * clipped_sum(plain, batch, 1.0) / B
    torch.testing.assert_close(before - weights(model), expected, rtol=1e-6, atol=1e-9)
    _, model, _, batches = private()
    model.get_submodule(layer).register_forward_pre_hook(centre)
    with pytest.raises(ValueError, match="mean.dim mixes examples"):
        backward(model, next(iter(batches)))


def misuse_no_backward(model, optimizer, batches):
    next(iter(batches))
    optimizer.step()


def misuse_parts_alone(model, optimizer, batches):
    x, y = next(iter(batches))
    nn.functional.cross_entropy(model[2](model[1](model[0](x))), y).backward()
    optimizer.step()


def misuse_eval_mode(model, optimizer, batches):
    model.eval()
    backward(model, next(iter(batches)))
    optimizer.step()


def misuse_two_steps(model, optimizer, batches):
    batch = next(iter(batches))
    backward(model, batch)
    optimizer.step()
    backward(model, batch)
    optimizer.step()


def misuse_no_batch(model, optimizer, batches):
    backward(model, data()[:8])
    optimizer.step()


def misuse_other_batch(model, optimizer, batches):
    batch = next(iter(batches))
    backward(model, [x[:-1] for x in batch])
    optimizer.step()


def misuse_same_graph_twice(model, optimizer, batches):
    x, y = next(iter(batches))
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def misuse_skipped_batch(model, optimizer, batches):
    for _ in batches:
        continue


def misuse_accumulation(model, optimizer, batches):
    for i, batch in enumerate(batches):
        backward(model, batch)
        if i % 2:
            optimizer.step()


def misuse_closure(model, optimizer, batches):
    batch = next(iter(batches))
    optimizer.step(lambda: backward(model, batch))


def misuse_old_pass(model, optimizer, batches):
    old = iter(batches)
    backward(model, next(old))
    optimizer.step()
    backward(model, next(iter(batches)))
    optimizer.step()
    next(old)


def misuse_backward_of_an_earlier_batch(model, optimizer, batches):
    x, y = next(iter(batches))
    loss = F.cross_entropy(model(x), y)
    next(iter(batches))
    loss.backward()
    optimizer.step()


def misuse_batch_of_another_thread(model, optimizer, batches):
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(next, iter(batches)).result()
    backward(model, batch)
    optimizer.step()


def misuse_weight_penalty(model, optimizer, batches):
    x, y = next(iter(batches))
    (F.cross_entropy(model(x), y) + model[0].weight.square().sum()).backward()
    optimizer.step()


def misuse_changed_noise(model, optimizer, batches):
    optimizer.noise_multiplier = 0.1
    backward(model, next(iter(batches)))
    optimizer.step()


def misuse_frozen_later(model, optimizer, batches):
    model[0].weight.requires_grad_(False)
    backward(model, next(iter(batches)))
    optimizer.step()


def misuse_new_layer(model, optimizer, batches):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    backward(model, next(iter(batches)))
    optimizer.step()


def misuse_watched_gradient(model, optimizer, batches):
    batch = next(iter(batches))
    model[0].weight.register_hook(lambda g: None)
    backward(model, batch)


def misuse_input_overwritten(model, optimizer, batches):
    x, y = next(iter(batches))
    loss = F.cross_entropy(model(x), y)
    x.zero_()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    "misuse, match",
    [
        (misuse_no_backward, "without a backward pass"),
        (misuse_parts_alone, r"call model.train\(\), model\(\) itself and loss"),
        (misuse_eval_mode, r"call model.train\(\)"),
        (misuse_two_steps, "each batch of the private loader is released once"),
        (misuse_no_batch, "without a new batch"),
        (misuse_other_batch, "was made by aten.slice.Tensor, which hides its examples"),
        (misuse_same_graph_twice, "2 losses were differentiated before one"),
        (misuse_skipped_batch, "not followed by optimizer.step"),
        (misuse_accumulation, "BatchMemoryManager"),
        (misuse_closure, "closure"),
        (misuse_old_pass, "another pass over the private loader"),
        (misuse_backward_of_an_earlier_batch, "without a backward pass through the model"),
        (misuse_batch_of_another_thread, "in the thread that iterates over the loader"),
        (misuse_weight_penalty, "aten.add.Tensor.*; a penalty: docs/how-to-opacus.md#penalties"),
        (misuse_changed_noise, "optimizer.noise_multiplier was changed"),
        (misuse_frozen_later, "'0.weight' was frozen or taken out"),
        (misuse_new_layer, "'2.weight' was replaced"),
        (misuse_watched_gradient, "'0.weight' has a hook on its gradient"),
        (
            misuse_input_overwritten,
            r"stands aten.zero_.default: the examples are written into memory",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_misuse_is_one_error_and_releases_nothing_more(misuse, match):
    engine, model, optimizer, batches = private(data_loader=loader(batch_size=20))
    start = weights(model)
    with pytest.raises((RuntimeError, ValueError), match=match):
        misuse(model, optimizer, batches)
    released = {misuse_two_steps: 1, misuse_old_pass: 2}.get(misuse, 0)
    assert engine.ledger.count == released
    if not released:
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(weights(model), start)


def test_what_is_not_training_is_not_recorded():
    """Evaluation passes, attacks in eval mode and a look at one batch go unnoticed."""
    engine, model, optimizer, batches = private()
    next(iter(batches))
    for batch in batches:
        backward(model, batch)
        optimizer.step()
        with torch.no_grad():
            model(batch[0])
        model(batch[0])
        model.eval()
        backward(model, batch)
        model.train()
    model.eval()
    assert sum(len(x) for x, _ in batches) > 0
    model.train()
    train(model, optimizer, batches, 2)
    assert engine.ledger.count == N // B + 2


# -- what only running the model and the loss can show ---------------------------------------------


@pytest.mark.parametrize(
    "criterion, declared, match",
    [
        (nn.CrossEntropyLoss(reduction="sum"), "mean", "loss is a sum.*loss_reduction='sum'"),
        (nn.CrossEntropyLoss(), "sum", "loss is a mean.*loss_reduction='mean'"),
        (
            nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double()),
            "mean",
            "labels of the",
        ),
        (nn.CrossEntropyLoss(ignore_index=0), "mean", "labels of the"),
        (nn.NLLLoss(reduction="sum"), "mean", "loss is a sum"),
    ],
)
def test_a_loss_with_another_reduction_is_found_before_a_release(criterion, declared, match):
    model = nn.Sequential(*mlp(), nn.LogSoftmax(1)) if isinstance(criterion, nn.NLLLoss) else mlp()
    engine, model, optimizer, batches = private(
        model, loss_reduction=declared, data_loader=loader(batch_size=20)
    )
    with pytest.raises(ValueError, match=match):
        train(model, optimizer, batches, criterion=criterion)
    assert engine.ledger.count == 0


def test_shuffled_batches_are_uncertified_and_cover_the_dataset():
    source = data()
    source.tensors[1][:] = torch.arange(N) % 3
    engine, model, optimizer, batches = private(
        data_loader=DataLoader(source, batch_size=B),
        poisson_sampling=False,
        uncertified=True,
        test_mode_seed=None,
    )
    assert not engine.ledger.header["certified"]
    for _ in range(2):
        seen = []
        for x, y in batches:
            assert len(x) == B
            seen.append(x)
            backward(model, (x, y))
            optimizer.step()
        assert len(torch.unique(torch.cat(seen), dim=0)) == N
        train(model, optimizer, batches, 2)  # a pass that is broken off does not shift the next one


def test_manager_refusals():
    _, model, optimizer, batches = private()
    for settings, match in (
        ({"data_loader": loader()}, "not private"),
        ({"optimizer": sgd(model)}, "another engine"),
        ({"max_physical_batch_size": 0}, ">= 1"),
        ({"max_physical_batch_size": 2.5}, "integer"),
    ):
        with pytest.raises(ValueError, match=match):
            BatchMemoryManager(
                **{
                    "data_loader": batches,
                    "max_physical_batch_size": 2,
                    "optimizer": optimizer,
                    **settings,
                }
            )
