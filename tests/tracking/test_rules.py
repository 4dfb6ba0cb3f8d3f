"""Every rule of the tracker alone, against brute force."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from dpkfc.tracking.batch_rules import RULES, TOTAL_RULES
from tests.tracking.brute_force import (
    Case,
    Operand,
    Seen,
    batched,
    draw_integers,
    draw_normal,
    faults,
    public,
    truths,
)
from tests.tracking.elementwise import elementwise_cases, overloads

aten = torch.ops.aten
N = 3

# Names that no call on this machine can reach, with the reason.
_CUDA = "it has a kernel on CUDA alone"
UNREACHABLE = {
    "_conv_depthwise2d": _CUDA,
    "_scaled_dot_product_cudnn_attention": _CUDA,
    "_scaled_dot_product_efficient_attention": _CUDA,
    "_scaled_dot_product_flash_attention": _CUDA,
    "_scaled_dot_product_fused_attention_overrideable": (
        "it has a kernel on backends outside of torch alone"
    ),
    "conv_depthwise3d": _CUDA,
    "cudnn_batch_norm": _CUDA,
    "cudnn_convolution": _CUDA,
    "miopen_batch_norm": "it has a kernel on ROCm alone",
}


def follow(name, call, *operands, size=N, is_random=False):
    return Case(name, size, call, operands, "axis", is_random)


def lose(name, call, *operands, size=N):
    return Case(name, size, call, operands, "unknown")


def places(
    name,
    call,
    shape=(4,),
    keeps=(0, 1),
    loses=(),
    draw=draw_normal,
    is_random=False,
):
    """Return calls of one operation with the examples at each of some dimensions of its operand,
    plain and folded.

    Args:
        name: of the operation.
        call: takes one operand.
        shape: of the operand without the examples.
        keeps: where the examples are followed.
        loses: where they are lost.
        draw: gives the values.
        is_random: the operation draws random numbers.
    """
    found = []
    for answer, dims in (("axis", keeps), ("unknown", loses)):
        for dim in dims:
            for size, pre, post in ((3, 1, 1), (2, 1, 1), (2, 2, 3)):
                operand = batched(size, shape, dim, pre, post, draw)
                found.append(
                    Case(
                        f"{name} {operand.axis} of {size}",
                        size,
                        call,
                        (operand,),
                        answer,
                        is_random,
                    )
                )
    return found


def each(make, calls, *more, **settings):
    """Return the cases that `places`, `follow` or `lose` makes of each call."""
    for name, call in calls.items():
        made = make(name, call, *more, **settings)
        yield from made if isinstance(made, list) else [made]


def infer(call):
    """Return a call in inference mode, where composite operations are seen whole."""

    def run(*tensors, **options):
        with torch.inference_mode():
            return call(*tensors, **options)

    return run


def rows(*shape, draw=draw_normal, size=N):
    return batched(size, shape, draw=draw)


def equal_rows(shape):
    """Return numbers that are the same in every row."""
    return draw_normal(shape[1:]).expand(*shape).clone()


def counting_numbers(shape):
    """Return private numbers that happen to be 0, 1, … in the order of the examples."""
    return torch.arange(shape[0])


def complex_numbers(shape):
    return torch.complex(draw_normal(shape), draw_normal(shape))


def positive_matrices(shape):
    x = draw_normal(shape)
    return x @ x.mT + torch.eye(shape[-1], dtype=x.dtype)


# -- elementwise operations ------------------------------------------------------------------------


def test_elementwise_operations_keep_the_examples_in_their_places():
    cases = {str(function): elementwise_cases(function) for function in overloads()}
    found = {name: [fault for case in of for fault in faults(case)] for name, of in cases.items()}
    assert {name: of for name, of in found.items() if of} == {}


def build_elementwise_table():
    cases = [
        *each(
            places,
            {
                "to another type": lambda x: x.float(),
                "copy_": lambda x: torch.zeros_like(x).copy_(x),
                "contiguous": infer(aten.contiguous),
                "detach": lambda x: x.detach(),
                "alias": aten.alias,
                "lift_fresh": lambda x: torch.add(aten.lift_fresh(x), 0),
                "clone": lambda x: x.clone(),
                "prelu": lambda x: F.prelu(x - 0.5, torch.full((1,), 0.5, dtype=x.dtype)),
                "fill_": lambda x: x.fill_(1.5),
                "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
                "gelu_": lambda x: aten.gelu_(x),
                "rrelu_with_noise": lambda x: aten.rrelu_with_noise(
                    x - 0.5, torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
                ),
                "resolve_neg": infer(lambda x: aten.resolve_neg(x)),
                "hardswish": F.hardswish,
                "log_sigmoid": lambda x: aten.log_sigmoid_forward(x)[0],
                "zero_": lambda x: x.zero_(),
                "_cast_Float": infer(aten._cast_Float),
                "_cast_Double": infer(aten._cast_Double),
                "multigammaln": infer(lambda x: torch.special.multigammaln(x + 2, 2)),
                "bucketize": lambda x: torch.bucketize(x, torch.tensor([0.2, 0.6]).double()),
            },
        ),
        *each(
            places,
            {
                "bernoulli": torch.bernoulli,
                "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
                "dropout": infer(lambda x: F.dropout(x, 0.5)),
                "normal_": lambda x: x.normal_(),
                "uniform_": lambda x: x.uniform_(),
                "random_": lambda x: x.random_(),
                "exponential_": lambda x: x.exponential_(),
            },
            is_random=True,
        ),
        *places(
            "prelu whole",
            infer(lambda x: F.prelu(x - 0.5, torch.tensor([0.5, 2.0], dtype=x.dtype))),
            (2,),
            (0,),
        ),
        *each(
            places,
            {
                "real": infer(torch.real),
                "imag": infer(torch.imag),
                "conj": infer(aten.conj),
                "_conj": lambda x: torch.conj(x) * 2,
                "resolve_conj": infer(lambda x: aten.resolve_conj(x)),
            },
            draw=complex_numbers,
        ),
        lose("bucketize by the examples", lambda x: torch.bucketize(x, x[0].sort()[0]), rows(4)),
        *places("isin", lambda x: torch.isin(x, torch.tensor([0, 2])), draw=draw_integers(0, 4)),
        lose("isin of the examples", lambda x: torch.isin(x, x), rows(4, draw=draw_integers(0, 4))),
        lose(
            "isin of other examples",
            torch.isin,
            rows(4, draw=draw_integers(0, 4)),
            rows(2, draw=draw_integers(0, 4)),
        ),
        lose("isin of one entry", lambda x: torch.isin(1, x), rows(4, draw=draw_integers(0, 4))),
        lose("prelu with weights of the examples", lambda x, w: F.prelu(x, w[0]), rows(2), rows(2)),
        lose(
            "prelu whole, private",
            infer(lambda x, w: F.prelu(x - 0.5, w[:, 0])),
            rows(N),
            rows(1),
        ),
        *each(
            follow,
            {
                "polar": torch.polar,
                "complex": torch.complex,
                "isclose": infer(torch.isclose),
                "rsub": torch.rsub,
                "floor_divide": torch.floor_divide,
            },
            rows(4),
            rows(4),
        ),
        follow(
            "masked_fill of public",
            lambda m: torch.ones(N, 4).masked_fill(m, 0.0),
            rows(4, draw=truths),
        ),
        lose(
            "where",
            torch.where,
            rows(N, draw=truths),
            batched(N, (N,), 1),
            batched(N, (N,), 1),
        ),
        lose("where it is true", infer(lambda x: torch.where(x > -1)), rows()),
    ]
    backward = {
        "hardsigmoid_backward": lambda g, x: aten.hardsigmoid_backward(g, x),
        "hardswish_backward": lambda g, x: aten.hardswish_backward(g, x),
        "log_sigmoid_backward": lambda g, x: aten.log_sigmoid_backward(g, x, torch.exp(-x.abs())),
        "elu_backward": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
        "leaky_relu_backward": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
        "hardtanh_backward": lambda g, x: aten.hardtanh_backward(g, x, 0.0, 0.5),
        "softplus_backward": lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0),
        "mish_backward": infer(lambda g, x: aten.mish_backward(g, x)),
        "binary_cross_entropy_backward": lambda g, x: aten.binary_cross_entropy_backward(
            g, x, (x > 0.5).double(), None, 0
        ),
    }
    for name, call in backward.items():
        cases.append(follow(name, call, rows(4), rows(4)))
        cases.append(
            follow(
                f"{name}, folded",
                call,
                batched(N, (4,), 1, 2, 2),
                batched(N, (4,), 1, 2, 2),
            )
        )
        cases.append(lose(f"{name}, across", call, batched(N, (N,), 0), batched(N, (N,), 1)))
    return cases


def build_shapes_table():
    calls = {
        "zeros_like": torch.zeros_like,
        "ones_like": torch.ones_like,
        "full_like": lambda x: torch.full_like(x, 2.0),
        "empty_like": lambda x: torch.empty_like(x).zero_(),
        "rand_like": lambda x: torch.rand_like(x),
        "randn_like": lambda x: torch.randn_like(x),
        "randint_like": lambda x: torch.randint_like(x, 5),
        "new_zeros": lambda x: x.new_zeros(2, 2),
        "new_ones": lambda x: x.new_ones(2, 2),
        "new_full": lambda x: x.new_full((2, 2), 1.0),
        "new_empty": lambda x: x.new_empty(2, 2).zero_(),
        "new_empty_strided": lambda x: x.new_empty_strided((2, 2), (2, 1)).zero_(),
    }
    return [
        follow(name, call, rows(4), is_random=name.startswith("rand"))
        for name, call in calls.items()
    ]


# -- views and layout ------------------------------------------------------------------------------


def build_view_table():
    return [
        *each(
            places,
            {
                "view in front": lambda x: x.view(-1, 4),
                "view apart": lambda x: x.view(*x.shape[:-1], 2, 2),
                "view of one": lambda x: x.view(-1),
                "_unsafe_view": lambda x: aten._unsafe_view(x, [-1, 4]),
                "_reshape_alias": lambda x: aten._reshape_alias(x, [x.numel()], [1]),
                "unflatten": infer(lambda x: x.unflatten(-1, (2, 2))),
                "unfold": lambda x: x.unfold(1, 2, 1),
            },
            (4,),
            (0,),
        ),
        *each(
            places,
            {
                "as another type": lambda x: x.view(torch.int64),
                "unsqueeze": lambda x: x.unsqueeze(1),
                "view_as": infer(lambda x: x.view_as(torch.zeros(x.numel()))),
                "t": lambda x: x.t(),
                "expand": lambda x: x.expand(2, *x.shape),
                "expand ones": lambda x: x[:, None].expand(-1, 5, -1),
                "repeat": lambda x: x.repeat(2, 3, 1),
                "whole slice": lambda x: x[:],
                "as_strided": lambda x: x.as_strided(x.shape, x.stride(), 0),
            },
        ),
        lose("a view with more elements", lambda x: x.view(torch.float32), rows(4)),
        *places("reshape", infer(lambda x: x.reshape(-1, 4)), (2, 4)),
        *places("squeeze", lambda x: x.squeeze(1), (1, 4), (0,)),
        *places("squeeze all", lambda x: x.squeeze(), (1, 4), (0, 2)),
        *places("flatten", infer(lambda x: x.flatten(0, 1)), (4, 2), (0, 1, 2)),
        *each(
            places,
            {
                "permute": lambda x: x.permute(2, 0, 1),
                "permute, negative": lambda x: x.permute(-1, 1, 0),
                "transpose": lambda x: x.transpose(0, -1),
            },
            (4, 5),
            (0, 1, 2),
        ),
        *places("t of a vector", lambda x: x.t(), (), (0,)),
        *places("slice", lambda x: x[:, 1:4:2], (5,), (0,)),
        *each(
            follow,
            {
                "first half of two views": lambda x: x[:N],
                "second half of two views": lambda x: x[N:],
                "narrow to a view": infer(lambda x: x.narrow(0, N, N)),
                "split of two views": lambda x: x.split(N),
            },
            batched(N, (4,), pre=2),
        ),
        follow("one of two places", lambda x: x[1::2], batched(N, (4,), post=2)),
        *places("narrow", infer(lambda x: x.narrow(1, 1, 2)), (5,), (0,)),
        *each(
            places,
            {
                "slice_scatter": lambda x: torch.slice_scatter(x, 2 * x[:, :1], 1, 0, 1),
                "select_scatter": lambda x: torch.select_scatter(x, 2 * x.select(1, 0), 1, 0),
                "select": lambda x: x.select(1, 1),
            },
            (4, 5),
            (0, 2),
            (1,),
        ),
        *places("unbind", lambda x: x.unbind(1), (2, 5), (0, 2), (1,)),
        *each(
            places,
            {
                "split": lambda x: x.split(2, 1),
                "chunk": infer(lambda x: x.chunk(2, 1)),
                "unsafe_split": lambda x: torch.unsafe_split(x, 2, 1),
                "unsafe_chunk": infer(lambda x: torch.unsafe_chunk(x, 2, 1)),
                "tensor_split": infer(lambda x: torch.tensor_split(x, [1, 3], 1)),
            },
            (4, 5),
            (0, 2),
        ),
        *places("split_with_sizes", lambda x: x.split([1, 3], 1), (4, 4), (0, 2)),
        *places(
            "unsafe_split_with_sizes",
            lambda x: torch.unsafe_split_with_sizes(x, [1, 3], 1),
            (4, 4),
            (0, 2),
        ),
        follow(
            "chunk of two views",
            infer(lambda x: x.chunk(2, 1)),
            batched(N, (4,), 1, pre=2),
        ),
        follow("cat of two", lambda x, y: torch.cat([x, y], 1), rows(4), rows(2)),
        *each(
            follow,
            {
                "cat with public": lambda x: torch.cat([x, torch.zeros(N, 2).double()], 1),
                "cat with an empty one": lambda x: torch.cat([torch.zeros(0).double(), x], 1),
                "concat": infer(lambda x: torch.concat([x, x], 1)),
                "concatenate": infer(lambda x: torch.concatenate([x, x], 1)),
            },
            rows(4),
        ),
        follow(
            "stack", lambda x, y: [torch.stack([x, y], d) for d in (0, 1, 2, -1)], rows(4), rows(4)
        ),
        *places("diagonal", lambda x: x.diagonal(1, 0, 2), (4, 5), (1,), (0, 2)),
        lose("as_strided elsewhere", lambda x: x.as_strided((4, N), (N, 1), 0), rows(4)),
        *places("view_as_complex", torch.view_as_complex, (4, 2)),
        lose(
            "view_as_complex of the examples",
            torch.view_as_complex,
            batched(2, (4,), 1),
            size=2,
        ),
        *places("view_as_complex_copy", torch.view_as_complex_copy, (4, 2)),
        *places("view_as_real", torch.view_as_real, draw=complex_numbers),
    ]


# -- dimensions over which an operation works ------------------------------------------------------


def build_along_table():
    keeping = {
        "softmax": infer(lambda x: torch.softmax(x, 1)),
        "_softmax": lambda x: torch.softmax(x, 1),
        "log_softmax": infer(lambda x: torch.log_softmax(x, 1)),
        "_log_softmax": lambda x: torch.log_softmax(x, 1),
        "_safe_softmax": lambda x: aten._safe_softmax(x, 1),
        "cumsum": lambda x: x.cumsum(1),
        "cumprod": lambda x: x.cumprod(1),
        "sort": lambda x: x.sort(1),
        "sort, stable": lambda x: torch.sort(x, dim=1, stable=True),
        "argsort": infer(lambda x: x.argsort(1)),
        "topk": lambda x: x.topk(2, 1),
        "cummax": lambda x: x.cummax(1),
        "cummin": lambda x: x.cummin(1),
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "flip": lambda x: x.flip(1),
        "fft": lambda x: torch.fft.rfft(x, dim=1),
        "fft of complex numbers": lambda x: torch.fft.fft(torch.complex(x, x), dim=1),
        "fft back": lambda x: torch.fft.irfft(torch.complex(x, x), dim=1),
        "roll": lambda x: x.roll(1, 1),
        "glu": lambda x: F.glu(x, 1),
    }
    reducing = {
        "amax": lambda x: x.amax(1),
        "amin": lambda x: x.amin(1, keepdim=True),
        "prod": lambda x: x.prod(1),
        "any": lambda x: (x > 0.5).any(1),
        "all": lambda x: (x > 0.5).all(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "std": lambda x: x.std(1),
        "var": lambda x: x.var(1, keepdim=True),
        "var_mean": lambda x: torch.var_mean(x, 1),
        "std_mean": lambda x: torch.std_mean(x, 1),
        "argmax": lambda x: x.argmax(1),
        "argmin": lambda x: x.argmin(1, keepdim=True),
        "max": lambda x: x.max(1),
        "min": lambda x: x.min(1),
        "median": lambda x: x.median(1),
        "nanmedian": lambda x: x.nanmedian(1),
        "mode": lambda x: x.mode(1),
        "kthvalue": lambda x: x.kthvalue(2, 1),
        "norm": lambda x: aten.norm.ScalarOpt_dim(x, 2, [1]),
        "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=1),
        "nansum": lambda x: x.nansum(1),
        "count_nonzero": lambda x: (x > 0.5).count_nonzero(1),
        "aminmax": lambda x: torch.aminmax(x, dim=1),
        "sum": lambda x: x.sum(1),
        "mean": lambda x: x.mean(1, keepdim=True),
    }
    cases = []
    for name, call in (keeping | reducing).items():
        cases += places(name, call, (4, 6), (0, 2), ())
        cases.append(lose(f"{name} over the examples", call, batched(4, (5, 6), 1), size=4))
        cases.append(
            lose(
                f"{name} over the folded examples",
                call,
                batched(2, (5, 6), 1, 2, 2),
                size=2,
            )
        )
    wholes = {
        "flip": lambda x: x.flip(0, 1),
        "msort": infer(lambda x: x.msort()),
        "roll": lambda x: x.roll(1),
        "max": lambda x: x.max(),
        "median": lambda x: x.median(),
        "any": lambda x: (x > 0.5).any(),
        "norm": lambda x: x.norm(),
        "norm of all": lambda x: aten.norm.Scalar(x, 2),
        "std": lambda x: x.std(),
        "logsumexp": lambda x: x.logsumexp((0, 1)),
        "argmax": lambda x: x.argmax(),
        "count": lambda x: x.count_nonzero(),
        "nansum": lambda x: x.nansum(),
        "sum over the examples": lambda x: x.sum(0),
        "mean over the examples": lambda x: x.mean(0),
        "max across": lambda x: torch.maximum(x, x.mT),
    }
    cases += [lose(f"{name}, whole", call, rows(N)) for name, call in wholes.items()]
    return [
        *cases,
        *places("diag_embed", torch.diag_embed, (4, 5), (0, 1), (2,)),
        *places(
            "diag_embed in front", lambda x: torch.diag_embed(x, 1, 0, 2), (4, 5), (0, 1), (2,)
        ),
        *places("renorm", lambda x: x.renorm(2, 1, 0.5), (4, 5), (1,), (0, 2)),
    ]


# -- products --------------------------------------------------------------------------------------


def build_product_table():
    weight = public(4, 5)
    return [
        follow("mm", torch.mm, rows(4), weight),
        follow("mm on the right", torch.mm, weight, batched(N, (5,), 1)),
        follow("addmm", torch.addmm, public(5), rows(4), weight),
        follow(
            "addmm of a bias alone", torch.addmm, rows(5), public(N, 4, draw=equal_rows), weight
        ),
        lose("addmm across", torch.addmm, rows(), rows(4), public(4, N)),
        follow("bmm", torch.bmm, rows(2, 4), rows(4, 5)),
        follow("bmm of rows", torch.bmm, batched(N, (2, 4), 1), public(2, 4, 5)),
        follow("baddbmm", torch.baddbmm, public(2, 5), rows(2, 4), rows(4, 5)),
        lose(
            "baddbmm of another place",
            torch.baddbmm,
            batched(N, (N, 5), 1),
            rows(N, 4),
            rows(4, 5),
        ),
        follow("mv", torch.mv, rows(4), public(4)),
        lose("mv over the examples", torch.mv, batched(N, (2,), 1), public(N)),
        lose("mv with examples", torch.mv, rows(N), rows()),
        follow("addmv", torch.addmv, rows(), rows(4), public(4)),
        lose("dot", torch.dot, rows(), public(N)),
        lose("vdot", torch.vdot, public(N), rows()),
        follow("_scaled_mm", _scaled, rows(16), public(16, 16)),
        lose(
            "_scaled_mm over the examples",
            _scaled,
            batched(16, (16,), 1),
            public(16, 16),
            size=16,
        ),
        *places("matmul", infer(lambda x: x @ torch.ones(4, 5, dtype=x.dtype)), (2, 4), (0, 1), ()),
        follow("matmul on the right", infer(torch.matmul), public(2, 5), rows(5, 4)),
        follow("matmul of both", infer(torch.matmul), rows(2, 4), rows(4, 5)),
        follow("linear", infer(F.linear), rows(2, 4), public(5, 4), public(5)),
        lose("linear with examples as weights", infer(F.linear), public(2, 4), rows(4)),
        lose("linear with examples as bias", infer(F.linear), public(2, 4), public(N, 4), rows()),
        follow(
            "_cdist_forward",
            lambda x, y: aten._cdist_forward(x, y, 2.0, None),
            rows(2, 4),
            rows(5, 4),
        ),
        follow(
            "_cdist_forward of rows",
            lambda x, y: aten._cdist_forward(x, y, 2.0, None),
            rows(4),
            public(5, 4),
        ),
        lose(
            "_cdist_forward over the examples",
            lambda x: aten._cdist_forward(x, x, 2.0, None),
            batched(N, (4,), 1),
        ),
        lose(
            "_cdist_forward of all pairs", lambda x: aten._cdist_forward(x, x, 2.0, None), rows(4)
        ),
        follow("_euclidean_dist", aten._euclidean_dist, rows(2, 4), rows(5, 4)),
        lose("_euclidean_dist of all pairs", aten._euclidean_dist, rows(4), rows(4)),
        follow("cdist", infer(torch.cdist), rows(2, 4), rows(5, 4)),
        lose("cdist of all pairs", infer(torch.cdist), rows(4), rows(4)),
        follow("bilinear", F.bilinear, rows(4), rows(5), public(2, 4, 5)),
        lose("bilinear of one", F.bilinear, rows(4), public(N, 5), public(2, 4, 5)),
        lose("bilinear with examples as weights", F.bilinear, rows(4), rows(5), rows(4, 5)),
        lose(
            "_trilinear over the examples",
            lambda x, w, y: aten._trilinear(x, w, y, [1], [], [1], [0, 2]),
            rows(4),
            public(N, 2, 4),
            rows(4),
        ),
        *convolutions(),
    ]


def _scaled(x, weight):
    """Return a product of 8-bit numbers, in float64."""
    x, weight = x.to(torch.float8_e4m3fn), weight.t().contiguous().t().to(torch.float8_e4m3fn)
    one = torch.ones(())
    # torch's own kernel runs on every processor, and oneDNN's on some.
    with torch.backends.mkldnn.flags(enabled=False):
        return torch._scaled_mm(x, weight, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def convolutions():
    rest = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    flags = [False, False, False, False]
    image, kernel = rows(2, 5, 5), public(4, 2, 3, 3)
    plain = {
        "convolution": lambda x, w, b=None: aten.convolution(x, w, b, *rest),
        "_convolution": lambda x, w, b=None: aten._convolution(x, w, b, *rest, *flags),
        "mkldnn_convolution": lambda x, w, b=None: aten.mkldnn_convolution(
            x.float(), w.float(), None if b is None else b.float(), [0, 0], [1, 1], [1, 1], 1
        ),
        "_slow_conv2d_forward": lambda x, w, b=None: aten._slow_conv2d_forward(
            x, w, [3, 3], b, [1, 1], [0, 0]
        ),
        "thnn_conv2d": infer(lambda x, w, b=None: aten.thnn_conv2d(x, w, [3, 3], b)),
    }
    cases = []
    for name, call in plain.items():
        cases.append(follow(name, call, image, kernel, public(4)))
        cases.append(
            follow(f"{name}, folded", call, batched(2, (2, 5, 5), 0, 2, 2), kernel, size=2)
        )
        cases.append(lose(f"{name} of channels", call, batched(2, (4, 5, 5), 1), kernel, size=2))
        cases.append(lose(f"{name} of rows", call, batched(5, (2, 2, 5), 2), kernel, size=5))
        cases.append(
            lose(f"{name} with examples as kernels", call, public(1, 2, 5, 5), rows(2, 3, 3))
        )
        cases.append(
            lose(f"{name} with examples as a bias", call, rows(2, 5, 5), public(N, 2, 3, 3), rows())
        )
        cases.append(
            lose(
                f"{name} of the examples with themselves",
                lambda x, call=call: call(x, x),
                rows(N, 3, 3),
            )
        )
    cube, cubic = rows(2, 4, 4, 4), public(4, 2, 3, 3, 3)
    ones, zeros = [1, 1, 1], [0, 0, 0]
    depthwise = public(2, 1, 3, 3)
    return [
        *cases,
        follow(
            "slow_conv3d_forward",
            lambda x, w: aten.slow_conv3d_forward(x, w, [3, 3, 3], None, ones, zeros),
            cube,
            cubic,
        ),
        follow("transposed", F.conv_transpose2d, image, public(2, 4, 3, 3)),
        follow("one dimension", F.conv1d, rows(2, 5), public(4, 2, 3)),
        follow("grouped", lambda x, w: F.conv2d(x, w, groups=2), image, depthwise),
        *(
            follow(
                f"groups of the examples, {name}",
                lambda x, w, b=None, call=call, g=g: call(x, w, b, groups=g * N),
                batched(N, (1, 5, 5), 1, 1, 4),
                batched(N, (4 // g, 3, 3), 0, 1, 4),
                *operands,
            )
            for name, call, g, operands in (
                ("plain", F.conv2d, 1, ()),
                ("two each", F.conv2d, 2, ()),
                ("with a bias", F.conv2d, 1, (batched(N, (), 0, 1, 4),)),
                ("transposed", F.conv_transpose2d, 2, ()),
            )
        ),
        lose(
            "groups of the examples with kernels of their places",
            lambda x, w: F.conv2d(x, w, groups=N),
            batched(N, (1, 5, 5), 1, 1, 2),
            public(3 * N, 2, 3, 3),
        ),
        lose(
            "groups of several examples",
            lambda x, w: F.conv2d(x, w, groups=2),
            batched(4, (1, 5, 5), 1),
            public(4, 2, 3, 3),
            size=4,
        ),
        lose(
            "groups of channels before the examples",
            lambda x, w: F.conv2d(x, w, groups=2),
            batched(2, (1, 5, 5), 1, 2, 1),
            public(4, 2, 3, 3),
            size=2,
        ),
        follow("conv_tbc", torch.conv_tbc, batched(N, (5, 2), 1), public(3, 2, 4), public(4)),
        lose(
            "conv_tbc over the examples",
            torch.conv_tbc,
            batched(5, (2, 2), 0),
            public(3, 2, 4),
            public(4),
            size=5,
        ),
        lose(
            "conv_tbc of channels",
            torch.conv_tbc,
            batched(N, (5, 2), 2),
            public(3, N, 4),
            public(4),
        ),
    ]


# -- operations on trailing dimensions -------------------------------------------------------------


def build_trailing_table():
    """Return operations that work within the last dimensions: of lines, images and volumes of one
    channel.
    """
    line, image, volume = (6,), (6, 6), (4, 4, 4)
    calls = {
        "avg_pool1d": (line, infer(lambda x: F.avg_pool1d(x, 2))),
        "avg_pool2d": (image, lambda x: F.avg_pool2d(x, 2)),
        "avg_pool3d": (volume, lambda x: F.avg_pool3d(x, 2)),
        "adaptive_avg_pool1d": (line, infer(lambda x: F.adaptive_avg_pool1d(x, 2))),
        "adaptive_avg_pool2d": (image, infer(lambda x: F.adaptive_avg_pool2d(x, 2))),
        "adaptive_avg_pool3d": (volume, infer(lambda x: F.adaptive_avg_pool3d(x, 2))),
        "_adaptive_avg_pool2d": (image, lambda x: F.adaptive_avg_pool2d(x, 2)),
        "_adaptive_avg_pool3d": (volume, lambda x: F.adaptive_avg_pool3d(x, 2)),
        "adaptive_max_pool2d": (image, lambda x: F.adaptive_max_pool2d(x, 2, True)),
        "adaptive_max_pool3d": (volume, lambda x: F.adaptive_max_pool3d(x, 2, True)),
        "max_pool1d": (line, infer(lambda x: torch.max_pool1d(x, 2))),
        "max_pool2d": (image, infer(lambda x: torch.max_pool2d(x, 2))),
        "max_pool2d_with_indices": (image, lambda x: F.max_pool2d(x, 2, return_indices=True)),
        "max_pool3d_with_indices": (volume, lambda x: F.max_pool3d(x, 2, return_indices=True)),
        "reflection_pad1d": (line, lambda x: F.pad(x, (1, 2), "reflect")),
        "reflection_pad2d": (image, lambda x: F.pad(x, (1, 2, 0, 1), "reflect")),
        "reflection_pad3d": (volume, lambda x: F.pad(x, (1, 1, 1, 1, 0, 1), "reflect")),
        "replication_pad1d": (line, lambda x: F.pad(x, (1, 2), "replicate")),
        "replication_pad2d": (image, lambda x: F.pad(x, (1, 2, 0, 1), "replicate")),
        "replication_pad3d": (volume, lambda x: F.pad(x, (1, 1, 1, 1, 0, 1), "replicate")),
        "upsample_nearest1d": (line, lambda x: F.interpolate(x, 4)),
        "upsample_nearest2d": (image, lambda x: F.interpolate(x, 4)),
        "upsample_nearest3d": (volume, lambda x: F.interpolate(x, 5)),
        "_upsample_nearest_exact1d": (line, lambda x: F.interpolate(x, 4, mode="nearest-exact")),
        "_upsample_nearest_exact2d": (image, lambda x: F.interpolate(x, 4, mode="nearest-exact")),
        "_upsample_nearest_exact3d": (volume, lambda x: F.interpolate(x, 5, mode="nearest-exact")),
        "upsample_linear1d": (line, lambda x: F.interpolate(x, 4, mode="linear")),
        "upsample_bilinear2d": (image, lambda x: F.interpolate(x, 4, mode="bilinear")),
        "upsample_bicubic2d": (image, lambda x: F.interpolate(x, 4, mode="bicubic")),
        "upsample_trilinear3d": (volume, lambda x: F.interpolate(x, 5, mode="trilinear")),
        "_upsample_bilinear2d_aa": (
            image,
            lambda x: F.interpolate(x, 4, mode="bilinear", antialias=True),
        ),
        "_upsample_bicubic2d_aa": (
            image,
            lambda x: F.interpolate(x, 4, mode="bicubic", antialias=True),
        ),
    }
    cases = []
    for name, (shape, call) in calls.items():
        cases += places(name, call, (2, *shape), (0,))
        cases.append(follow(f"{name} of channels", call, batched(N, (2, *shape), 1)))
        for dim in range(2, 2 + len(shape)):
            size = shape[dim - 2] // 2
            rest = (2, 2, *shape[: dim - 2], *shape[dim - 1 :])
            cases.append(
                lose(
                    f"{name} over the examples at {dim}",
                    call,
                    batched(size, rest, dim, 2),
                    size=size,
                )
            )
    matrices = {
        "tril": torch.tril,
        "triu": torch.triu,
        "linalg_inv_ex": torch.linalg.inv,
        "linalg_pinv": torch.linalg.pinv,
        "linalg_eig": torch.linalg.eigvals,
        "linalg_lu_factor_ex": torch.linalg.lu_factor,
        "linalg_lu": torch.linalg.lu,
        "cholesky_inverse": torch.cholesky_inverse,
        "linalg_cholesky_ex": torch.linalg.cholesky,
        "linalg_qr": torch.linalg.qr,
        "_linalg_svd": torch.linalg.svdvals,
        "_linalg_eigh": torch.linalg.eigvalsh,
        "linalg_matrix_exp": torch.linalg.matrix_exp,
        "_linalg_det": torch.linalg.det,
        "_linalg_slogdet": torch.linalg.slogdet,
        "_linalg_solve_ex": lambda x: torch.linalg.solve(x, x + 1),
        "linalg_solve_triangular": lambda x: torch.linalg.solve_triangular(x, x + 1, upper=True),
        "cholesky_solve": lambda x: torch.cholesky_solve(x + 1, x),
    }
    for name, call in matrices.items():
        cases += places(name, call, (4, 4), (0,), draw=positive_matrices)
        cases += [
            follow(f"{name} of pairs", call, batched(N, (2, 4, 4), 1, draw=positive_matrices))
        ]
        cases += [lose(f"{name} over rows", call, batched(N, (N,), 0, draw=positive_matrices))]
        cases += [lose(f"{name} over columns", call, batched(N, (2, N), 2, draw=positive_matrices))]
    return [
        *cases,
        *places("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (4, 4, 3), (0,), (2,)),
        *places("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (2, 4, 6), (0,)),
        lose(
            "pixel_shuffle of channels",
            lambda x: F.pixel_shuffle(x, 2),
            batched(4, (2, 3, 3), 1),
            size=4,
        ),
        *places("im2col", lambda x: F.unfold(x, 2), (2, 4, 4), (0,), (1, 2, 3)),
        *places("col2im", lambda x: F.fold(x, (3, 3), 2), (4, 4), (0,)),
        lose(
            "col2im of columns",
            lambda x: F.fold(x, (3, 3), 2),
            batched(4, (2, 4), 2),
            size=4,
        ),
        follow(
            "fractional_max_pool2d",
            _fractional(F.fractional_max_pool2d),
            rows(2, 6, 6),
            is_random=True,
        ),
        follow(
            "fractional_max_pool3d",
            _fractional(F.fractional_max_pool3d),
            rows(2, 6, 6, 6),
            is_random=True,
        ),
        lose(
            "fractional pools of channels",
            _fractional(F.fractional_max_pool2d),
            batched(N, (6, 6), 0),
        ),
        follow(
            "max_unpool2d",
            lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
            rows(2, 4, 4),
        ),
        follow(
            "max_unpool3d",
            lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2),
            rows(2, 4, 4, 4),
        ),
        lose(
            "max_unpool2d of channels",
            lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
            batched(N, (4, 4)),
        ),
        follow("grid_sampler_2d", _sampled, rows(2, 4, 4), rows(3, 3, 2)),
        follow("grid_sampler_3d", _sampled, rows(2, 4, 4, 4), rows(3, 3, 3, 3)),
        follow("grid_sampler_2d of one grid", _sampled, batched(N, (2, 4, 4)), rows(3, 3, 2)),
        lose(
            "grid_sampler_2d of channels",
            _sampled,
            batched(N, (2, 4, 4), 1),
            public(2, 3, 3, 2),
        ),
        lose(
            "grid_sampler_2d of points",
            _sampled,
            public(2, 2, 4, 4),
            batched(N, (2, 3, 2), 1),
        ),
        lose("grid_sampler_2d across", _sampled, rows(N, 4, 4), batched(N, (N, 3, 2), 1)),
        follow("affine_grid_generator", lambda x: F.affine_grid(x, [N, 1, 4, 4]), rows(2, 3)),
        *places("channel_shuffle", lambda x: F.channel_shuffle(x, 1), (4, 4), (0,), (1, 2)),
        *places(
            "native_channel_shuffle",
            infer(lambda x: F.native_channel_shuffle(x, 2)),
            (4, 3, 3),
            (0,),
        ),
        follow("linalg_cross", torch.linalg.cross, rows(4, 3), rows(4, 3)),
        lose(
            "linalg_cross over the examples",
            lambda x: torch.linalg.cross(x, x.flip(1), dim=0),
            rows(4),
        ),
        *places("constant_pad_nd", lambda x: F.pad(x, (1, 1, 2, -1)), (4, 5), (0,), (1, 2)),
    ]


def _fractional(pool):
    return lambda x: pool(x, 2, output_size=3)


def _sampled(x, grid):
    return F.grid_sample(x, grid, align_corners=False)


# -- normalisation ---------------------------------------------------------------------------------


def build_normalisation_table():
    def no_statistics(x):
        return aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)

    def with_statistics(name, *flags):
        function = getattr(aten, name)

        def call(x):
            channels = x.shape[1]
            mean, variance = (
                torch.zeros(channels, dtype=x.dtype),
                torch.ones(channels, dtype=x.dtype),
            )
            return function(x, None, None, mean, variance, *flags, 0.1, 1e-5)[0]

        return call

    return [
        *each(
            places,
            {
                "native_layer_norm": lambda x: aten.native_layer_norm(
                    x, x.shape[-1:], None, None, 1e-5
                ),
                "layer_norm": infer(lambda x: F.layer_norm(x, x.shape[-1:])),
                "_fused_rms_norm": infer(
                    lambda x: aten._fused_rms_norm(x, x.shape[-1:], None, 1e-5)
                ),
                "rms_norm": infer(lambda x: F.rms_norm(x, x.shape[-1:])),
            },
            (4, 5),
            (0, 1),
            (2,),
        ),
        *places(
            "native_layer_norm of two",
            lambda x: aten.native_layer_norm(x, x.shape[-2:], None, None, 0.1),
            (4, 5),
            (0,),
            (1, 2),
        ),
        lose(
            "layer_norm with examples as weights",
            lambda x, w: F.layer_norm(x, (N,), w),
            public(2, N),
            rows(),
        ),
        lose(
            "layer_norm with weights of examples",
            lambda x, w: F.layer_norm(x, (N,), w),
            rows(N),
            rows(),
        ),
        *places("native_group_norm", _group_norm, (4, 3), (0,), (1, 2)),
        *places("group_norm", infer(lambda x: F.group_norm(x, 1)), (4, 3), (0,), (1, 2)),
        lose("group norm of joined examples", _joined_group_norm, rows(4, 3)),
        *places("instance norm", no_statistics, (5, 6), (1,), (0, 2)),
        *each(
            places,
            {
                "frozen": with_statistics("native_batch_norm", False),
                "frozen, legit": with_statistics("_native_batch_norm_legit_no_training"),
                "_batch_norm_no_update": with_statistics("_batch_norm_no_update"),
            },
            (4, 5),
            (0, 2),
            (1,),
        ),
        *each(
            places,
            {
                "trained": with_statistics("native_batch_norm", True),
                "trained, legit": with_statistics("_native_batch_norm_legit", True),
                "_batch_norm_with_update": with_statistics("_batch_norm_with_update"),
            },
            (4, 5),
            (1,),
            (0, 2),
        ),
        lose(
            "batch norm with weights of examples",
            lambda x, w: F.batch_norm(x, None, None, w, training=True),
            rows(N),
            rows(),
        ),
    ]


def _group_norm(x):
    return aten.native_group_norm(x, None, None, x.shape[0], x.shape[1], x[0, 0].numel(), 1, 1e-5)


def _joined_group_norm(x):
    return aten.native_group_norm(x, None, None, 1, x.shape[0] * x.shape[1], x.shape[2], 1, 1e-5)


# -- lookups ---------------------------------------------------------------------------------------


def build_lookup_table():
    ids, few = draw_integers(0, 4), draw_integers(0, 2)
    arange = torch.arange
    table = public(4, 5)

    def bags(**flags):
        return lambda i, w: F.embedding_bag(i, w, **flags)

    return [
        *each(
            follow,
            {
                "embedding": F.embedding,
                "bags": bags(),
                "bags, summed": bags(mode="sum"),
                "bags, largest": bags(mode="max"),
                "bags with padding": bags(padding_idx=0),
            },
            rows(2, draw=ids),
            table,
        ),
        follow("embedding, folded", F.embedding, batched(N, (2,), 1, 2, 2, ids), table),
        lose("embedding into the examples", F.embedding, public(2, draw=few), rows(5)),
        lose("embedding of both", F.embedding, rows(2, draw=few), rows(5)),
        follow(
            "bags with weights",
            lambda i, w, p: F.embedding_bag(i, w, per_sample_weights=p, mode="sum"),
            rows(2, draw=ids),
            table,
            rows(2),
        ),
        follow(
            "bags forward only",
            lambda i, w: aten._embedding_bag_forward_only(w, i, arange(N) * 2)[0],
            batched(N, (), 0, 1, 2, ids),
            table,
        ),
        follow(
            "two bags an example",
            lambda i, w: F.embedding_bag(i, w, arange(2 * N) * 2),
            batched(N, (), 0, 1, 4, ids),
            table,
        ),
        lose("bags into the examples", bags(), public(2, 2, draw=few), rows(5)),
        lose(
            "bags across the examples",
            lambda i, w: F.embedding_bag(i, w, arange(N)),
            batched(N, (), 0, 1, 2, ids),
            table,
        ),
        lose(
            "bags of two lengths",
            lambda i, w: F.embedding_bag(i, w, arange(2 * N)),
            batched(N, (), 0, 1, 3, ids),
            table,
        ),
        lose(
            "bags with private places",
            lambda i, o, w: F.embedding_bag(i, w, o.sort()[0] * 0),
            rows(draw=ids),
            rows(draw=few),
            table,
        ),
        lose(
            "bags with a last place",
            lambda i, w: aten._embedding_bag(w, i, arange(2 * N) * 2, include_last_offset=True)[0],
            batched(N, (), 0, 1, 4, ids),
            table,
        ),
        follow("gather", lambda x, i: x.gather(1, i), rows(4), rows(2, draw=ids)),
        *places(
            "gather of a public table",
            lambda i: torch.arange(20.0).view(5, 4).gather(0, i),
            (3,),
            (0,),
            draw=ids,
        )[:2],
        lose("gather of examples", lambda x, i: x.gather(0, i), rows(4), public(2, 4, draw=few)),
        lose(
            "scatter into a public table",
            lambda i, x: torch.zeros(5, 4).double().scatter_add(0, i, x),
            rows(4, draw=ids),
            rows(4),
        ),
        follow("take", lambda i: torch.arange(20.0).take(i), rows(2, draw=ids)),
        lose("take of the examples", lambda x, i: x.take(i), rows(4), rows(2, draw=ids)),
        follow("searchsorted", lambda x, y: torch.searchsorted(x.sort(1)[0], y), rows(4), rows(2)),
        *places("searchsorted of public", lambda y: torch.searchsorted(torch.rand(4) * 0 + 0.5, y)),
        lose(
            "searchsorted of all examples",
            lambda x, y: torch.searchsorted(x.sort()[0], y),
            rows(),
            rows(2),
        ),
        lose(
            "searchsorted along the examples",
            lambda x, y: torch.searchsorted(x, y),
            batched(N, (2,), 1),
            batched(N, (2,), 1),
        ),
        follow("scatter", lambda x, i, y: x.scatter(1, i, y), rows(4), rows(1, draw=ids), rows(1)),
        follow(
            "scatter a number", lambda i: torch.zeros(N, 4).scatter_(1, i, 1.0), rows(1, draw=ids)
        ),
        follow(
            "scatter_add",
            lambda x, i, y: x.scatter_add(1, i, y),
            rows(4),
            rows(2, draw=ids),
            rows(2),
        ),
        follow(
            "scatter_reduce",
            lambda x, i, y: x.scatter_reduce(1, i, y, "amax"),
            rows(4),
            rows(2, draw=ids),
            rows(2),
        ),
        follow(
            "take_along_dim",
            infer(lambda x, i: torch.take_along_dim(x, i, 1)),
            rows(4),
            rows(2, draw=ids),
        ),
        follow(
            "index_add", lambda x, y: x.index_add(1, torch.tensor([2, 0, 2]), y), rows(4), rows(3)
        ),
        follow(
            "index_add to public",
            lambda y: torch.zeros(N, 4).double().index_add(1, torch.tensor([2, 0]), y),
            rows(2),
        ),
        lose(
            "index_add of examples",
            lambda x, y: x.index_add(0, torch.tensor([0, 0, 1]), y),
            public(4, 2),
            rows(2),
        ),
        lose(
            "index_add to examples",
            lambda x, y: x.index_add(0, torch.tensor([0, 0]), y),
            rows(2),
            public(2, 2),
        ),
        lose(
            "index_add at examples",
            lambda x, i: x.index_add(0, i, torch.ones(N, 2).double()),
            public(4, 2),
            rows(draw=ids),
        ),
        lose(
            "index_add across",
            lambda x, y: x.index_add(2, torch.tensor([2, 0]), y),
            rows(N, 4),
            batched(N, (N, 2), 1),
        ),
        follow(
            "index_copy", lambda x, y: x.index_copy(1, torch.tensor([2, 0]), y), rows(4), rows(2)
        ),
        lose(
            "index_copy of examples",
            lambda x, y: x.index_copy(0, torch.tensor([2, 0, 1]), y),
            rows(2),
            rows(2),
        ),
        *each(
            follow,
            {
                "index_fill": lambda x: x.index_fill(1, torch.tensor([2, 0]), 0.5),
                "index_select": lambda x: x.index_select(1, torch.tensor([2, 0, 2])),
                "index_select of all": lambda x: x.index_select(0, arange(N).repeat(2)),
                "repeat_interleave": lambda x: x.index_select(0, arange(N).repeat_interleave(2)),
            },
            rows(4),
        ),
        lose(
            "index_fill of examples", lambda x: x.index_fill(0, torch.tensor([2, 0]), 0.5), rows(4)
        ),
        follow(
            "index_reduce",
            lambda x, y: x.index_reduce(1, torch.tensor([2, 0]), y, "prod"),
            rows(4),
            rows(2),
        ),
        follow(
            "index_select by examples", lambda x, i: x.index_select(0, i), table, rows(draw=ids)
        ),
        *index_table(ids, few),
        *index_put_table(ids, few),
    ]


def index_table(ids, few):
    arange = torch.arange
    mask = torch.tensor([True, False, True, True])
    one = torch.tensor([2, 0])
    return [
        *places("index", lambda x: x[:, one], (4,), (0,)),
        *places("index of two", lambda x: x[:, one, :, one], (4, 2, 4), (0,)),
        *places("_unsafe_index", lambda x: aten._unsafe_index(x, [None, one]), (4,), (0,)),
        *places("index by a mask", lambda x: x[:, mask], (4, 4), (0, 2)),
        *places("index by a mask of matrices", lambda x: x[:, mask[:, None] & mask], (4, 4), (0,)),
        follow("index by examples", lambda x, i: x[i], public(4, 5), rows(2, draw=ids)),
        follow("index of each example", lambda x, i: x[arange(N), i], rows(4, 5), rows(draw=ids)),
        follow(
            "index of each fold",
            lambda x, i: x[arange(2 * N), i],
            batched(N, (4,), pre=2),
            batched(N, (), pre=2, draw=ids),
        ),
        lose("index of other examples", lambda x: x[torch.tensor([1, 0, 2])], rows(4)),
        lose("index that counts", lambda x, i: x[i], rows(4), rows(draw=counting_numbers)),
    ]


def index_put_table(ids, few):
    arange = torch.arange
    one = torch.tensor([2, 0])

    def written(*index, add=False):
        return lambda x, y: aten.index_put(x, list(index), y, add)

    rest = None
    return [
        *each(
            follow,
            {
                "index_put": written(rest, one),
                "index_put, added": written(rest, torch.tensor([1, 1]), add=True),
                "_index_put_impl_": lambda x, y: aten._index_put_impl_(x, [None, one], y),
                "_unsafe_index_put": lambda x, y: aten._unsafe_index_put(x, [None, one], y),
            },
            rows(4),
            rows(2),
        ),
        follow("index_put of public", written(rest, one), rows(4), public(2)),
        follow("index_put to public", written(rest, one), public(N, 4, draw=equal_rows), rows(2)),
        follow("index_put to each", written(arange(N), torch.tensor([1])), rows(4), rows()),
        lose("index_put to other examples", written(torch.tensor([1, 0, 2])), rows(4), rows(4)),
        lose(
            "index_put that counts",
            lambda x, i, y: x.index_put([i], y),
            rows(4),
            rows(draw=counting_numbers),
            rows(4),
        ),
        follow(
            "index_put at examples",
            lambda x, i, y: x.index_put([arange(N), i], y),
            rows(4),
            rows(draw=ids),
            rows(),
        ),
        follow(
            "index_put by a mask",
            lambda x: x.index_put([x > 0.5], torch.zeros((), dtype=x.dtype)),
            rows(4),
        ),
    ]


# -- attention and losses --------------------------------------------------------------------------


def build_attention_table():
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    calls = {
        flash: getattr(aten, flash),
        "_scaled_dot_product_attention_math": infer(aten._scaled_dot_product_attention_math),
        "scaled_dot_product_attention": infer(F.scaled_dot_product_attention),
    }
    cases = []
    for name, call in calls.items():
        q, k = rows(2, 4, 5), rows(2, 6, 5)
        cases += [
            follow(name, call, q, k, k),
            follow(f"{name} of heads", call, *[batched(2, (2, 4, 5), 1, 2, 2)] * 3, size=2),
            lose(f"{name} over the examples", call, *[batched(N, (2, 2, 5), 2)] * 3),
            lose(f"{name} over features", call, *[batched(N, (2, 2, 5), 3)] * 3),
            lose(
                f"{name} across",
                call,
                rows(N, 4, 5),
                batched(N, (N, 4, 5), 1),
                batched(N, (N, 4, 5), 1),
            ),
            lose(
                f"{name} with another batch",
                call,
                batched(N, (2, 4, 5), 0, 1, 2),
                *[batched(N, (2, 4, 5), 0, 2, 1)] * 2,
            ),
        ]
    masked = infer(F.scaled_dot_product_attention)
    grouped = infer(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    return [
        *cases,
        follow("with a mask", masked, *[rows(2, 4, 5)] * 3, rows(1, 4, 4)),
        follow("with a public mask", masked, *[rows(2, 4, 5)] * 3, public(4, 4)),
        lose("with a mask of heads", masked, *[rows(N, 4, 5)] * 3, batched(N, (4, 4), 0)),
        lose("with a mask of places", masked, *[rows(2, N, 5)] * 3, batched(N, (N,), 0)),
        follow("with groups", grouped, rows(4, 3, 5), rows(2, 3, 5), rows(2, 3, 5)),
        lose(
            "with groups of examples",
            grouped,
            public(1, 6, 3, 5),
            batched(N, (1, 3, 5), 1),
            batched(N, (1, 3, 5), 1),
        ),
    ]


def build_loss_table():
    losses = {
        "mse_loss": F.mse_loss,
        "smooth_l1_loss": F.smooth_l1_loss,
        "huber_loss": F.huber_loss,
        "binary_cross_entropy": F.binary_cross_entropy,
        "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
        "soft_margin_loss": F.soft_margin_loss,
        "l1_loss": infer(
            lambda x, y, reduction: aten.l1_loss(x, y, ["none", "mean", "sum"].index(reduction))
        ),
        "kl_div": infer(F.kl_div),
    }
    cases = []
    for name, call in losses.items():
        for reduction in ("none", "mean", "sum"):

            def reduced(x, y, call=call, reduction=reduction):
                return call(x, y, reduction=reduction)

            cases += [
                follow(f"{name}, {reduction}", reduced, rows(4), rows(4)),
                follow(
                    f"{name}, {reduction}, folded",
                    reduced,
                    *[batched(N, (4,), 1, 2, 2)] * 2,
                ),
                lose(f"{name}, {reduction}, across", reduced, rows(N), batched(N, (N,), 1)),
            ]
    labels = draw_integers(0, 5)

    def likelihood(**flags):
        return lambda x, y: F.nll_loss(x, y, **flags)

    weights = torch.rand(5).double()
    for reduction in ("none", "mean", "sum"):

        def margin(x, y, reduction=reduction):
            return F.multi_margin_loss(x, y, reduction=reduction)

        def margins(x, y, reduction=reduction):
            return F.multilabel_margin_loss(x, y, reduction=reduction)

        cases += [
            follow(f"multi_margin_loss, {reduction}", margin, rows(5), rows(draw=labels)),
            lose(
                f"multi_margin_loss, {reduction}, of one",
                margin,
                batched(5, (), 0),
                public(draw=labels),
                size=5,
            ),
            follow(
                f"multilabel_margin_loss_forward, {reduction}",
                margins,
                rows(5),
                rows(5, draw=labels),
            ),
        ]
    return [
        *cases,
        follow(
            "binary_cross_entropy_with_logits, weighted",
            lambda x, y: F.binary_cross_entropy_with_logits(
                x, y, weights, reduction="none", pos_weight=weights
            ),
            rows(5),
            rows(5),
        ),
        lose(
            "binary_cross_entropy_with_logits, weights of places",
            lambda x, y: F.binary_cross_entropy_with_logits(
                x, y, weights[:N, None].expand(N, 5), reduction="none"
            ),
            rows(5),
            rows(5),
        ),
        lose(
            "multi_margin_loss with public labels of places",
            lambda x, y: F.multi_margin_loss(x, y, reduction="none"),
            rows(5),
            public(N, draw=labels),
        ),
        lose(
            "multilabel_margin_loss_forward across",
            lambda x, y: F.multilabel_margin_loss(x, y, reduction="none"),
            rows(N),
            batched(N, (N,), 1, draw=draw_integers(0, N)),
        ),
        lose(
            "multi_margin_loss with private weights",
            lambda x, y, w: F.multi_margin_loss(x, y, weight=w, reduction="none"),
            rows(N),
            rows(draw=draw_integers(0, N)),
            rows(),
        ),
        lose(
            "mse_loss of all pairs",
            lambda x: F.mse_loss(x[:, None].expand(N, N), x.expand(N, N)),
            rows(),
        ),
        *each(
            follow,
            {
                "nll_loss_forward": likelihood(reduction="none"),
                "nll_loss_forward, weighted": likelihood(reduction="none", weight=weights),
                "nll_loss_forward, summed": lambda x, y: F.nll_loss(x, y, reduction="sum"),
            },
            rows(5),
            rows(draw=labels),
        ),
        lose("nll_loss_forward, mean", likelihood(), rows(5), rows(draw=labels)),
        lose(
            "nll_loss_forward, weighted mean",
            likelihood(weight=weights),
            rows(5),
            rows(draw=labels),
        ),
        lose(
            "nll_loss_forward over the examples",
            likelihood(reduction="none"),
            batched(5, (2,), 1),
            public(2, draw=labels),
            size=5,
        ),
        lose(
            "nll_loss_forward of one",
            likelihood(reduction="none"),
            batched(5, (), 0),
            public(draw=draw_integers(0, 5)),
            size=5,
        ),
        lose(
            "nll_loss_forward with private weights",
            lambda x, y, w: F.nll_loss(x, y, w, reduction="none"),
            rows(N),
            rows(draw=draw_integers(0, N)),
            rows(),
        ),
        follow(
            "nll_loss2d_forward",
            likelihood(reduction="none"),
            rows(5, 2, 2),
            rows(2, 2, draw=labels),
        ),
        follow(
            "nll_loss2d_forward of rows",
            likelihood(reduction="none"),
            batched(N, (2, 5, 2), 2),
            batched(N, (2, 2), 1, draw=labels),
        ),
        lose(
            "nll_loss2d_forward across",
            likelihood(reduction="none"),
            rows(5, N, 2),
            batched(N, (N, 2), 1, draw=labels),
        ),
        follow("ctc", _ctc, batched(N, (6, 5), 1), rows(3, draw=draw_integers(1, 5))),
        follow(
            "ctc with private lengths",
            _ctc_with_lengths,
            batched(N, (6, 5), 1),
            rows(3, draw=draw_integers(1, 5)),
            rows(draw=draw_integers(1, 4)),
        ),
        lose(
            "ctc over the examples",
            _ctc,
            batched(6, (N, 5), 0),
            public(N, 3, draw=draw_integers(1, 5)),
            size=6,
        ),
        lose(
            "ctc of joined targets",
            _joined_ctc,
            batched(N, (6, 5), 1),
            rows(3, draw=draw_integers(1, 5)),
        ),
    ]


def _ctc(x, y):
    return aten._ctc_loss(x.log_softmax(2), y, [6] * x.shape[1], [3] * x.shape[1])[0]


def _ctc_with_lengths(x, y, lengths):
    return aten._ctc_loss(x.log_softmax(2), y, torch.full((N,), 6), lengths)[0]


def _joined_ctc(x, y):
    return aten._ctc_loss(x.log_softmax(2), y.flatten(), [6] * N, [3] * N)[0]


# -- totals ----------------------------------------------------------------------------------------


def build_total_table():
    def keeping(call):
        return lambda x: call(x.sum())

    kept = {
        "neg": torch.neg,
        "view": lambda t: t.view(1, 1),
        "reshape": infer(lambda t: t.reshape(1)),
        "squeeze": lambda t: t.view(1).squeeze(),
        "unsqueeze": lambda t: t.unsqueeze(0),
        "clone": torch.clone,
        "detach": torch.detach,
        "alias": aten.alias,
        "_to_copy": lambda t: t.float().double(),
        "expand": lambda t: t.expand(1),
        "positive": infer(torch.positive),
        "sum": lambda t: t.view(1).sum(),
        "mean": lambda t: t.view(1).mean(0),
        "select": lambda t: t.view(1)[0],
        "_unsafe_view": lambda t: aten._unsafe_view(t, [1]),
        "_reshape_alias": lambda t: aten._reshape_alias(t, [1], [1]),
        "contiguous": infer(aten.contiguous),
        "lift_fresh": lambda t: torch.add(aten.lift_fresh(t), 0),
        "add": lambda t: t + 1 + torch.ones(()),
        "add_": lambda t: t.add_(t),
        "sub": lambda t: t - 2 * t,
        "rsub": lambda t: 1 - t,
        "mul": lambda t: 2 * t * torch.tensor(0.5),
        "mul_": lambda t: t.mul_(3),
        "div": lambda t: t / 5,
        "a mean": lambda t: t / (2 * N),
        "true_divide": infer(lambda t: torch.true_divide(t, 4)),
    }
    gone = {
        "a square": lambda t: t * t,
        "exp": torch.exp,
        "an inverse": lambda t: 1 / t,
        "a rounded part": lambda t: torch.div(t, 2, rounding_mode="floor"),
        "spread": lambda t: t.expand(2),
        "spread by a product": lambda t: t * torch.ones(2).double(),
        "spread by a sum": lambda t: t + torch.ones(2).double(),
        "a ratio": lambda t: t / t,
    }
    return [
        *[follow(f"total, {name}", keeping(call), rows(4)) for name, call in kept.items()],
        *[lose(f"total, {name}", keeping(call), rows(4)) for name, call in gone.items()],
        *each(
            lose,
            {
                "a sum and a mean": lambda x: x.sum() + x.mean(),
                "a total and an example": lambda x: x + x.sum(),
                "an example times a total": lambda x: x * x.sum(),
                "a total written over": lambda x: torch.sum(x, (0, 1), out=x.sum()),
            },
            rows(4),
        ),
        *places("sum", lambda x: x.sum()),
        *places("mean", lambda x: x.mean()),
        *places("sum of one", lambda x: x.sum(0, keepdim=True), (1,), (0,)),
    ]


# -- public numbers that differ between the places of a batch --------------------------------------


def build_place_table():
    """Return calls in which a public operand has another row for each place, or the same row for
    all.
    """
    same, folded = public(N, 4, draw=equal_rows), batched(2, (4,), 0, 2, 2)
    index = draw_integers(0, 2)
    row = public(N, draw=draw_integers(0, 2))
    q = rows(2, 4, 5)
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    calls = {
        "add": (torch.add, rows(4), public(N, 4)),
        "add to public": (torch.add, public(N, 4), rows(4)),
        "add behind": (torch.add, batched(N, (4,), 1), public(N)),
        "where": (lambda x, m: torch.where(m, x, 0.0), rows(4), public(N, 4, draw=truths)),
        "cat": (lambda x, y: torch.cat([x, y], 1), rows(4), public(N, 4)),
        "stack": (lambda x, y: torch.stack([x, y], 1), rows(4), public(N, 4)),
        "bmm": (torch.bmm, rows(2, 4), public(N, 4, 5)),
        "bmm on the right": (torch.bmm, public(N, 2, 4), rows(4, 5)),
        "addmm": (lambda x, y: torch.addmm(y, x, torch.ones(4, 4).double()), rows(4), public(N, 4)),
        "addmm of public rows": (
            lambda x, y: torch.addmm(x, y, torch.ones(4, 4).double()),
            rows(4),
            public(N, 4),
        ),
        "addmm_ of public rows": (
            lambda x, y: x.clone().addmm_(y, torch.ones(4, 4).double()),
            rows(4),
            public(N, 4),
        ),
        "addmm of public columns": (
            lambda x, y: torch.addmm(x, torch.ones(2, 4).double(), y),
            batched(N, (2,), 1),
            public(4, N),
        ),
        "addmv of public rows": (
            lambda x, y: torch.addmv(x, y, torch.ones(4).double()),
            rows(),
            public(N, 4),
        ),
        "baddbmm of public rows": (
            lambda x, y: torch.baddbmm(x, y, torch.ones(2, 4, 5).double()),
            batched(N, (2, 5), 1),
            public(2, N, 4),
        ),
        "matmul": (infer(torch.matmul), rows(2, 4), public(N, 4, 5)),
        "cdist": (infer(torch.cdist), rows(2, 4), public(N, 5, 4)),
        "grid_sampler_2d": (_sampled, rows(2, 4, 4), public(N, 3, 3, 2)),
        "gather": (lambda x, i: x.gather(1, i), rows(4), public(N, 2, draw=draw_integers(0, 4))),
        "gather of public": (
            lambda x, i: x.gather(1, i),
            public(N, 4),
            rows(2, draw=draw_integers(0, 4)),
        ),
        "scatter_add": (
            lambda x, y: x.scatter_add(1, torch.zeros(N, 1, dtype=torch.int64), y),
            public(N, 4),
            rows(1),
        ),
        "index": (lambda x, i: x[torch.arange(N), i], rows(4), row),
        "index of public": (lambda i, x: x[torch.arange(N), i], rows(draw=index), public(N, 4)),
        "index_add": (lambda x, y: x.index_add(1, torch.tensor([2, 0]), y), rows(4), public(N, 2)),
        "index_put": (
            lambda x, y: aten.index_put(x, [None, torch.tensor([2, 0])], y),
            rows(4),
            public(N, 2),
        ),
        "index_put to public": (
            lambda y, x: aten.index_put(x, [None, torch.tensor([2, 0])], y),
            rows(2),
            public(N, 4),
        ),
        "index_put to each": (
            lambda x, y: x.index_put([torch.arange(N), torch.tensor([1])], y),
            rows(4),
            public(N),
        ),
        "index_put at places": (
            lambda x, i: x.index_put([torch.arange(N), i], torch.ones(()).double()),
            rows(4),
            row,
        ),
        "index_put by a mask": (
            lambda x, m: x.index_put([m], torch.ones(()).double()),
            rows(4),
            public(N, 4, draw=truths),
        ),
        "attention": (lambda q, k: attention(q, k, k), q, public(N, 2, 4, 5)),
        "attention with a mask": (
            lambda q, m: attention(q, q, q, attn_mask=m),
            q,
            public(N, 1, 4, 4),
        ),
        "mse_loss": (lambda x, y: F.mse_loss(x, y, reduction="none"), rows(4), public(N, 4)),
        "nll_loss": (lambda x, y: F.nll_loss(x, y, reduction="none"), rows(4), row),
        "ctc": (_ctc, batched(N, (6, 5), 1), public(N, 3, draw=draw_integers(1, 5))),
        "prelu": (infer(lambda x, w: F.prelu(x - 0.5, w)), batched(N, (2,), 1), public(N)),
        "instance norm": (
            lambda x, w: F.batch_norm(x, None, None, w, training=True),
            batched(N, (4, 5), 1),
            public(N),
        ),
        "bags": (
            lambda i, p: F.embedding_bag(
                i, torch.ones(4, 5).double(), per_sample_weights=p, mode="sum"
            ),
            rows(2, draw=draw_integers(0, 4)),
            public(N, 2),
        ),
    }
    return [
        *[lose(f"{name} by places", call, x, y) for name, (call, x, y) in calls.items()],
        follow("add the same", torch.add, rows(4), same),
        follow(
            "add the same to a fold", torch.add, folded, Operand((8, 4), None, equal_rows), size=2
        ),
        follow("cat with the same", lambda x, y: torch.cat([x, y], 1), rows(4), same),
        follow("add a view of one row", lambda x, y: x + y.expand(N, 4), rows(4), public(4)),
        follow("repeated weights", lambda x, y: x + y.repeat(N), rows(), public(1)),
        follow("bmm with the same", torch.bmm, rows(2, 4), public(N, 4, 5, draw=equal_rows)),
        *each(
            follow,
            {
                "random rows": lambda x: x * (torch.rand(N, 1) < 0.5),
                "random rows, drawn in place": lambda x: x * x.new_empty(N, 1).bernoulli_(0.5),
                "random rows of one chance": lambda x: x * torch.bernoulli(torch.full((N, 1), 0.5)),
            },
            rows(4),
            is_random=True,
        ),
        follow(
            "random entries",
            lambda x: x * (torch.rand_like(x) < 0.5),
            folded,
            size=2,
            is_random=True,
        ),
        *each(
            lose,
            {
                "random rows of several chances": lambda x, p: x * torch.bernoulli(p),
                "random rows of several means": lambda x, p: x * torch.normal(p, 1.0),
                "random rows, in place": lambda x, p: x * torch.zeros(N, 4).bernoulli_(p),
            },
            rows(4),
            public(N, 4),
        ),
        lose("a random order", lambda x: x + torch.randperm(N), rows()),
    ]


TABLES = {
    "elementwise": build_elementwise_table,
    "made of shapes": build_shapes_table,
    "views": build_view_table,
    "along": build_along_table,
    "products": build_product_table,
    "trailing": build_trailing_table,
    "normalisation": build_normalisation_table,
    "lookups": build_lookup_table,
    "attention": build_attention_table,
    "losses": build_loss_table,
    "totals": build_total_table,
    "places": build_place_table,
}


@cache
def check(table):
    """Return the faults of a table and the names of the rules that it used."""
    seen = Seen()
    found = [fault for case in TABLES[table]() for fault in faults(case, seen)]
    return found, seen.names


@pytest.mark.parametrize("table", TABLES)
def test_the_tracker_agrees_with_brute_force(table):
    found, _ = check(table)
    assert found == []


def test_every_rule_is_tested():
    seen = set().union(*[check(table)[1] for table in TABLES])
    assert sorted({*RULES, *TOTAL_RULES} - seen) == sorted(UNREACHABLE)
