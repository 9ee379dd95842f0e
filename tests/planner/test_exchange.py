"""What the data axis adds: limits of hiding, ZeRO, virtual stages."""

from dataclasses import replace

import pytest

from ir.cluster import Cluster, Mesh
from planner.calibrated import Calibrated
from planner.exchange import (
    CONTENTION,
    Exchange,
    Load,
    exchange,
    exposed_send_s,
    exposed_tensor_s,
)
from planner.schedule import bubble_s, held_batches, in_flight, pipeline_step_s
from planner.traits import Traits

CLUSTER, MESH = Cluster.parse("4x8xH100-SXM"), Mesh(1, 32, 1)
LOAD = Load(16e9, 8e9, 32, 1.0, 2.0)


def _exchange(load: Load = LOAD, mesh: Mesh = MESH, **traits) -> Exchange:
    return exchange(load, Calibrated(CLUSTER, mesh, Traits(**traits)))


def test_nothing_is_exchanged_by_one_rank_or_tensor_by_tensor() -> None:
    assert _exchange(mesh=Mesh(1, 1, 8), overlap_gradients=True) == Exchange()
    assert _exchange() == Exchange()


def test_a_long_backward_hides_all_but_the_last_bucket() -> None:
    model = Calibrated(CLUSTER, MESH)
    bucket_s = model.collective_s("all_reduce", 16e9 / 32, "data")
    found = _exchange(replace(LOAD, backward_s=1e3), overlap_gradients=True)
    assert found.step_s == pytest.approx(bucket_s * (1 + 31 * CONTENTION))


def test_a_short_backward_hides_nothing() -> None:
    model = Calibrated(CLUSTER, MESH)
    found = _exchange(replace(LOAD, backward_s=0.0), overlap_gradients=True)
    assert found.step_s == pytest.approx(32 * model.collective_s("all_reduce", 5e8, "data"))


def test_zero_1_scatters_and_gathers_once_per_step() -> None:
    found = _exchange(zero_stage=1)
    model = Calibrated(CLUSTER, MESH, Traits(zero_stage=1))
    parts = [("reduce_scatter", 5e8), ("all_gather", 2.5e8)]
    assert found.step_s == pytest.approx(
        32 * sum(model.collective_s(op, size, "zero") for op, size in parts)
    )
    assert (found.forward_s, found.backward_s) == (0.0, 0.0)


def test_zero_3_pays_per_micro_batch_and_hides_under_layers() -> None:
    slow, fast = _exchange(zero_stage=3), _exchange(zero_stage=3, overlap_gradients=True)
    assert 0 < fast.forward_s < slow.forward_s < slow.backward_s
    assert slow.step_s == fast.step_s == 0.0


def test_copies_of_divided_state_are_summed_once_per_step() -> None:
    assert _exchange(zero_stage=3, zero_group=8).step_s > 0.0


def test_virtual_stages_shorten_the_fill_and_hold_more() -> None:
    times = [(1.0, 2.0)] * 4
    assert pipeline_step_s(times, 8, "1f1b") == 8 * 3 + 9
    assert pipeline_step_s(times, 8, "1f1b", 3) == 8 * 3 + 3
    assert bubble_s(times, 8, "1f1b", 3) == pytest.approx(3)
    assert held_batches(0, 4, 8, "1f1b", 2) == 5.5 > in_flight(0, 4, 8, "1f1b")
    assert held_batches(0, 4, 2, "1f1b", 2) == 2.0


def test_a_tensor_axis_overlaps_all_but_one_piece() -> None:
    plain = Calibrated(CLUSTER, Mesh(1, 4, 8))
    piped = Calibrated(CLUSTER, Mesh(1, 4, 8), Traits(overlap_tensor=True))
    assert exposed_tensor_s(1.0, 10.0, plain) == 1.0
    assert exposed_tensor_s(1.0, 10.0, piped) == pytest.approx(1 / 8 + 7 / 8 * CONTENTION)
    assert exposed_tensor_s(1.0, 0.0, piped) == 1.0


def test_only_interleaved_schedules_hide_their_sends() -> None:
    assert exposed_send_s(1.0, 100.0, 1) == 1.0
    assert exposed_send_s(1.0, 100.0, 2) == pytest.approx(2 * CONTENTION)
    assert exposed_send_s(1.0, 0.0, 2) == 2.0
