"""Experts, hypernetworks, graphs and sets: structure beyond chains of layers."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.registry import (
    Network,
    classify,
    generator_of,
    normal,
    parameter,
    register,
    tensors,
    vectors,
)

SEQUENCE = tensors((4, 4))
VECTORS = vectors()


# -- mixtures of experts ---------------------------------------------------------------------------


def _experts(count=3):
    return nn.ModuleList(
        nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)) for _ in range(count)
    )


register_experts = register("experts", VECTORS, classify)


@register_experts
def sparse_experts_by_index_add():
    """As in Mixtral: top two of three experts, tokens gathered and added back, every expert
    called.
    """

    def forward(m, x):
        weights, chosen = m.gate(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mask = F.one_hot(chosen, 3).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for i, expert in enumerate(m.experts):
            place, row = torch.where(mask[i])
            out.index_add_(0, row, expert(x[row]) * weights[row, place, None])
        return m.head(out)

    return Network(forward, gate=nn.Linear(4, 3), experts=_experts(), head=nn.Linear(4, 3))


@register_experts
def experts_sorted_by_choice():
    """Rows are sorted by expert, split into runs of public number, and sorted back."""

    def forward(m, x):
        weights, chosen = m.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=3).tolist()
        pieces = x[order].split(counts)
        h = torch.cat([expert(piece) for expert, piece in zip(m.experts, pieces, strict=True)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return m.head(h[back] * weights[:, None])

    return Network(forward, gate=nn.Linear(4, 3), experts=_experts(), head=nn.Linear(4, 3))


# -- hypernetworks ---------------------------------------------------------------------------------


register_hypernetwork = register("hypernetworks", VECTORS, classify)


@register_hypernetwork
def weights_from_the_example():
    def forward(m, x):
        w = m.hyper(x).view(-1, 3, 4)
        return torch.bmm(w, x.unsqueeze(-1)).squeeze(-1)

    return Network(forward, hyper=nn.Linear(4, 12))


@register_hypernetwork
def weights_from_a_learnt_vector():
    def forward(m, x):
        w = m.hyper(m.code).view(3, 4)
        return F.linear(torch.tanh(x), w)

    return Network(forward, code=parameter(2), hyper=nn.Linear(2, 12))


@register_hypernetwork
def weights_from_public_class_attributes():
    """Zero-shot classifier: class attributes go through a network, and logits are products with
    them.
    """

    def forward(m, x):
        classes = m.describe(m.attributes)
        return F.normalize(m.embed(x), dim=-1) @ F.normalize(classes, dim=-1).T * 3

    return Network(
        forward,
        {"attributes": torch.randn(3, 5)},
        embed=nn.Linear(4, 4),
        describe=nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)),
    )


# -- graphs ----------------------------------------------------------------------------------------


def _graphs(n):
    g = generator_of(n)
    nodes = normal(n, 4, 3, generator=g)
    edges = (torch.rand(n, 4, 4, generator=g) < 0.5).double()
    return nodes, edges, torch.randint(0, 3, (n,), generator=g)


register_graph = register("graphs", _graphs, classify)


@register_graph
def message_passing_over_pairs():
    def forward(m, x, a):
        n, k, d = x.shape
        pairs = torch.cat(
            [x.unsqueeze(2).expand(n, k, k, d), x.unsqueeze(1).expand(n, k, k, d)], -1
        )
        messages = torch.relu(m.edge(pairs)) * a.unsqueeze(-1)
        h = m.node(messages.sum(2).flatten(0, 1), x.flatten(0, 1))
        return m.head(h.view(n, k, d).amax(1))

    return Network(forward, edge=nn.Linear(6, 5), node=nn.GRUCell(5, 3), head=nn.Linear(3, 3))


@register_graph
def graph_union_by_scatter():
    """Graphs joined into one large graph, as in PyTorch Geometric: nodes and edges of all examples
    in one axis.
    """

    def forward(m, x, a):
        n, k, d = x.shape
        nodes = x.reshape(n * k, d)
        graph, source, target = a.nonzero(as_tuple=True)
        source, target = source + k * graph, target + k * graph
        messages = torch.tanh(m.message(nodes[source]))
        gathered = torch.zeros(n * k, 4, dtype=x.dtype).index_add(0, target, messages)
        h = torch.relu(m.update(torch.cat([nodes, gathered], 1)))
        owner = torch.arange(n).repeat_interleave(k)
        pooled = torch.zeros(n, 4, dtype=x.dtype).scatter_add(0, owner[:, None].expand(-1, 4), h)
        return m.head(pooled)

    return Network(forward, message=nn.Linear(3, 4), update=nn.Linear(7, 4), head=nn.Linear(4, 3))


# -- sets ------------------------------------------------------------------------------------------


def _ratings(n):
    g = generator_of(n)
    return (
        torch.randint(0, 6, (n,), generator=g),
        torch.randint(0, 7, (n,), generator=g),
        normal(n, generator=g),
    )


def _rating_loss(model, batch):
    users, items, ratings = batch
    return (model(users, items) - ratings).square()


@register("sets", _ratings, _rating_loss)
def item_scores_over_the_whole_catalogue():
    def forward(m, users, items):
        scores = m.users(users) @ m.tower(m.items.weight).T
        return scores.gather(1, items[:, None]).squeeze(1)

    return Network(
        forward, users=nn.Embedding(6, 3), items=nn.Embedding(7, 4), tower=nn.Linear(4, 3)
    )
