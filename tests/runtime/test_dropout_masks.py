"""Dropout masks: the right rate, no pattern, and the same elements under every layout."""

import math

import pytest
import torch

from runtime.collectives import cut
from runtime.errors import UsageError
from runtime.mesh import Axis, Mesh, MeshShape
from runtime.program import Context
from runtime.random import Where, dropout, keep_mask, mix_key

SHAPE = (64, 48, 32)


def whole(shape):
    return Where(tuple(torch.arange(size) for size in shape), tuple(shape))


def context(*, data=(1, 0), tensor=(1, 0), micro=(1, 0), step=0, seed=0):
    """The context of a rank; each pair is (size, index)."""
    axes = [Axis("data", *data, None), Axis("tensor", *tensor, None)]
    mesh = Mesh(MeshShape(1, data[0], tensor[0]), 0, Axis("pipeline", 1, 0, None), *axes)
    return Context(mesh, torch.device("cpu"), seed, step, micro[1], micro[0])


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_right(p):
    keys = [mix_key(0, step, op, 0) for step in range(4) for op in range(4)]
    kept = sum(keep_mask(p, key, whole(SHAPE)).sum().item() for key in keys)
    count = math.prod(SHAPE) * len(keys)
    assert abs(kept - count * (1 - p)) < 5 * math.sqrt(count * p * (1 - p))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_neighbours_are_independent(dim):
    bits = keep_mask(0.5, mix_key(1), whole(SHAPE)).double() * 2 - 1
    size = bits.shape[dim]
    product = bits.narrow(dim, 0, size - 1) * bits.narrow(dim, 1, size - 1)
    assert abs(product.mean()) < 5 / math.sqrt(product.numel())
    sums = bits.sum([d for d in range(3) if d != dim])  # each a sum of n fair signs
    n = bits.numel() / size
    assert (sums.square().mean() / n - 1).abs() < 5 * math.sqrt(2 / size)


@pytest.mark.parametrize(
    "parts",
    [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 0), (2**40, 0, 0, 0)],
)
def test_other_keys_give_independent_masks(parts):
    first = keep_mask(0.5, mix_key(0, 0, 0, 0), whole(SHAPE)).double() * 2 - 1
    second = keep_mask(0.5, mix_key(*parts), whole(SHAPE)).double() * 2 - 1
    assert abs((first * second).mean()) < 5 / math.sqrt(first.numel())


def test_keys_are_distinct_and_depend_on_the_order():
    keys = {mix_key(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(keys) == 8000
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_a_key_depends_on_seed_step_op_and_call_only():
    key = context().key(3, 1)
    assert context(data=(2, 1), tensor=(2, 1), micro=(4, 3)).key(3, 1) == key
    others = [context(seed=1).key(3, 1), context(step=1).key(3, 1), context().key(3)]
    assert key not in others


@pytest.mark.parametrize(
    ("data_dim", "tensor_dim"),
    [((0, 1), (1, 1)), ((0, 4), (2, 2)), ((1, 1), (0, 2)), ((0, 2), (0, 2)), ((0, 1), None)],
)
def test_every_layout_drops_the_same_elements(data_dim, tensor_dim):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    full = dropout(x, 0.3, 42, whole(SHAPE))
    for data in range(2):
        for micro in range(2):
            for tensor in range(2):
                ctx = context(data=(2, data), tensor=(2, tensor), micro=(2, micro))
                where = ctx.where(SHAPE, data=data_dim, tensor=tensor_dim)

                def local(t, data=data, micro=micro, tensor=tensor):
                    t = cut(t, 4, *data_dim)[2 * data + micro]
                    return t if tensor_dim is None else cut(t, 2, *tensor_dim)[tensor]

                assert torch.equal(dropout(local(x), 0.3, 42, where), local(full))


def test_a_mask_made_in_chunks_is_the_same(monkeypatch):
    full = keep_mask(0.3, 42, whole(SHAPE))
    monkeypatch.setattr("runtime.random.CHUNK_ELEMENTS", 5000)
    assert torch.equal(keep_mask(0.3, 42, whole(SHAPE)), full)


def test_kept_elements_are_scaled_as_torch_scales_them():
    x = torch.rand(SHAPE) + 1
    y = dropout(x, 0.25, 7, whole(SHAPE))
    assert torch.equal(y[y != 0], (x / 0.75)[y != 0]) or torch.allclose(y[y != 0] * 0.75, x[y != 0])
    assert y.dtype == x.dtype


def test_probabilities_at_the_edge_behave_as_torchs():
    x = torch.randn(6, 5)
    assert torch.equal(dropout(x, 0.0, 1, whole(x.shape)), x)
    assert torch.equal(dropout(x, 1.0, 1, whole(x.shape)), torch.zeros(6, 5))
    with pytest.raises(UsageError, match="not between 0 and 1"):
        dropout(x, 1.5, 1, whole(x.shape))


def test_tensors_without_rows_or_dims_are_fine():
    assert dropout(torch.ones(0, 3), 0.5, 1, whole((0, 3))).shape == (0, 3)
    assert dropout(torch.ones(()), 0.5, 1, whole(())).item() in (0.0, 2.0)


def test_rows_and_first_go_by_data_rank_and_micro_batch():
    x = torch.arange(8)
    ctx = context(data=(2, 1), micro=(2, 0))
    assert ctx.rows(x, 0).tolist() == [4, 5]
    assert ctx.rows(x, 0, 2).tolist() == [2, 6]
    assert ctx.first(x).eq(0).all()
    assert context(data=(2, 0), micro=(2, 0)).first(x).equal(x)
    assert context(data=(2, 0), micro=(2, 1)).first(x).eq(0).all()
