"""The roofline model: limits, units, and agreement with published measurements."""

import pytest

from ir.cluster import Cluster, Mesh
from planner.cost import CostModel, Roofline
from planner.work import Work

H100 = Cluster.parse("4x8xH100")
MIB = 2**20


def test_roofline_is_a_cost_model() -> None:
    model: CostModel = Roofline(H100, Mesh(1, 4, 8))
    assert model.capacity_bytes == H100.device.usable_bytes


def test_a_large_matmul_runs_at_the_reachable_peak() -> None:
    flops = 2 * 8192.0**3
    seconds = Roofline(H100, Mesh()).compute_s(Work("matmul", flops, 3 * 2 * 8192.0**2, "bfloat16"))
    assert seconds == pytest.approx(flops / (989.4e12 * 0.80))


def test_elementwise_work_runs_at_the_memory_rate() -> None:
    seconds = Roofline(H100, Mesh()).compute_s(Work("memory", 1e9, 4e9, "bfloat16"))
    assert seconds == pytest.approx(4e9 / (3350e9 * 0.90))


def test_a_small_kernel_costs_a_launch_and_a_view_nothing() -> None:
    model = Roofline(H100, Mesh())
    assert model.compute_s(Work("matmul", 10, 10, "bfloat16")) == H100.device.kernel_launch_s
    assert model.compute_s(Work("view", 0, 1e9, "bfloat16")) == 0.0


def test_unknown_work_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="unknown kind of work 'gemm'"):
        Roofline(H100, Mesh()).compute_s(Work("gemm", 1, 1, "bfloat16"))
    with pytest.raises(ValueError, match="unknown collective"):
        Roofline(H100, Mesh(1, 1, 8)).collective_s("broadcast", 1, "tensor")


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_an_axis_of_one_communicates_for_free(op: str) -> None:
    assert Roofline(H100, Mesh(1, 1, 8)).collective_s(op, 1e9, "data") == 0.0


def test_taking_a_piece_communicates_nothing() -> None:
    model = Roofline(H100, Mesh(1, 1, 8))
    assert model.collective_s("shard", 1e9, "tensor") == 0.0
    assert model.collective_s("first", 1e9, "tensor") == 0.0


def test_an_all_reduce_moves_as_much_as_a_reduce_scatter_and_an_all_gather() -> None:
    model = Roofline(H100, Mesh(1, 1, 8))
    halves = [model.collective_s(op, 1e9, "tensor") for op in ("reduce_scatter", "all_gather")]
    assert model.collective_s("all_reduce", 1e9, "tensor") == pytest.approx(sum(halves), rel=0.01)


def test_many_nodes_reduce_small_tensors_by_a_tree() -> None:
    model = Roofline(Cluster.parse("64x8xH100"), Mesh(1, 512, 1))
    ring_s = 2 * model.collective_s("reduce_scatter", 1024, "data")
    assert model.collective_s("all_reduce", 1024, "data") < ring_s / 5


def test_an_exchange_over_nodes_is_bound_by_each_members_own_port() -> None:
    seconds = Roofline(H100, Mesh(1, 32, 1)).collective_s("all_to_all", 1e9, "data")
    assert seconds == pytest.approx(1e9 * 24 / 32 / (50e9 * 0.97), rel=0.02)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("axis", ["pipeline", "data", "tensor"])
def test_more_bytes_never_cost_less(op: str, axis: str) -> None:
    model = Roofline(H100, Mesh(2, 4, 4))
    seconds = [model.collective_s(op, 10.0**power, axis) for power in range(11)]
    assert seconds == sorted(seconds)


def test_a_send_takes_the_link_between_its_stages() -> None:
    model = Roofline(H100, Mesh(8, 1, 4))
    assert model.send_s(1e9, stage=0) < model.send_s(1e9, stage=1) == model.send_s(1e9)
    assert Roofline(H100, Mesh(1, 4, 8)).send_s(1e9) == 0.0


def test_the_optimizer_reads_and_writes_its_state() -> None:
    seconds = Roofline(H100, Mesh()).optimizer_s(1e9, 4e9)
    assert seconds == pytest.approx((3e9 + 8e9) / (3350e9 * 0.90))


# Bus bandwidths of stas00/ml-engineering network/README.md (2026-08), in GB/s. Small messages
# between nodes are left out: those nodes have EFA, which is 3 times slower there than the model.
@pytest.mark.parametrize(
    ("cluster", "size_mib", "measured", "tolerance"),
    [
        ("8xA100", 8, 109.9, 0.25),
        ("8xA100", 128, 176.9, 0.25),
        ("8xA100", 16384, 234.9, 0.05),
        ("8xH200", 8, 155.5, 0.25),
        ("8xH200", 128, 401.9, 0.25),
        ("4x8xB200", 1024, 362.0, 0.10),
        ("4x8xB200", 16384, 381.8, 0.10),
    ],
)
def test_an_all_reduce_takes_about_what_was_measured(
    cluster: str, size_mib: int, measured: float, tolerance: float
) -> None:
    hardware = Cluster.parse(cluster)
    n, size_bytes = hardware.n_devices, size_mib * MIB
    measured_s = 2 * size_bytes * (n - 1) / n / (measured * 1e9)
    predicted_s = Roofline(hardware, Mesh(1, n, 1)).collective_s("all_reduce", size_bytes, "data")
    assert predicted_s == pytest.approx(measured_s, rel=tolerance)
