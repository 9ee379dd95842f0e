"""Flat pieces: any shape is cut in equal pieces, padded with zeros, and put together again."""

import pytest
import torch
from test_axis_collectives import on_threads

from runtime.mesh import Axis, MeshShape, build_mesh
from runtime.pieces import gather_piece, padded, piece_size, scatter_piece, take_piece

SHAPES = [(), (1,), (2,), (5,), (2, 3), (4, 6), (7, 5, 3), (0,), (0, 4)]


def drawn(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


def on_data_axis(ranks, fn):
    """fn(data axis) on each rank, by rank."""
    found, errors = on_threads(
        ranks, lambda transport: fn(build_mesh(MeshShape(1, ranks, 1), transport).data)
    )
    assert errors == [None] * ranks
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_are_equal_contiguous_and_padded_with_zeros(shape, ranks):
    x = drawn(shape)
    pieces = [take_piece(x, Axis("data", ranks, index, None)) for index in range(ranks)]
    size = piece_size(shape, Axis("data", ranks, 0, None))
    assert [piece.shape for piece in pieces] == [(size,)] * ranks
    row = torch.cat(pieces)
    assert 0 <= row.numel() - x.numel() < ranks
    assert torch.equal(row[: x.numel()], x.flatten())
    assert not row[x.numel() :].any()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_gathering_gives_the_whole_tensor_back_without_its_padding(shape, ranks):
    x = drawn(shape)
    found = on_data_axis(ranks, lambda axis: gather_piece(take_piece(x, axis) + 0, axis, shape))
    for whole in found:
        assert whole.shape == x.shape
        assert torch.equal(whole, x)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_scattering_gives_each_rank_its_piece_of_the_sum(shape, ranks):
    total = sum(drawn(shape, seed) for seed in range(ranks))
    found = on_data_axis(ranks, lambda axis: scatter_piece(drawn(shape, axis.index), axis))
    for index, piece in enumerate(found):
        assert torch.equal(piece, take_piece(total, Axis("data", ranks, index, None)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_dtype_is_divided_and_gathered(dtype):
    x = drawn((5,)).to(dtype)
    found = on_data_axis(3, lambda axis: gather_piece(take_piece(x, axis), axis, (5,)))
    assert all(torch.equal(whole, x) and whole.dtype == dtype for whole in found)


def test_a_piece_is_no_view_of_the_whole_tensor():
    x = torch.zeros(4)
    take_piece(x, Axis("data", 2, 0, None)).add_(1)
    assert not x.any()


def test_what_divides_is_not_copied_to_be_scattered():
    x = torch.zeros(4, 3)
    assert padded(x, Axis("data", 2, 0, None)).data_ptr() == x.data_ptr()
