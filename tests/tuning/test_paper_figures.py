"""Scripts that measure figures of papers: products with a Hessian, rates and filters by their best
settings.
"""

from __future__ import annotations

import torch
from torch import nn


def test_products_with_a_hessian_equal_the_whole_matrix(benchmark_module) -> None:
    hessian_product = benchmark_module("hessian").hessian_product
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs = torch.randn(7, 4, dtype=torch.float64)
    labels = torch.randint(0, 3, (7,))
    product, size = hessian_product(model, inputs, labels)
    found = torch.stack([product(row) for row in torch.eye(size, dtype=torch.float64)])

    def loss(flat: torch.Tensor) -> torch.Tensor:
        pieces = flat.split([p.numel() for p in model.parameters()])
        named = {
            name: piece.view(p.shape)
            for (name, p), piece in zip(model.named_parameters(), pieces, strict=True)
        }
        outputs = torch.func.functional_call(model, named, (inputs,))
        return nn.functional.cross_entropy(outputs, labels)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    expected = torch.autograd.functional.hessian(loss, flat)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_federated_rate_is_chosen_on_validation_after_its_grid(benchmark_module) -> None:
    study = benchmark_module("federated_variations")

    class Rows(dict):
        def get(self, run):
            return super().get(run.hash)

    rows = Rows()
    for place, eta in enumerate(study.GRID):
        assert study.test_runs(rows, 0.1, "sofim") == []
        run = study.Variation("sofim", eta, 0.1, study.TUNED_WITH, "validation")
        rows[run.hash] = {"accuracy": 0.5 - abs(place - 1) / 10}
    found = study.test_runs(rows, 0.1, "sofim")
    assert [run.eta for run in found] == [study.GRID[1]] * len(study.SEEDS)
    assert {run.evaluate_on for run in found} == {"test"}


def test_sentences_on_the_filter_follow_its_figures(benchmark_module) -> None:
    pages = benchmark_module("disk_pages")
    curves = {
        "disk": {0: [10.0], 5: [80.0], 10: [90.0], 12: [91.0]},
        "dp-sgd": {0: [10.0], 5: [70.0], 10: [92.0], 12: [91.0]},
    }
    text = pages._describe_curves(curves)
    assert "ahead at 1 of 2 evaluations, by 10.00 points" in text and "-2.00 at the last" in text
    text = pages._describe_grid(
        {(0.5, 0.3): 90.0, (0.5, 0.7): 91.0, (0.9, 0.3): 93.0, (0.9, 0.7): 92.0}
    )
    assert "The best point is κ = 0.9 and γ = 0.3 (93.00 %)" in text
    assert "0.7 at κ = 0.5, 0.3 at κ = 0.9" in text


def test_each_machine_of_a_study_is_named_with_its_last_day(benchmark_module) -> None:
    common = benchmark_module("common")
    rows = [
        {"hardware": {"cpu": cpu, "threads": 1}, "date": f"2026-11-{day}"}
        for cpu, day in (("B", 27), ("A", 25), ("A", 26))
    ]
    found = common.machine_of_rows(rows)
    assert found.index("A, 1 thread, 2026-11-26") < found.index("B, 1 thread, 2026-11-27")
