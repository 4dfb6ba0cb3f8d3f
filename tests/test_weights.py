"""Which weights a run has released: any other value is told from them, on every device."""

import pytest
import torch
from torch import nn

from dpkfc import weights
from dpkfc.weights import ReleasedWeights, condense, digest_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


@pytest.fixture(params=["processor", "card"])
def condensed(request, monkeypatch):
    """Condense tensors of a processor too, as tensors of a card are."""
    if request.param == "card":
        list_parts = weights._list_parts
        monkeypatch.setattr(weights, "_list_parts", lambda x: map(condense, list_parts(x)))


@pytest.mark.usefixtures("condensed")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (30, 1000), (133, 257)])
def test_any_change_of_a_weight_is_seen(dtype, shape):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(7, *shape, dtype=dtype)[3])
    known = ReleasedWeights(model)
    known.record()
    known.check()
    if not model.weight.numel():
        return
    flat = model.weight.data.view(-1)
    for changed in (lambda x: -x, lambda x: x.flip(0) if x.numel() > 1 else x + 1):
        before = flat.clone()
        flat.copy_(changed(before))
        with pytest.raises(RuntimeError, match="'weight' is not as the last release"):
            known.check()
        flat.copy_(before)
        known.check()
    flat[-1] += 1
    with pytest.raises(RuntimeError, match="'weight'"):
        known.check()


@pytest.mark.usefixtures("condensed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_that_changed_places_are_seen(dtype):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(70, 8192, dtype=dtype))
    known = ReleasedWeights(model)
    for special in (False, True):
        weight = model.weight.data
        if special:
            # Values of one sign, which differ in their highest bits alone.
            weight.copy_(torch.randint(2, weight.shape) + 1.0)
        known.record()
        for one, other in (
            ((0,), (1,)),
            ((3,), (67,)),
            ((slice(None), 0), (slice(None), 4096)),
            ((0, slice(0, 2048)), (0, slice(4096, 6144))),
            ((0, slice(0, 4)), (2, slice(0, 4))),
        ):
            before = weight.clone()
            weight[one], weight[other] = before[other], before[one]
            if not torch.equal(weight, before):
                with pytest.raises(RuntimeError, match="'weight' is not as the last release"):
                    known.check()
            weight.copy_(before)
            known.check()


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.float16, torch.float8_e4m3fn, torch.qint8]
)
def test_tensors_of_every_type_are_read_byte_by_byte(dtype):
    x = torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])

    def cast(values):
        if dtype == torch.qint8:
            return torch.quantize_per_tensor(values, 0.5, 0, dtype)
        return values.to(dtype)

    one, other = cast(x), cast(x.flip(0))
    found = digest_tensors({"x": one, "same": cast(x.clone()), "other": other, "text": "x"})
    assert found["x"] == found["same"] != found["other"] and "text" not in found


def test_the_order_in_memory_is_no_change_and_a_view_is_read_alone():
    x = torch.randn(4, 3, 5, 5)
    forms = [x, x.to(memory_format=torch.channels_last), torch.stack([x, x + 1])[0]]
    forms += [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), x.neg().neg()]
    found = digest_tensors({str(i): form for i, form in enumerate(forms)})
    assert len(set(found.values())) == 1
    assert digest_tensors({"0": x.flatten()}) != digest_tensors({"0": x})
    z = torch.randn(3, dtype=torch.complex64)
    assert digest_tensors({"": z.conj()}) == digest_tensors({"": z.conj().resolve_conj()})
    meta = torch.empty(3, device="meta")
    assert digest_tensors({"": meta}) == digest_tensors({"": torch.empty(3, device="meta")})


def test_a_tied_parameter_is_read_once(monkeypatch):
    model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    model["two"].weight = model["one"].weight
    read = []
    monkeypatch.setattr(weights, "digest_tensors", lambda x: read.extend(x) or digest_tensors(x))
    ReleasedWeights(model).record()
    assert read == ["one.weight", "one.bias", "two.bias"]
