"""Every collective by axis on four ranks, for several dtypes, with what it must give.

Each case is (name, function(axis, full, mine) -> result, function(full, index) -> expected), where
`full` is the list of all ranks' tensors and `mine` is this rank's.
"""

import torch

from runtime.collectives import all_gather, all_reduce, all_to_all, first, reduce_scatter, shard
from runtime.mesh import MeshShape, build_mesh

RANKS = 4
SHAPE = (4, 24, 2)
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.complex64,
)


def tensors(dtype):
    """One tensor per rank, of small whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(-3, 4, SHAPE, generator=generator) for _ in range(RANKS)]
    return [(x > 0) if dtype == torch.bool else x.to(dtype) for x in made]


def total(xs):
    return torch.stack(xs).any(0) if xs[0].dtype == torch.bool else sum(xs[1:], xs[0])


def pieces(x, dim, outer):
    """The four pieces of a dim seen as (outer, rest), by plain indexing."""
    size = x.shape[dim]
    rows = torch.arange(size).reshape(outer, RANKS, -1)
    return [x.index_select(dim, rows[:, index].reshape(-1)) for index in range(RANKS)]


def whole(parts, dim, outer):
    """The tensor whose `pieces` are `parts`."""
    size = parts[0].shape[dim] * RANKS
    rows = torch.arange(size).reshape(outer, RANKS, -1)
    order = torch.cat([rows[:, index].reshape(-1) for index in range(RANKS)])
    return torch.cat(parts, dim).index_select(dim, order.argsort())


CASES = [
    ("all_reduce", lambda a, x: all_reduce(x, a), lambda xs, i: total(xs)),
    (
        "all_reduce of a transposed tensor",
        lambda a, x: all_reduce(x.transpose(0, 1), a),
        lambda xs, i: total(xs).transpose(0, 1),
    ),
    ("all_gather", lambda a, x: all_gather(x, a, 1), lambda xs, i: torch.cat(xs, 1)),
    ("all_gather outer", lambda a, x: all_gather(x, a, -2, 3), lambda xs, i: whole(xs, 1, 3)),
    (
        "reduce_scatter",
        lambda a, x: reduce_scatter(x, a, 0),
        lambda xs, i: pieces(total(xs), 0, 1)[i],
    ),
    (
        "reduce_scatter outer",
        lambda a, x: reduce_scatter(x, a, 1, 3),
        lambda xs, i: pieces(total(xs), 1, 3)[i],
    ),
    (
        "all_to_all",
        lambda a, x: all_to_all(x, a, 1, 2),
        lambda xs, i: torch.cat([pieces(x, 1, 1)[i] for x in xs], 2),
    ),
    (
        "all_to_all outer",
        lambda a, x: all_to_all(x, a, 1, -1, 3, 2),
        lambda xs, i: whole([pieces(x, 1, 3)[i] for x in xs], 2, 2),
    ),
    ("shard", lambda a, x: shard(x, a, 1, 2), lambda xs, i: pieces(xs[i], 1, 2)[i]),
    ("first", lambda a, x: first(x, a), lambda xs, i: xs[i] if i == 0 else xs[i] * False),
]
ORDERED = [
    ("max", lambda a, x: all_reduce(x, a, "max"), lambda xs, i: torch.stack(xs).amax(0)),
    ("min", lambda a, x: all_reduce(x, a, "min"), lambda xs, i: torch.stack(xs).amin(0)),
]


def cases(dtype):
    """Complex numbers have no maximum."""
    return CASES if dtype.is_complex else CASES + ORDERED


def run_cases(transport):
    """This rank's results by (dtype, case name), all over a tensor axis of four ranks."""
    axis = build_mesh(MeshShape(1, 1, RANKS), transport).tensor
    results = {}
    for dtype in DTYPES:
        mine = tensors(dtype)[transport.rank]
        before = mine.clone()
        for name, run, _ in cases(dtype):
            results[str(dtype), name] = run(axis, mine)
            assert torch.equal(mine, before), name
    return results


def check_cases(by_rank):
    """Compares the results of all ranks with plain indexing."""
    for dtype in DTYPES:
        for name, _, expected in cases(dtype):
            for index, results in enumerate(by_rank):
                found, wanted = results[str(dtype), name], expected(tensors(dtype), index)
                assert found.dtype == wanted.dtype, (dtype, name)
                assert torch.equal(found, wanted), (dtype, name, index)
