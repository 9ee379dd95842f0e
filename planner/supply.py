"""The blocks of candidates, sharded, lowered and priced: what a search keeps between them.

Input: a workload, a cluster, pins. Output: the `Pieces` of a candidate under a price of memory, and
what the bounds are made of. Shared by all candidates with the same local shapes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from ir.cluster import Cluster, Mesh
from ir.device import Device
from ir.lower import Degrees, Lowered
from ir.offload import offloads_activations
from ir.spmd import lower_all
from planner.boundary_sends import send_terms
from planner.calibrated import cost_model
from planner.cost import CostModel
from planner.least_costs import LeastCosts
from planner.offload import hosting_of
from planner.pieces import Pieces, best_menu, priced, whole, with_menus
from planner.pins import Candidate, Pins
from planner.rank_costs import Place, fastest, least_cost, place_of, rank_costs
from planner.sharding import Programs, ShardingResult, Shardings
from planner.storage import copied_views
from planner.workload import Workload


class Supply:
    """`is_whole_batch`: the model needs all rows at once, so that its blocks depend on the mesh.
    `devices`: that its candidates use; the cluster's, if they are not given. What it gives is of
    the best of them in every respect, or with `only` of the ranks in such a place."""

    def __init__(
        self, work: Workload, cluster: Cluster, pins: Pins, *, is_whole_batch: bool,
        devices: tuple[Device, ...] = (), only: Place | None = None,
    ) -> None:  # fmt: skip
        self.work, self.cluster, self.pins = work, cluster, pins
        self.devices, self.only = devices or (cluster.device,), only
        self.is_whole_batch = is_whole_batch
        self.known_shardings: dict[tuple[int, int], Shardings] = {}
        self.known_programs: Programs = {}
        self.known_sharded: dict[tuple[Any, ...], ShardingResult] = {}
        self.known_pieces: dict[tuple[Any, ...], Pieces] = {}
        self.known_alone: dict[int, Pieces] = {}
        self.known_costs: dict[Mesh, CostModel] = {}
        self.least = LeastCosts(
            work, cluster, self.cost, self.alone, self.shardings, self.lowered,
            lambda candidate: self.pieces(candidate, 0.0),
        )  # fmt: skip

    def cost(self, mesh: Mesh) -> CostModel:
        """Of the devices that a mesh uses."""
        if self.only is None:
            return least_cost(self.cluster, mesh)
        if mesh not in self.known_costs:
            main = cost_model(self.cluster, mesh)
            here = (cost for cost in rank_costs(main) if place_of(cost) == self.only)
            self.known_costs[mesh] = fastest(main, here)
        return self.known_costs[mesh]

    def alone(self, rows: int) -> Pieces:
        """The pieces of one device."""
        if rows not in self.known_alone:
            alone = Mesh()
            clusters = (replace(self.cluster, device=d, nodes=()) for d in self.devices)
            costs = [cost_model(cluster, alone) for cluster in clusters]
            candidate, cost = Candidate(alone, 1, "1f1b", rows), fastest(costs[0], costs)
            self.known_alone[rows] = self._priced(candidate, self.whole, cost)
        return self.known_alone[rows]

    def lowered(self, rows: int, data: int, micro_batches: int) -> tuple[Lowered, ...]:
        """The blocks of one of so many data ranks."""
        degrees = Candidate(Mesh(data=data), micro_batches, "1f1b", rows).degrees
        work, shardings = self.work, self.whole.shardings
        return lower_all(work.graph, work.flow, work.kinds, shardings, degrees)

    def pieces(self, candidate: Candidate, price_s: float) -> Pieces:
        """Of the cheapest shardings when a byte of state costs so many seconds per micro-batch."""
        mesh, result = candidate.mesh, self._sharding(candidate, price_s)
        key: tuple[Any, ...] = (
            mesh.tensor, candidate.rows, mesh.data > 1, candidate.micro_batches > 1,
            tuple(sharding.key for sharding in result.shardings),
            offloads_activations(candidate.offload),
            (mesh, candidate.micro_batches) if self.is_whole_batch or self._has_prologue else None,
        )  # fmt: skip
        if key not in self.known_pieces:
            found, graph = self._priced(candidate, result), self.work.graph
            hosting = hosting_of(graph, self.cluster, candidate.offload)
            menu_of = best_menu(self.pins.recompute, hosting)
            self.known_pieces[key] = with_menus(found, graph, self.work.kinds, menu_of)
        return self.known_pieces[key]

    def level_price_s(self, candidate: Candidate, low_s: float, high_s: float) -> float:
        """The price of memory at which the shardings under two prices cost the same; what is
        cheapest there lies between them on the curve of seconds over bytes, or is one of them."""
        fast, small = (self._sharding(candidate, price_s) for price_s in (low_s, high_s))
        saved_bytes = fast.held_bytes - small.held_bytes
        return (small.seconds - fast.seconds) / saved_bytes if saved_bytes > 0 else low_s

    def _priced(
        self, candidate: Candidate, result: ShardingResult, cost: CostModel | None = None
    ) -> Pieces:
        """Pieces without their menus."""
        work, cost = self.work, cost or self.cost(candidate.mesh)
        return priced(work.graph, work.flow, work.kinds, result, candidate.degrees, cost)

    @cached_property
    def _has_prologue(self) -> bool:
        return any(kind.spread.gathers(kind.block) for kind in self.work.kinds)

    def shardings(self, candidate: Candidate) -> Shardings:
        """Of a candidate's local shapes: the data degree does not matter to the tensor axis."""
        key = (candidate.mesh.tensor, candidate.rows)
        if key not in self.known_shardings:
            work, cost = self.work, self.cost(candidate.mesh)
            degrees = Degrees(candidate.rows, 1, candidate.mesh.tensor, 1)
            copied = [copied_views(block) for block in self.alone(candidate.rows).lowered]
            # on a measured machine, which pieces cost nothing to make may depend on their size
            known = {} if self.cluster.calibration else self.known_programs
            self.known_shardings[key] = Shardings(
                work.graph, work.kinds, degrees, cost, work.early, copied, known=known
            )
        return self.known_shardings[key]

    def _sharding(self, candidate: Candidate, price_s: float) -> ShardingResult:
        if candidate.mesh.tensor == 1:
            return self.whole
        count, exchange_s = candidate.micro_batches, self.least.state.exchange_s(candidate)
        mesh = candidate.mesh
        cut = (mesh, candidate.stages) if mesh.pipeline > 1 else None
        pieces = mesh.data if candidate.zero else 1
        key = (mesh.tensor, candidate.rows, count, price_s, exchange_s, pieces, cut)
        if key not in self.known_sharded:
            found = self.shardings(candidate)
            cost = self.cost(mesh)
            sends = send_terms(found.built, self.work.variant_of, candidate, cost)
            self.known_sharded[key] = found.cheapest(
                count, price_s, exchange_s=exchange_s, pieces=pieces, sends=sends
            )
        return self.known_sharded[key]

    def elsewhere(
        self, cluster: Cluster, devices: tuple[Device, ...], only: Place | None = None
    ) -> Supply:
        """For ranks that lie in another way; what the same devices have is kept together."""
        other = Supply(
            self.work, cluster, self.pins, is_whole_batch=self.is_whole_batch, devices=devices,
            only=only,
        )  # fmt: skip
        if devices != self.devices:
            return other
        other.known_alone = self.known_alone
        other.least = replace(
            other.least, known_frontiers=self.least.known_frontiers,
            known_left=self.least.known_left,
        )  # fmt: skip
        other.least.moves.known_crossings = self.least.moves.known_crossings
        return other

    def reordered(self, cluster: Cluster) -> Supply:
        """For ranks in the same places of a cluster that differ in their order: only what goes from
        stage to stage is not the same."""
        other = self.elsewhere(cluster, self.devices, self.only)
        other.known_shardings, other.known_pieces = self.known_shardings, self.known_pieces
        other.least = replace(
            other.least, known_blocks=self.least.known_blocks, known_kept=self.least.known_kept,
            known_totals=self.least.known_totals,
        )  # fmt: skip
        other.least.moves.known_crossings = self.least.moves.known_crossings
        other.least.moves.known_moves = self.least.moves.known_moves
        return other

    @cached_property
    def whole(self) -> ShardingResult:
        """Nothing cut."""
        return whole(self.work.graph, self.work.kinds)
