"""Times a call that may take a microsecond or a second, on a machine that others may use too.

Input: a callable. Output: a `Sample`, the median over blocks of calls and how uncertain it is. The
ranks of a group time the same call at the same moment: each block has as many calls on every rank,
and all decide together whether to go on. A block takes what it took on the slowest rank, since a
step waits for that: on two cores of a shared machine 1.1 times the mean. What stays uncertain is
for the reader to leave out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

NOISE_LIMIT = 0.15
"""Relative uncertainty of a median above which it says too little."""
MOST_CALLS = 2**20
"""In a block, if a clock should stand still."""
Agree = Callable[[Sequence[float]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class Sample:
    """`seconds`: of one call, the median; `spread`: the quartiles' distance over the median.

    `noise`: the relative standard error of the median, 0.93 spread / sqrt(blocks), as of a normal
    distribution (1.253 sigma / sqrt(n), with the quartiles 1.349 sigma apart).
    """

    seconds: float
    spread: float
    noise: float


def alone(values: Sequence[float]) -> list[list[float]]:
    """The agreement of a single rank: its own values."""
    return [list(values)]


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """`block_s`: the least time of a block; `budget_s`: no new round of blocks starts later;
    `blocks`: of a round; `finish` waits until a device has done what it was given; `agree` gives
    every rank's values to all; `between`: called before every call and not timed, since in a
    program no call finds the caches as its last run left them."""

    block_s: float = 0.003
    budget_s: float = 0.2
    blocks: int = 5
    clock: Callable[[], float] = time.perf_counter
    finish: Callable[[], None] = lambda: None
    agree: Agree = alone
    between: Callable[[], object] | None = None

    def time(self, call: Callable[[], object], warm_up: int = 1) -> Sample:
        """The seconds of `call`, after `warm_up` calls: rounds of blocks until the median is
        certain, or the budget is spent. Collective where `agree` is."""
        self._block(call, warm_up)
        start_s = self.clock()
        calls = self._calls_per_block(call)
        times: list[float] = []
        while True:
            rows = self.agree(self._round(call, calls, start_s))
            times += [max(column) for column in zip(*rows, strict=True)][1:]
            sample = sample_of(times)
            if sample.noise <= NOISE_LIMIT or max(row[0] for row in rows) > self.budget_s:
                return sample

    def _round(self, call: Callable[[], object], calls: int, start_s: float) -> list[float]:
        """Seconds since the start, then the seconds per call of each block."""
        times = [self._block(call, calls) for _ in range(self.blocks)]
        return [self.clock() - start_s, *times]

    def _calls_per_block(self, call: Callable[[], object]) -> int:
        """How many calls fill a block on the fastest rank, with what is called between."""
        calls = 1
        while True:
            start_s = self.clock()
            self._block(call, calls)
            least_s = min(row[0] for row in self.agree([self.clock() - start_s]))
            if least_s >= self.block_s or calls >= MOST_CALLS:
                return calls
            calls = max(2 * calls, int(self.block_s / max(least_s / calls, 1e-9)) + 1)

    def _block(self, call: Callable[[], object], calls: int) -> float:
        if self.between is not None:
            return sum(self._one(call, self.between) for _ in range(calls)) / calls
        start_s = self.clock()
        for _ in range(calls):
            call()
        self.finish()
        return (self.clock() - start_s) / calls

    def _one(self, call: Callable[[], object], between: Callable[[], object]) -> float:
        between()
        start_s = self.clock()
        call()
        end_s = self.clock()
        look_s = self.clock() - end_s  # what a look at the clock takes
        return max(1e-9, end_s - start_s - look_s)


def slowdown(work: Callable[[], object], seconds: float) -> float:
    """How much longer a thread takes than it computes, while it repeats `work` that long: the
    processes that want to compute, over the cores there are. 1 on a machine of one's own."""
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start_s < seconds:
        work()
    wall_s = time.perf_counter() - start_s
    return max(1.0, wall_s / max(time.thread_time() - start_cpu_s, 1e-9))


def sample_of(times: Sequence[float]) -> Sample:
    """Median, spread and noise of block times.

    >>> sample_of([1.0, 1.0, 1.0, 1.0])
    Sample(seconds=1.0, spread=0.0, noise=0.0)
    """
    middle = median(times)
    if len(times) < 2:
        return Sample(middle, 0.0, 0.0)
    low, _, high = quantiles(times, n=4, method="inclusive")
    spread = (high - low) / middle
    return Sample(middle, spread, 0.93 * spread / len(times) ** 0.5)
