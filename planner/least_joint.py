"""What no sharding of a block together with what it keeps beats, at some prices of a kept byte.

Input: what candidates share, a candidate. Output: per price the least seconds + price * bytes of a
call and micro-batch, with the bytes of its state at the price that goes with it. The relaxed
program of shardings decides, with what `planner.whole_values` says; what is kept and run again
beside that is as if it were cut evenly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ir.offload import offloads_activations
from planner.least_costs import LeastCosts
from planner.pins import Candidate
from planner.sharding_bound import Rules, held_of, seconds_of
from planner.stage_problem import Joint
from planner.whole_values import WholeValues

BETWEEN = (0.5, 2**0.5)
"""Times the lowest price that decides: prices near it, where they are wanted."""


@dataclass(frozen=True)
class LeastJoint:
    """Kept by tensor degree, rows and prices, in `least`. `is_finer`: at more prices."""

    least: LeastCosts
    is_finer: bool = False

    def of(
        self, candidate: Candidate, number: int, rules: Rules, more_s: float, divided_bytes: float
    ) -> Joint:
        """Of a call of a variant, at 0 and at the prices that decide what the candidate keeps; with
        other seconds and bytes of state that are the same for all shardings."""
        prices, most = self._prices(candidate), self.least.most_held(candidate)
        _, kept = self.least.kept(candidate)[number]
        least_s = (
            self._sharded_s(candidate, number, rules, (price, price / most))
            + min(seconds + price * size for seconds, size in kept)
            + more_s + price / most * divided_bytes
            for price in prices
        )  # fmt: skip
        return Joint(prices, tuple(least_s), most)

    def _prices(self, candidate: Candidate) -> tuple[float, ...]:
        found = self.least.binding_prices(candidate)
        more = [part * found[0] for part in BETWEEN if found and self.is_finer]
        return (0.0, *sorted({*found, *more}))

    def _sharded_s(
        self, candidate: Candidate, number: int, rules: Rules, prices: tuple[float, float]
    ) -> float:
        """With prices of a byte that is kept of a micro-batch, and of one of state."""
        known = self.least.known_joint
        key = (*_key(candidate, number), rules, prices)
        if key not in known:
            program = self.least.shardings_of(candidate).built.program
            terms = [(cost, v) for v, cost in seconds_of(program, number, rules).items()]
            terms += [(prices[1] * size, v) for _, size, v in held_of(program, number, rules)]
            known[key] = self.whole(candidate, number).least_s(terms, prices[0])
        return known[key]

    def whole(self, candidate: Candidate, number: int) -> WholeValues:
        """The program of a variant's shardings with what they keep whole."""
        known, key = self.least.known_whole, _key(candidate, number)
        if key not in known:
            built = self.least.shardings_of(candidate).built
            known[key] = WholeValues(built, number, *self.least.kept_program(candidate, number))
        return known[key]


@dataclass(frozen=True)
class OneSharding:
    """What several blocks of a variant take at least that have one sharding, some of which count
    more than others. `rules`: of a micro-batch, and with what is done once per step in it;
    `added_s`, `once_s`, `held_bytes`: of a block the same two, and state, of any sharding."""

    least: LeastCosts
    candidate: Candidate
    number: int
    rules: tuple[Rules, Rules]
    added_s: float
    once_s: float
    held_bytes: float
    known: dict[tuple[float, ...], float] = field(default_factory=dict, compare=False)

    def least_s(self, blocks: float, once: float, kept: float, price: float, held: float) -> float:
        """`blocks`, `once`: how many blocks' seconds count, and of what they do once per step;
        `kept` of them keep values at `price` a byte of a micro-batch; `held`: seconds of a byte of
        one block's state. What blocks keep of values that are cut is left out."""
        key = blocks, once, kept, price, held
        if key not in self.known:
            beside_s = blocks * self.added_s + once * self.once_s + held * self.held_bytes
            self.known[key] = self._sharded_s(*key) + beside_s
        return self.known[key]

    def _sharded_s(
        self, blocks: float, once: float, kept: float, price: float, held: float
    ) -> float:
        program = self.least.shardings_of(self.candidate).built.program
        each, all_ = (seconds_of(program, self.number, rules) for rules in self.rules)
        terms = [((blocks - once) / kept * cost, v) for v, cost in each.items()]
        terms += [(once / kept * cost, v) for v, cost in all_.items()]
        state = held_of(program, self.number, self.rules[0])
        terms += [(held / kept * size, v) for _, size, v in state]
        whole = LeastJoint(self.least).whole(self.candidate, self.number)
        return kept * whole.least_s(terms, price)


def _key(candidate: Candidate, number: int) -> tuple[int, int, int, bool]:
    mesh, hosts = candidate.mesh, offloads_activations(candidate.offload)
    return mesh.tensor, candidate.rows, number, hosts
