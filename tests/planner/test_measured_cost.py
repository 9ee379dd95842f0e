"""Plans on a measured machine: curves are used as they are, and only where there are any."""

from dataclasses import replace
from itertools import product

import pytest
from small_models import chain

from ir.calibration import KERNELS, Calibration, Collective, Kernel, Product, Timings
from ir.cluster import Cluster, Mesh
from ir.curves import Curve, Grid
from planner import plan
from planner.calibrated import cost_model
from planner.cost import CostModel, Roofline
from planner.measured_cost import KERNEL_OF, MeasuredCost
from planner.schedule import pipeline_step_s, shared_step_s
from planner.work import AttentionShape, Work
from planner.work import Product as Sizes

SIDES = (16.0, 256.0)
CURVE = Curve((1024.0, 2**20), (3e-6, 4e-4))
GRID = Grid(SIDES, tuple(1e-5 + m * n * k * 1e-10 for m, n, k in product(SIDES, repeat=3)))
ATTENTION = tuple(
    Kernel("attention", Curve((1024.0, 2**20), (s, 100 * s)), depth)
    for depth, s in ((16, 1e-5), (64, 2e-5))
)
TIMINGS = Timings(
    4, 1, (Kernel("elementwise", CURVE), Kernel("view", Curve((1.0,), (1e-6,))), *ATTENTION),
    (Product("float32", 1, GRID),),
)  # fmt: skip
REDUCE = Collective("all_reduce", 4, 2, 2, Curve((64.0, 2**20), (2e-4, 3e-3)))
SEND = Collective("send", 4, 2, 2, Curve((64.0, 2**20), (1e-4, 1e-3)))
MEASURED = Calibration(2, (TIMINGS,), (REDUCE, SEND))
MACHINE = replace(Cluster.local(4, memory_GiB=1), calibration=MEASURED)


SQUARE = Mesh(1, 2, 2)


def model(mesh: Mesh = SQUARE) -> CostModel:
    return cost_model(MACHINE, mesh)


def test_a_measured_machine_has_a_measured_model() -> None:
    assert isinstance(model(), MeasuredCost)
    assert isinstance(cost_model(Cluster.local(4), Mesh()), Roofline)


def test_kernels_are_priced_by_their_curves() -> None:
    work = Work("memory", 1.0, 1024.0, "float32", op="mul.Tensor")
    assert model().compute_s(work) == 3e-6
    assert model().compute_s(Work("view", 0.0, 1e9, "float32")) == 1e-6
    square = Work("matmul", 1.0, 1.0, "float32", Sizes(1, 16, 256, 16))
    assert model().compute_s(square) == pytest.approx(GRID.at(16, 256, 16))


def test_attention_is_linear_in_the_head_dimension() -> None:
    def seconds(depth: int) -> float:
        shape = AttentionShape(1, 1, 1, 16, 16, depth, True)
        return model().compute_s(Work("attention", 1.0, 1.0, "float32", attention=shape))

    assert (seconds(16), seconds(64)) == (pytest.approx(1e-5), pytest.approx(2e-5))
    assert seconds(40) == pytest.approx(1.5e-5)
    assert seconds(112) == pytest.approx(3e-5)
    assert 0 < seconds(1) < seconds(16)


def test_what_was_not_measured_keeps_the_catalogue_value() -> None:
    mesh = Mesh(1, 2, 2)
    plain = Roofline(Cluster.local(4, memory_GiB=1), mesh)
    for work in (
        Work("memory", 1.0, 4096.0, "float32", op="tanh.default"),
        Work("matmul", 2.0**20, 4096.0, "bfloat16", Sizes(1, 64, 64, 128)),
    ):
        assert model(mesh).compute_s(work) == plain.compute_s(work)
    assert model(mesh).collective_s("all_gather", 4096, "tensor") == plain.collective_s(
        "all_gather", 4096, "tensor"
    )


def test_collectives_are_exact_at_their_points_and_rise_between() -> None:
    seconds = [model().collective_s("all_reduce", 64 * 2**i, "tensor") for i in range(15)]
    assert seconds[0] == pytest.approx(2e-4)
    assert seconds[14] == pytest.approx(3e-3)
    assert seconds == sorted(seconds)


def test_groups_of_another_size_are_the_catalogue_s() -> None:
    mesh = Mesh(1, 4, 1)
    plain = Roofline(MACHINE, mesh)
    assert model(mesh).collective_s("all_reduce", 64, "data") == plain.collective_s(
        "all_reduce", 64, "data"
    )


def test_a_send_is_paid_once() -> None:
    cost = model(Mesh(2, 2, 1))
    assert cost.sends_meet
    assert cost.send_s(64, 0) == 1e-4


def test_the_loss_is_announced_once_per_step() -> None:
    gather = Collective("all_gather", 4, 2, 2, Curve((64.0, 2**20), (3e-4, 2e-3)))
    machine = replace(MACHINE, calibration=replace(MEASURED, collectives=(REDUCE, gather)))

    def seconds(mesh: Mesh, scalars: int = 1) -> float:
        return cost_model(machine, mesh).announce_s(scalars)

    summed_s = cost_model(machine, Mesh(1, 2, 1)).collective_s("all_reduce", 4, "data")
    told_s = cost_model(machine, Mesh(2, 1, 1)).collective_s("all_gather", 16, "pipeline")
    assert summed_s > 1e-4 and told_s > 1e-4
    assert seconds(Mesh(1, 1, 1)) == seconds(Mesh(1, 1, 2)) == 0.0
    assert seconds(Mesh(1, 2, 1), 3) == pytest.approx(3 * summed_s)
    assert seconds(Mesh(2, 1, 1)) == pytest.approx(told_s)
    assert seconds(Mesh(2, 2, 1)) == pytest.approx(summed_s + told_s)
    assert Roofline(Cluster.local(4), Mesh(2, 2, 1)).announce_s(1) == 0.0


def test_stages_that_wait_leave_their_cores_to_others() -> None:
    assert model(Mesh(2, 2, 1)).core_sharing == 2.0
    assert model(Mesh(1, 2, 2)).core_sharing == 1.0
    times = [(1.0, 2.0), (1.0, 2.0)]
    assert shared_step_s(times, 1, "gpipe", core_sharing=2.0) == 3.0
    assert shared_step_s(times, 4, "gpipe", core_sharing=2.0) == 12.0
    assert shared_step_s(times, 4, "gpipe") == pipeline_step_s(times, 4, "gpipe")


def test_every_op_names_a_kernel_that_is_measured() -> None:
    assert set(KERNEL_OF.values()) <= set(KERNELS)


def test_a_plan_is_made_and_says_how_it_was_priced() -> None:
    found = plan(chain(), MACHINE, global_batch=8)
    assert found.approximations[0].startswith("seconds are interpolated in measurements of this")
    assert found.prediction.step_s > 0


def missing(kernels: tuple[str, ...], pin: dict[str, int]) -> list[str]:
    """What the note of a plan names, on the machine with other kernels."""
    curves = tuple(Kernel(name, CURVE) for name in kernels)
    known = replace(MEASURED, timings=(replace(TIMINGS, kernels=curves),))
    found = plan(chain(), replace(MACHINE, calibration=known), global_batch=8, pin=pin)
    _, _, names = found.approximations[0].partition("the catalogue's: ")
    return names.split(", ") if names else []


def test_a_plan_names_what_it_takes_from_the_catalogue() -> None:
    """Only what this plan uses: other ops, and collectives of its own groups."""
    all_but = tuple(name for name in KERNELS if name not in ("gelu", "adamw", "tanh"))
    square = {"pipeline": 2, "data": 2, "tensor": 1, "zero": 0}
    assert missing(KERNELS, square) == ["all_gather of 2 ranks"]
    assert missing(all_but, square) == ["adamw", "all_gather of 2 ranks", "gelu"]
    assert missing(KERNELS, {"pipeline": 1, "data": 4, "zero": 0}) == ["all_reduce of 4 ranks"]
    assert missing(KERNELS, {"pipeline": 4}) == ["all_gather of 4 ranks"]
