"""Collectives by mesh axis over threads: their results, their mistakes, and how failures spread."""

import threading
import time

import pytest
import torch
from collective_cases import RANKS, check_cases, run_cases

from runtime.collectives import all_gather, all_reduce, cut, join, shard
from runtime.errors import Aborted, CollectiveMismatch, UsageError
from runtime.mesh import AXES, Axis, Coordinates, MeshShape, build_mesh
from runtime.threads import ThreadTransport, World

CPU = torch.device("cpu")


def on_threads(size, fn, timeout_s=20.0):
    """Results and errors of fn(transport) by rank; the world ends as run_threads ends it."""
    world, results, errors = World(size, timeout_s), [None] * size, [None] * size

    def run(rank):
        try:
            results[rank] = fn(ThreadTransport(world, rank, CPU))
        except Exception as error:
            errors[rank] = error
            world.fail(rank, error)
        finally:
            world.finish(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors


def test_collectives_are_right():
    results, errors = on_threads(RANKS, run_cases)
    assert errors == [None] * RANKS
    check_cases(results)


@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_join_undoes_cut(dim, outer):
    x = torch.arange(12 * 24 * 12).reshape(12, 24, 12)
    assert torch.equal(join(cut(x, 2, dim, outer), dim, outer), x)


def test_sums_are_the_same_bits_on_all_ranks_and_every_time():
    def fn(transport):
        axis = build_mesh(MeshShape(1, 1, 4), transport).tensor
        x = torch.randn(1000, generator=torch.Generator().manual_seed(transport.rank))
        return [all_reduce(x, axis) for _ in range(20)]

    results, _ = on_threads(4, fn)
    assert all(torch.equal(x, results[0][0]) for rank in results for x in rank)


def test_an_axis_of_one_rank_changes_nothing():
    x, alone = torch.ones(4), Axis("tensor", 1, 0, None)
    for same in (all_reduce(x, alone), all_gather(x, alone, 0), shard(x, alone, 0)):
        assert same is x


def test_a_shard_does_not_keep_the_whole_tensor_alive():
    piece = shard(torch.ones(100), Axis("tensor", 4, 1, None), 0)
    assert piece.untyped_storage().nbytes() == 100


@pytest.mark.parametrize(
    ("shape", "dim", "message"),
    [((6, 4), 1, "4 does not divide by 3"), ((6,), 1, "no such dim")],
)
def test_a_cut_that_does_not_divide_is_refused(shape, dim, message):
    with pytest.raises(UsageError, match=message):
        shard(torch.ones(shape), Axis("tensor", 3, 0, None), dim)


def test_axes_are_numbered_as_the_mesh_says():
    shape = MeshShape(2, 3, 4)
    assert shape.coordinates(17) == Coordinates(pipeline=1, data=1, tensor=1)
    assert [shape.rank(shape.coordinates(rank)) for rank in range(24)] == list(range(24))
    assert shape.line(17, "pipeline") == (5, 17)
    assert shape.line(17, "data") == (13, 17, 21)
    assert shape.line(17, "tensor") == (16, 17, 18, 19)

    def fn(transport):
        mesh = build_mesh(shape, transport)
        mine = torch.tensor(transport.rank)
        return [all_reduce(mine, mesh.axis(name)).item() for name in AXES]

    results, _ = on_threads(24, fn)
    assert results == [[sum(shape.line(rank, name)) for name in AXES] for rank in range(24)]


def test_the_first_failure_stops_all_at_once():
    def fn(transport):
        axis = build_mesh(MeshShape(1, 1, 4), transport).tensor
        if transport.rank == 2:
            raise ValueError("out of cheese")
        if transport.rank == 3:
            transport.channel(2, 3).receive((1,), torch.float32)
        all_reduce(torch.ones(1), axis)

    began_s = time.monotonic()
    _, errors = on_threads(4, fn)
    assert time.monotonic() - began_s < 5
    assert [type(error) for error in errors] == [Aborted, Aborted, ValueError, Aborted]
    assert "rank 2 failed: out of cheese" in str(errors[0])


def test_different_shapes_in_one_collective_are_told():
    def fn(transport):
        axis = build_mesh(MeshShape(1, 1, 2), transport).tensor
        all_reduce(torch.ones(2 + transport.rank), axis)

    _, errors = on_threads(2, fn)
    told = next(str(error) for error in errors if isinstance(error, CollectiveMismatch))
    assert "(2,)" in told
    assert "(3,)" in told


def test_waiting_for_a_rank_that_has_finished_is_told():
    def fn(transport):
        axis = build_mesh(MeshShape(1, 1, 2), transport).tensor
        if transport.rank == 0:
            all_reduce(torch.ones(2), axis)

    _, errors = on_threads(2, fn)
    with pytest.raises(CollectiveMismatch, match="waits in all_reduce sum .* rank 1 has already"):
        raise errors[0]


def test_waiting_too_long_is_told():
    def fn(transport):
        axis = build_mesh(MeshShape(1, 1, 2), transport).tensor
        if transport.rank == 1:
            time.sleep(0.5)
        all_reduce(torch.ones(2), axis)

    _, errors = on_threads(2, fn, timeout_s=0.1)
    with pytest.raises(CollectiveMismatch, match=r"for ranks \[1\], but 0.1 s passed"):
        raise errors[0]


def test_sent_tensors_arrive_in_order_and_as_they_were():
    def fn(transport):
        there, back = transport.channel(0, 1), transport.channel(1, 0)
        mine, theirs = (there, back) if transport.rank == 0 else (back, there)
        x = torch.zeros(3)
        for _ in range(5):
            mine.send(x)
            x += 1
        mine.flush()
        return [theirs.receive((3,), torch.float32)[0].item() for _ in range(5)]

    results, errors = on_threads(2, fn)
    assert errors == [None, None]
    assert results == [[0, 1, 2, 3, 4]] * 2
