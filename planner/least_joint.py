"""What no sharding of a block together with what it keeps beats, at some prices of a kept byte.

Input: what candidates share, a candidate. Output: per price the least seconds + price * bytes of a
call and micro-batch, with the bytes of its state at the price that goes with it. The relaxed
program of shardings decides, with what `planner.whole_values` says; what is kept and run again
beside that is as if it were cut evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.offload import offloads_activations
from planner.least_costs import LeastCosts
from planner.pins import Candidate
from planner.sharding_bound import Rules, held_of, seconds_of
from planner.stage_problem import Joint
from planner.whole_values import WholeValues


@dataclass(frozen=True)
class LeastJoint:
    """Kept by tensor degree, rows and prices, in `least`."""

    least: LeastCosts

    def of(
        self, candidate: Candidate, number: int, rules: Rules, more_s: float, divided_bytes: float
    ) -> Joint:
        """Of a call of a variant, at 0 and at the prices that decide what the candidate keeps; with
        other seconds and bytes of state that are the same for all shardings."""
        prices = (0.0, *self.least.binding_prices(candidate))
        most = self.least.most_held(candidate)
        _, kept = self.least.kept(candidate)[number]
        least_s = (
            self._sharded_s(candidate, number, rules, (price, price / most))
            + min(seconds + price * size for seconds, size in kept)
            + more_s + price / most * divided_bytes
            for price in prices
        )  # fmt: skip
        return Joint(prices, tuple(least_s), most)

    def _sharded_s(
        self, candidate: Candidate, number: int, rules: Rules, prices: tuple[float, float]
    ) -> float:
        """With prices of a byte that is kept of a micro-batch, and of one of state."""
        hosts, known = offloads_activations(candidate.offload), self.least.known_joint
        key = (candidate.mesh.tensor, candidate.rows, number, hosts, rules, prices)
        if key not in known:
            program = self.least.shardings_of(candidate).built.program
            terms = [(cost, v) for v, cost in seconds_of(program, number, rules).items()]
            terms += [(prices[1] * size, v) for _, size, v in held_of(program, number, rules)]
            known[key] = self._whole(candidate, number).least_s(terms, prices[0])
        return known[key]

    def _whole(self, candidate: Candidate, number: int) -> WholeValues:
        hosts = offloads_activations(candidate.offload)
        known, key = self.least.known_whole, (candidate.mesh.tensor, candidate.rows, number, hosts)
        if key not in known:
            built = self.least.shardings_of(candidate).built
            known[key] = WholeValues(built, number, *self.least.kept_program(candidate, number))
        return known[key]
