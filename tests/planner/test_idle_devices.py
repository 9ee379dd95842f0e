"""Plans that leave devices idle: which meshes are looked at, where they lie, what is said."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from small_models import chain
from torch import nn

from codegen import emit
from ir.batch import flow
from ir.calibration import Calibration, Collective
from ir.cluster import Cluster, Mesh
from ir.curves import Curve
from ir.errors import UsageError
from ir.graph import Graph
from ir.plan import Plan
from ir.seats import Seats, seated, seats
from ir.trace import trace
from ir.variants import variants
from planner import plan
from planner.alternatives import neighbours
from planner.calibrated import cost_model
from planner.fewer_devices import Shares, fewer_devices, tensor_degrees
from planner.links import axis_groups
from planner.pins import Pins, meshes
from planner.timeline import simulate_plan

FREE = Pins()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return chain()


@pytest.fixture(scope="module")
def large() -> Graph:
    """Its rows are worth dividing."""
    return chain(width=512, hidden=2048, seq=64)


@pytest.fixture(scope="module")
def seven(large: Graph) -> Plan:
    return plan(large, Cluster.local(7, memory_GiB=1), global_batch=8, pin={"tensor": 1})


def looked_at(cluster: str, rows: int, stages: int, tensor: tuple[int, ...] = (1, 2, 4, 8)
              ) -> list[str]:  # fmt: skip
    """Meshes on fewer devices, as pipeline x data x tensor."""
    there = Cluster.parse(cluster)

    def usable(mesh: Mesh) -> bool:
        return mesh.pipeline <= stages and rows % mesh.data == 0 and mesh.tensor in tensor

    whole = [mesh for mesh in meshes(FREE, there.n_devices) if usable(mesh)]
    found = fewer_devices(there, FREE, whole, Shares(stages, rows, tensor, usable))
    return [f"{m.pipeline}x{m.data}x{m.tensor}" for m in found]


@pytest.mark.parametrize(("cluster", "rows"), [
    ("1x8xH100-SXM", 8), ("4x8xH100-SXM", 512), ("128x8xA100-80GB", 1536),
    ("2048x8xH100-SXM", 2048),
])  # fmt: skip
def test_devices_that_can_share_the_work_are_all_used(cluster: str, rows: int) -> None:
    assert looked_at(cluster, rows, stages=34) == []


@pytest.mark.parametrize(("cluster", "rows", "stages", "meshes"), [
    ("1x6xH100-SXM", 8, 6, ["1x4x1", "1x2x2", "1x1x4", "1x2x1", "2x1x1"]),
    ("1x7xH100-SXM", 8, 6, ["3x2x1", "3x1x2", "6x1x1", "1x4x1", "1x2x2", "1x1x4", "1x1x1"]),
    ("2x6xH100-SXM", 8, 1, ["1x8x1", "1x4x2", "1x2x4", "1x1x8", "1x4x1"]),
])  # fmt: skip
def test_fewer_devices_are_looked_at_where_a_degree_gains(
    cluster: str, rows: int, stages: int, meshes: list[str]
) -> None:
    """The last of each are those of all devices whose tensor degree, 3 or 7, cuts nothing."""
    assert looked_at(cluster, rows, stages) == meshes


def test_a_hundred_and_a_thousand_devices_give_few_more_meshes() -> None:
    hundred = looked_at("25x4xH100-SXM", 64, stages=14)
    assert "1x64x1" in hundred and "3x32x1" in hundred and len(hundred) < 30
    assert len(looked_at("125x8xH100-SXM", 512, stages=34)) < 40


def test_the_degrees_that_divide_something(graph: Graph) -> None:
    kinds = variants(graph, flow(graph))
    assert tensor_degrees(kinds, 8) == [1, 2, 3, 4, 6, 8]  # 16, 32, 24 and 8 tokens


@pytest.mark.parametrize(("cluster", "ranks", "expected"), [
    ("4x8xH100-SXM", 16, Seats(2, 8)), ("4x8xH100-SXM", 4, Seats(1, 4)),
    ("4x6xH100-SXM", 16, Seats(4, 4)), ("20x5xH100-SXM", 64, Seats(16, 4)),
    ("4x6xH100-SXM", 13, None), ("2x8xMI250X", 6, Seats(1, 6)), ("2x8xMI250X", 5, None),
])  # fmt: skip
def test_ranks_sit_on_few_nodes_with_as_many_on_each(
    cluster: str, ranks: int, expected: Seats | None
) -> None:
    assert seats(Cluster.parse(cluster), ranks) == expected


def test_tensor_groups_stay_inside_the_nodes() -> None:
    cluster, mesh = Cluster.parse("4x6xH100-SXM"), Mesh(data=4, tensor=4)
    groups = cost_model(cluster, mesh).groups("tensor")
    assert not groups.far and groups.members_near == 4
    assert axis_groups(cluster, mesh, "tensor").far  # one after the other they would not
    assert [c.shared for c in cost_model(cluster, mesh).groups("data").far] == [4]


def test_what_lies_on_whole_nodes_sees_the_cluster_as_it_is() -> None:
    cluster = Cluster.parse("4x8xH100-SXM")
    assert seated(cluster, 16) is cluster and seated(cluster, 4) is cluster


def test_direct_links_to_idle_devices_carry_nothing() -> None:
    whole, mesh = Cluster.parse("2x8xMI300X"), Mesh(data=6, tensor=2)
    part = seated(whole, mesh.size)
    assert [level.size for level in part.levels] == [6, 2]
    pair_bytes_per_s = [
        axis_groups(cluster, mesh, "tensor").near[0].pair_bytes_per_s for cluster in (whole, part)
    ]
    assert pair_bytes_per_s[0] == pytest.approx(pair_bytes_per_s[1])


def test_seven_devices_share_eight_rows_as_fewer(seven: Plan) -> None:
    assert seven.mesh.size < 7 and seven.devices_idle == 7 - seven.mesh.size
    assert f"devices  {seven.mesh.size} of 7 used" in str(seven)
    assert seven.approximations[0].startswith(f"{seven.devices_idle} of 7 devices idle: ")
    assert "all 7" in seven.approximations[0]


def test_no_plan_of_all_devices_is_faster(large: Graph) -> None:
    cluster = Cluster.local(5, memory_GiB=1)
    found = plan(large, cluster, global_batch=64, pin={"tensor": 1})
    every = plan(large, cluster, global_batch=64, pin={"tensor": 1, "data": 1, "pipeline": 5})
    assert found.devices_idle == 1 and every.devices_idle == 0
    assert found.prediction.step_s < every.prediction.step_s


def test_a_plan_with_idle_devices_is_read_back(seven: Plan) -> None:
    value = seven.to_json()
    assert value["devices_idle"] == seven.devices_idle
    again = Plan.from_json(json.loads(json.dumps(value)))
    assert again == seven and again.hash == seven.hash
    with pytest.raises(UsageError, match="leaves"):
        Plan.from_json(value | {"devices_idle": 1 + seven.devices_idle})


def test_a_mesh_larger_than_its_cluster_is_refused(seven: Plan) -> None:
    large = replace(seven, cluster=Cluster.local(seven.mesh.size - 1, memory_GiB=1))
    with pytest.raises(UsageError, match="more than the"):
        Plan.from_json(large.to_json())


def test_simulating_it_gives_the_same_seconds(large: Graph, seven: Plan) -> None:
    again = simulate_plan(large, seven).prediction
    assert again.step_s == pytest.approx(seven.prediction.step_s)


def test_the_program_starts_the_ranks_that_are_used(graph: Graph) -> None:
    cluster = Cluster.parse("4x6xH100-SXM")
    pins = {"pipeline": 1, "data": 8, "tensor": 2}
    made = plan(graph, cluster, global_batch=8, pin=pins)
    program = emit(graph, made)
    assert program.ranks == 16
    assert "--nodes=4" in program.files["launch.slurm"]
    assert "--nproc-per-node 4" in program.files["launch.slurm"]
    assert "--nproc 16" in program.files["launch.sh"]
    where = "16 of 24 devices, the first 4 of each of nodes 0 to 3"
    assert where in program.files["README.md"]


@pytest.mark.parametrize(("cluster", "pins", "note"), [
    ("local:4", {"pipeline": 1, "data": 2, "tensor": 1}, "2 of 4 devices idle: the pins say so"),
    ("local:12", {"pipeline": 2, "data": 4, "tensor": 1}, "4 of 12 devices idle"),
    ("25x4xH100-SXM", {"pipeline": 2, "data": 8, "tensor": 4}, "36 of 100 devices idle"),
    ("125x8xH100-SXM", {"pipeline": 1, "data": 8, "tensor": 8}, "936 of 1000 devices idle"),
])  # fmt: skip
def test_pins_may_leave_devices_idle(
    graph: Graph, cluster: str, pins: Mapping[str, int], note: str
) -> None:
    made = plan(graph, cluster, global_batch=8, pin=pins)
    assert made.mesh == Mesh(**pins)
    assert made.approximations[0].startswith(note)


def test_pins_that_no_even_part_of_the_nodes_meets(graph: Graph) -> None:
    pins = {"pipeline": 1, "data": 1, "tensor": 13}
    with pytest.raises(UsageError, match="13 ranks can't lie .* Use pins for 12 or 15 devices"):
        plan(graph, "2x6xH100-SXM + 1x6xA100-80GB", global_batch=8, pin=pins)


@pytest.mark.parametrize("devices", [6, 7, 12])
def test_the_same_request_gives_the_same_plan(graph: Graph, devices: int) -> None:
    cluster = Cluster.local(devices, memory_GiB=1)
    first, again = (plan(chain(), cluster, global_batch=8) for _ in range(2))
    assert str(first) == str(again) and first == again


MIXED = "2x8xV100-32GB + 2x8xH100-SXM"


def test_a_part_of_unlike_nodes_is_what_those_nodes_hold() -> None:
    cluster = Cluster.parse(MIXED)
    assert seats(cluster, 16) == Seats(2, 8, first=2)
    part = seated(cluster, 16)
    assert str(part) == "2x8 H100-SXM"
    assert part.levels[-1].port_rates == (cluster.levels[-1].port_rates or (0,) * 4)[2:]
    assert seated(cluster, 24).device == cluster.device  # a node of the others as well
    assert str(seated(cluster, 24)) == "2x8 V100-32GB + 1x8 H100-SXM"


def test_slow_nodes_are_left_idle_where_the_others_are_faster_alone(large: Graph) -> None:
    made = plan(large, MIXED, global_batch=512, pin={"tensor": 1, "pipeline": 1})
    assert made.mesh == Mesh(data=16)
    assert "16 of 32 used, nodes 2 to 3 (2x8 H100-SXM); 16 idle" in str(made)
    alone = plan(large, "2x8xH100-SXM", global_batch=512, pin={"tensor": 1, "pipeline": 1})
    assert made.prediction.step_s >= alone.prediction.step_s  # links are those that all share
    assert simulate_plan(large, made).prediction.step_s == pytest.approx(
        made.prediction.step_s
    )


def test_alternatives_are_those_of_all_devices(seven: Plan) -> None:
    asked = {(key, value) for key, value in neighbours(seven) if key in ("data", "tensor")}
    assert all(7 % int(value) == 0 for _, value in asked)


class Encoder(nn.Module):
    """Too small for any cut to pay."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def tiny() -> Graph:
    return trace(Encoder(), (torch.zeros(12, 9, dtype=torch.int64),), {})


def test_a_measured_machine_is_used_as_it_was_measured(tiny: Graph) -> None:
    """No part of it stands for it, also where the tensor axis cuts nothing."""
    curve = Curve((64.0, 2**20), (1.0, 10.0))  # nobody would cut anything
    slow = [Collective(op, 2, 2, 2, curve) for op in ("all_reduce", "all_gather", "send")]
    cluster = replace(Cluster.local(2), calibration=Calibration(2, (), tuple(slow)))
    found = plan(tiny, cluster, global_batch=12, pin={"pipeline": 1, "data": 1})
    assert found.mesh == Mesh(tensor=2) and found.devices_idle == 0
    assert found.prediction.step_s < 1.0


def test_a_tensor_axis_that_cuts_nothing_takes_no_devices(tiny: Graph) -> None:
    cluster = Cluster.local(2)
    found = plan(tiny, cluster, global_batch=12)
    assert found.degrees.tensor == 1
    alone = plan(tiny, cluster, global_batch=12, pin={"pipeline": 1, "data": 1, "tensor": 1})
    cut = plan(tiny, cluster, global_batch=12, pin={"tensor": 2})
    best_s = min(alone.prediction.step_s, cut.prediction.step_s)
    assert found.prediction.step_s <= best_s * (1 + 1e-8)


class Skips(nn.Module):
    """Ten small layers with skips between them: stages wait for one another, and bounds are low."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(15, 15) for _ in range(5))
        self.up = nn.ModuleList(nn.Linear(30, 15) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.relu(layer(torch.cat([x, kept.pop()], -1)))
        return x.square().mean()


@pytest.fixture(scope="module")
def skips() -> Graph:
    return trace(Skips(), (torch.randn(12, 15),), {})


def test_one_device_is_planned_where_low_bounds_come_first(skips: Graph) -> None:
    cluster = Cluster.local(4)
    found = plan(skips, cluster, global_batch=12)
    alone = plan(skips, cluster, global_batch=12, pin={"pipeline": 1})
    assert found.prediction.step_s <= alone.prediction.step_s * (1 + 1e-9)


class Odd(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x).square().mean()
        return loss


def test_a_measured_machine_keeps_a_mesh_that_cuts_nothing() -> None:
    model = Odd(nn.Linear(15, 15), nn.Tanh(), nn.Linear(15, 5))
    curve = Curve((64.0, 2**20), (1.0, 10.0))
    slow = [Collective(op, 2, 2, 2, curve) for op in ("all_reduce", "all_gather", "send")]
    cluster = replace(Cluster.local(2), calibration=Calibration(2, (), tuple(slow)))
    found = plan(trace(model, (torch.randn(12, 15),), {}), cluster, global_batch=12)
    assert found.mesh == Mesh(tensor=2) and found.prediction.step_s < 1.0
    assert found.prediction.bound_s <= found.prediction.step_s


def test_fewer_devices_are_looked_at_where_few_rows_are_only_launches(tmp_path) -> None:
    """One device computes all rows at once in about a step, one by one in many."""
    spec = tmp_path / "slow.yaml"
    spec.write_text(
        "device: L4\nnodes: 2\ndevices_per_node: 2\ninter_bandwidth_GBps: 0.2\n"
        "inter_latency_us: 500\n"
    )
    cluster = Cluster.parse(str(spec))
    found = plan(
        chain(depth=9, width=256, hidden=512, seq=1, words=64), cluster, global_batch=240
    )
    assert (found.mesh.pipeline, found.mesh.size) == (2, 2)
