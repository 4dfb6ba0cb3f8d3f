"""Whatever the tracker says of a structural operation is true: random shapes, places of the
examples and arguments.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkfc.tracking.states import BatchAxis
from tests.tracking.brute_force import Case, Operand, draw_integers, draw_normal, faults


class Choices:
    """What hypothesis chooses for one call."""

    def __init__(self, data):
        self._data = data
        self.size = data.draw(st.integers(2, 4), label="size")

    def pick(self, values):
        return self._data.draw(st.sampled_from(list(values)))

    def some(self, values):
        """Return at least one of some values."""
        return self._data.draw(
            st.lists(st.sampled_from(list(values)), min_size=1, max_size=3, unique=True)
        )

    def order(self, count):
        return list(self._data.draw(st.permutations(range(count))))

    def numbers(self, low, high, count):
        return self._data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    def length(self):
        """Return a length that often holds the examples."""
        return self.pick([self.size, 2 * self.size, 4 * self.size, 1, 2, 3, 4])

    def shape(self, low=1, high=4):
        return tuple(self.length() for _ in range(self.pick(range(low, high + 1))))

    def operand(self, shape, draw=draw_normal):
        """Return an operand whose examples lie anywhere in it; it is public where there is no
        place.
        """
        return Operand(tuple(shape), self.place(shape), draw)

    def place(self, shape):
        found = []
        for dim, length in enumerate(shape):
            parts = length // self.size
            if length % self.size == 0 and parts:
                found += [
                    BatchAxis(dim, pre, parts // pre)
                    for pre in range(1, parts + 1)
                    if parts % pre == 0
                ]
        return self.pick(found) if found else None


def view(c):
    x = c.operand(c.shape())
    factors = [p for length in x.shape for p in _primes(length)]
    if c.pick([False, True]):
        factors = [factors[i] for i in c.order(len(factors))]
    shape = [1]
    for p in factors:
        if c.pick([False, True]):
            shape.append(p)
        else:
            shape[-1] *= p
    return lambda x: x.view(shape), (x,)


def _primes(length):
    found, p = [], 2
    while length > 1:
        while length % p == 0:
            found.append(p)
            length //= p
        p += 1
    return found


def permute(c):
    x = c.operand(c.shape())
    order = c.order(len(x.shape))
    return lambda x: x.permute(order), (x,)


def transpose(c):
    x = c.operand(c.shape())
    dims = range(-len(x.shape), len(x.shape))
    one, other = c.pick(dims), c.pick(dims)
    return lambda x: x.transpose(one, other), (x,)


def expand(c):
    x = c.operand(c.shape())
    front = [c.length() for _ in range(c.pick([0, 1, 2]))]
    shape = [*front, *[c.length() if n == 1 else c.pick([n, -1]) for n in x.shape]]
    return lambda x: x.expand(shape), (x,)


def cat(c):
    shape = c.shape()
    dim = c.pick(range(len(shape)))
    other = [*shape]
    other[dim] = c.length()
    return lambda x, y: torch.cat([x, y], dim), (c.operand(shape), c.operand(other))


def stack(c):
    shape = c.shape(1, 3)
    dim = c.pick(range(-len(shape) - 1, len(shape) + 1))
    return lambda x, y: torch.stack([x, y], dim), (c.operand(shape), c.operand(shape))


def split(c):
    x = c.operand(c.shape())
    dim, length = c.pick(range(len(x.shape))), c.length()
    return lambda x: x.split(length, dim), (x,)


def select(c):
    x = c.operand(c.shape())
    dim = c.pick(range(len(x.shape)))
    place = c.pick(range(-x.shape[dim], x.shape[dim]))
    return lambda x: x.select(dim, place), (x,)


def cut(c):
    x = c.operand(c.shape())
    dim = c.pick(range(len(x.shape)))
    start, stop = c.numbers(-x.shape[dim], x.shape[dim], 2)
    step = c.pick([1, 1, 2, c.size])
    return lambda x: torch.ops.aten.slice(x, dim, start, stop, step), (x,)


def reduce(c):
    x = c.operand(c.shape())
    dims, keep = c.some(range(-len(x.shape), len(x.shape))), c.pick([False, True])
    dims = list({d % len(x.shape) for d in dims})
    function = c.pick([torch.sum, torch.mean, torch.amax, torch.logsumexp, torch.var])
    return lambda x: function(x, dims, keepdim=keep), (x,)


def call_along(c):
    x = c.operand(c.shape())
    dim = c.pick(range(-len(x.shape), len(x.shape)))
    function = c.pick(
        [torch.softmax, torch.cumsum, torch.sort, torch.cummax, torch.argmax, torch.unbind]
    )
    return lambda x: function(x, dim=dim), (x,)


def add(c):
    one = c.shape()
    other = [c.pick([n, 1]) for n in one[c.pick(range(len(one))) :]]
    return torch.add, (c.operand(one), c.operand(other))


def matmul(c):
    rows, inner, columns, many = (c.length() for _ in range(4))
    one = c.pick([(inner,), (rows, inner), (many, rows, inner), (1, rows, inner)])
    other = c.pick(
        [(inner,), (inner, columns), (many, inner, columns), (c.length(), many, inner, columns)]
    )
    is_whole = c.pick([False, True])

    def call(x, y):
        with torch.inference_mode(is_whole):
            return x @ y

    return call, (c.operand(one), c.operand(other))


def bmm(c):
    rows, inner, columns, many = (c.length() for _ in range(4))
    return torch.bmm, (c.operand((many, rows, inner)), c.operand((many, inner, columns)))


def einsum(c):
    lengths = {letter: c.length() for letter in "abcd"}
    one, other = (c.some("abcd") for _ in range(2))
    left = c.some([*one, *other])
    formula = f"{''.join(one)},{''.join(other)}->{''.join(left)}"
    operands = [c.operand([lengths[letter] for letter in letters]) for letters in (one, other)]
    return lambda x, y: torch.einsum(formula, x, y), tuple(operands)


def choose_places(c):
    """Return a shape, a dimension, the shape of an index along it, and the index."""
    shape = c.shape()
    dim = c.pick(range(len(shape)))
    index = [*shape]
    index[dim] = c.length()
    return shape, dim, index, c.operand(index, draw_integers(0, shape[dim]))


def gather(c):
    shape, dim, _, places = choose_places(c)
    return lambda x, i: x.gather(dim, i), (c.operand(shape), places)


def scatter(c):
    shape, dim, index, places = choose_places(c)
    return lambda x, i, y: x.scatter_add(dim, i, y), (c.operand(shape), places, c.operand(index))


def index_select(c):
    shape = c.shape()
    dim = c.pick(range(len(shape)))
    index = c.operand((c.length(),), draw_integers(0, shape[dim]))
    if c.pick([False, True]):
        rows = torch.arange(shape[dim])
        rows = c.pick([rows, rows.repeat(2), rows.repeat_interleave(2), rows.flip(0)])
        return lambda x: x.index_select(dim, rows), (c.operand(shape),)
    return lambda x, i: x.index_select(dim, i), (c.operand(shape), index)


def _indices(c, shape):
    """Return operands of an index into a shape, and a function that makes the index of them."""
    operands = []
    template = []
    lengths = [c.length() for _ in range(c.pick([1, 2]))]
    for length in shape:
        kind = c.pick(["none", "counts", "private"])
        if kind == "counts" and length in lengths:
            place = lengths.index(length)
            template.append(
                torch.arange(length).view([-1 if d == place else 1 for d in range(len(lengths))])
            )
        elif kind == "private":
            template.append(len(operands))
            operands.append(c.operand([c.pick([n, 1]) for n in lengths], draw_integers(0, length)))
        else:
            template.append(None)
    if all(x is None for x in template):
        template[0] = torch.tensor([0])
    return operands, lambda *given: [given[x] if isinstance(x, int) else x for x in template]


def index(c):
    shape = c.shape(2, 4)
    operands, made = _indices(c, shape)
    return lambda x, *given: torch.ops.aten.index(x, made(*given)), (c.operand(shape), *operands)


def index_put(c):
    shape = c.shape(2, 4)
    operands, made = _indices(c, shape)
    zeros = [torch.zeros(x.shape, dtype=torch.int64) for x in operands]
    picked = torch.ops.aten.index(torch.zeros(shape), made(*zeros)).shape
    values = c.operand([c.pick([n, 1]) for n in picked][c.pick(range(len(picked) + 1)) :])
    add = c.pick([False, True])

    def call(x, y, *given):
        return torch.ops.aten.index_put(x, made(*given), y, add)

    return call, (c.operand(shape), values, *operands)


def conv(c):
    rank = c.pick([1, 2])
    channels = c.length()
    image = (c.length(), channels, *[c.length() for _ in range(rank)])
    kernel = (c.pick([3, 5]), channels, *[c.pick([1, 2]) for _ in range(rank)])
    function = F.conv1d if rank == 1 else F.conv2d
    return lambda x, w: function(x, w, padding=1), (c.operand(image), c.operand(kernel))


def layer_norm(c):
    x = c.operand(c.shape())
    shape = x.shape[c.pick(range(len(x.shape))) :]
    return lambda x: F.layer_norm(x, shape), (x,)


def diagonal(c):
    x = c.operand(c.shape(2, 4))
    one, other = c.order(len(x.shape))[:2]
    offset = c.pick([-1, 0, 1])
    return lambda x: x.diagonal(offset, one, other), (x,)


CALLS = [
    *(
        view,
        permute,
        transpose,
        expand,
        cat,
        stack,
        split,
        select,
        cut,
        reduce,
        call_along,
        add,
        matmul,
        bmm,
        einsum,
    ),
    *(gather, scatter, index_select, index, index_put, conv, layer_norm, diagonal),
]


@pytest.mark.parametrize("made", CALLS, ids=lambda made: made.__name__)
@settings(max_examples=60)
@given(data=st.data())
def test_what_the_tracker_says_is_true(made, data):
    choices = Choices(data)
    call, operands = made(choices)
    assert faults(Case(made.__name__, choices.size, call, operands)) == []
