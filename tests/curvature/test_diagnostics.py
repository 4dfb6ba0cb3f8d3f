import pytest
import torch

from dpkfc.curvature import KFAC, FeatureNoise
from dpkfc.curvature.metric_scale import layer_norms, probe_norms
from dpkfc.curvature.probe_pass import run_probe
from dpkfc.curvature.signal_to_noise import signal_to_noise
from dpkfc.linalg.blocks import Lookup, PerExample
from dpkfc.linalg.metric import Elementwise, Kronecker
from dpkfc.linalg.sides import Dense, Diagonal, Identity
from tests.curvature.toys import capture, mlp
from tests.models import randn

F64 = torch.float64


def _squares(block, entry):
    return layer_norms(block, entry).square()


def _root(d):
    m = randn(d, d)
    return Dense(m + m.T, 1.0)


def test_norms_of_embeddings_and_materialised_gradients():
    block = Lookup(torch.tensor([[0, 1, 1], [2, 2, 2]]), randn(2, 3, 4), 5)
    scale, root = torch.rand(5, dtype=F64), _root(4)
    formed = scale.view(1, 5, 1) * block.per_example() @ root.root
    squares = _squares(block, Kronecker(Diagonal(scale), root))
    assert torch.allclose(squares, formed.flatten(1).square().sum(1))
    plain = _squares(block, Kronecker(Identity(2.0), Identity(3.0)))
    assert torch.allclose(plain, 36 * block.per_example().flatten(1).square().sum(1))
    with pytest.raises(ValueError, match="must be diagonal"):
        _squares(block, Kronecker(_root(5), root))
    small = PerExample({"weight": torch.randn(2, 3), "bias": torch.randn(2, 3)})
    weight = torch.rand(3)
    exact = (small.grads["weight"] * weight).square().sum(1) + small.grads["bias"].square().sum(1)
    assert torch.allclose(_squares(small, Elementwise({"weight": weight})), exact.double())
    norms, again = probe_norms(
        {"a": block, "b": small}, {}, {"b": Elementwise({"weight": 1 + 0 * weight})}
    )
    assert torch.equal(norms, again)
    assert torch.allclose(norms.square(), _squares(block, None) + _squares(small, None))


def test_signal_to_noise_is_the_ratio_written_out():
    model = mlp()
    kfac = KFAC(sides="both", probe=FeatureNoise(12), probe_size=10, chunk=4)
    built = kfac.build(model, capture, 0)
    ratios = signal_to_noise(kfac, model, capture, built, max_grad_norm=0.5, noise_multiplier=3.0)
    blocks = [piece.blocks for piece in run_probe(model, capture, kfac.probe_spec(0))]
    for metric, attribute in (({}, "plain"), (built.metric, "preconditioned")):
        energy = {"0": 0.0, "2": 0.0}
        for chunk in blocks:
            z = {
                n: metric.get(n, Kronecker()).apply(b.per_example()).flatten(1).double()
                for n, b in chunk.items()
            }
            norms = torch.cat(list(z.values()), 1).norm(dim=1)
            clip = (0.5 / norms).clamp(max=1.0)
            for n in z:
                energy[n] += float((clip[:, None] * z[n]).square().sum())
        for n, (d_out, d_in) in {"0": (8, 13), "2": (4, 9)}.items():
            exact = energy[n] / 10 / (3.0**2 * 0.5**2 * d_out * d_in)
            assert getattr(ratios[n], attribute) == pytest.approx(exact, rel=1e-4)
            assert ratios[n].parameters == d_out * d_in
    with pytest.raises(ValueError, match="must be positive"):
        signal_to_noise(kfac, model, capture, built, max_grad_norm=0.0, noise_multiplier=1.0)
