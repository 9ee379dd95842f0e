"""What no sharding of a block beats: seconds of one call against the bytes of its state.

Input: the shardings of a model, a variant. Output: `BlockBound`. The program of
`planner.sharding_program` is relaxed to real numbers, and nothing but the variant counts. What
happens once per step is left out, also what may be made once for all micro-batches (`early`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from planner.frontier import Frontier, frontier
from planner.sharding import Shardings
from planner.sharding_program import PHASES, Phase

EVENLY: dict[Phase, float] = {**dict.fromkeys(PHASES, 1.0), "early": 0.0}
"""Every phase of a micro-batch once."""
PRICES, FEW_PRICES = 3, 2
"""Lines of the curve of a block that repeats, and of one that does not."""


@dataclass(frozen=True)
class BlockBound:
    """Of one call and micro-batch: (seconds of forward and backward, bytes of state), and the
    least seconds of each node by its first output."""

    curve: Frontier
    node_s: dict[str, float]


def block_bound(
    shardings: Shardings, number: int, early: Collection[str], *, exact: bool
) -> BlockBound:
    """The curve of one variant; unless `exact`, a point: every node by its fastest strategy, and
    no state. `early` values cost nothing."""
    node_s = shardings.prices[number].least_s() | dict.fromkeys(early, 0.0)
    if not exact:
        return BlockBound(Frontier(((sum(node_s.values()), 0.0),), ()), node_s)
    many = len(shardings.kinds[number].calls) > 1
    return BlockBound(frontier(_Held(shardings, number), PRICES if many else FEW_PRICES), node_s)


def least_total_s(
    shardings: Shardings, weights: Mapping[Phase, float], once: float = 0.0, update: float = 0.0,
    exchange_s: float = 0.0,
) -> float:  # fmt: skip
    """The least sum over all calls, whose blocks agree on what goes between them: of `weights` by
    phase times the seconds of a micro-batch, of `once` times what is done once per step, of
    `update` times what updating takes, and of `exchange_s` times the bytes of parameters."""
    program = shardings.built.program
    terms = [(weights[phase] * cost, v) for phase, row in program.each.items() for cost, v in row]
    terms += [(once * seconds, v) for seconds, v in program.once]
    terms += [(update * seconds, v) for seconds, v in program.update]
    terms += [(exchange_s * size, v) for size, v in program.trained]
    return shardings.relaxation.minimum(terms, only=()).bound


@dataclass(frozen=True)
class _Held:
    """The program of all blocks, with the seconds and the state of one call alone: what the other
    blocks take does not count."""

    shardings: Shardings
    number: int

    def priced(self, price_s: float) -> tuple[float, float, float]:
        program = self.shardings.built.program
        seconds = program.of_call.get(self.number, [])
        held = [(size, v) for _, size, v in program.held.get(self.number, [])]
        terms = [*seconds, *((price_s * size, v) for size, v in held)]
        found = self.shardings.relaxation.minimum(terms, only={v for _, v in terms})
        total_s, held_bytes = (sum(x * found[v] for x, v in terms) for terms in (seconds, held))
        return total_s, held_bytes, found.bound

    def least_bytes(self) -> float:
        """Every state tensor and every gradient in its smallest layout."""
        least: dict[str, float] = {}
        for group, size, _ in self.shardings.built.program.held.get(self.number, []):
            least[group] = min(size, least.get(group, size))
        return sum(least.values())
