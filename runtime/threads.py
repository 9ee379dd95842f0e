"""The transport of ranks that are threads of one process: any mesh runs without starting processes.

A collective is a `Meeting`: everyone puts a tensor down, the last to arrive computes all results
while the others wait, and each takes its own. So inputs are read only while nobody can change them,
and sums are taken in index order: results are bit-identical and repeatable. The first rank that
fails stops all others, also those that wait.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from runtime.errors import Aborted, CollectiveMismatch, UsageError
from runtime.transport import Reduction

Result = TypeVar("Result")
Tensors = Sequence[torch.Tensor]


class World:
    """What the threads share: meetings, mailboxes and the first failure."""

    def __init__(self, size: int, timeout_s: float = 300.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.failure: tuple[int, BaseException] | None = None
        self.is_stopped = False
        self._lock = threading.Lock()
        self._finished: set[int] = set()
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._mailboxes: dict[tuple[int, int], Mailbox] = {}

    def meeting(self, ranks: tuple[int, ...]) -> "Meeting":
        """The meeting of these ranks; the same object for all of them."""
        with self._lock:
            return self._meetings.setdefault(ranks, Meeting(self, ranks))

    def mailbox(self, source: int, target: int) -> "Mailbox":
        """The mailbox from one rank to another."""
        with self._lock:
            return self._mailboxes.setdefault((source, target), Mailbox(self, source, target))

    def fail(self, rank: int, error: BaseException) -> None:
        """Records the first failure and wakes everyone who waits."""
        with self._lock:
            self.failure = self.failure or (rank, error)
        self._wake_all()

    def stop(self) -> None:
        """Ends every rank at its next collective, whether or not it has to wait there."""
        self.is_stopped = True
        self._wake_all()

    def finish(self, rank: int) -> None:
        """Says that `rank` will join no more meetings, so that nobody waits for it in vain."""
        with self._lock:
            self._finished.add(rank)
        self._wake_all()

    def wait(self, condition: threading.Condition, done: Callable[[], bool], what: "Wait") -> None:
        """Waits on a held condition until `done()`; raises if that can't happen any more."""
        condition.wait_for(lambda: done() or self._is_hopeless(what), self.timeout_s)
        if self.is_stopped:
            raise Aborted("stopped from outside")
        if done():
            return
        if self.failure is not None:
            raise Aborted(f"stopped because rank {self.failure[0]} failed: {self.failure[1]}")
        reason = f"{self.timeout_s:g} s passed"
        if gone := sorted(self._finished.intersection(what.missing())):
            reason = f"rank {gone[0]} has already finished"
        raise CollectiveMismatch(
            f"rank {what.rank} waits in {what.name} for ranks {what.missing()}, but {reason}. "
            "All ranks must run the same collectives in the same order."
        )

    def _is_hopeless(self, what: "Wait") -> bool:
        stopped = self.is_stopped or self.failure is not None
        return stopped or not self._finished.isdisjoint(what.missing())

    def _wake_all(self) -> None:
        with self._lock:
            conditions = [m.condition for m in self._meetings.values()]
            conditions += [m.condition for m in self._mailboxes.values()]
        for condition in conditions:
            with condition:
                condition.notify_all()


class Wait:
    """Who waits where, and for whom; only for messages and to see that waiting is in vain."""

    def __init__(self, rank: int, name: str, missing: Callable[[], list[int]]) -> None:
        self.rank = rank
        self.name = name
        self.missing = missing


class Meeting:
    """The place where the members of one group exchange values, again and again."""

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.condition = threading.Condition()
        self._world = world
        self._round = 0
        self._values: dict[int, object] = {}
        self._subjects: dict[int, tuple[object, ...]] = {}
        self._results: list[object] = []

    def exchange(
        self,
        index: int,
        value: Tensors,
        subject: tuple[object, ...],
        combine: Callable[[list[Tensors]], Sequence[Result]],
    ) -> Result:
        """This member's entry of `combine(values by index)`, once everyone has come.

        `subject` (operation, shapes, dtype) must be the same for all, else CollectiveMismatch.
        """
        with self.condition:
            mine = self._round
            self._values[index] = value
            self._subjects[index] = subject
            if len(self._values) == len(self.ranks):
                self._conclude(combine)
            else:
                wait = Wait(self.ranks[index], str(subject[0]), self._missing)
                self._world.wait(self.condition, lambda: self._round != mine, wait)
            result: Result = self._results[index]  # type: ignore[assignment]
            self._results[index] = None  # a member frees its own
            return result

    def _missing(self) -> list[int]:
        return [rank for index, rank in enumerate(self.ranks) if index not in self._values]

    def _conclude(self, combine: Callable[[list[Tensors]], Sequence[Result]]) -> None:
        if len(set(self._subjects.values())) > 1:
            said = "; ".join(f"rank {self.ranks[i]}: {self._subjects[i]}" for i in self._indices())
            raise CollectiveMismatch(f"ranks met in one collective with different requests: {said}")
        self._results = list(combine([self._values[i] for i in self._indices()]))  # type: ignore[misc]
        self._values.clear()
        self._subjects.clear()
        self._round += 1
        self.condition.notify_all()

    def _indices(self) -> range:
        return range(len(self.ranks))


class Mailbox:
    """Tensors on the way from one rank to another, oldest first. Also a `Channel`."""

    def __init__(self, world: World, source: int, target: int) -> None:
        self.condition = threading.Condition()
        self._world = world
        self._source = source
        self._target = target
        self._letters: deque[torch.Tensor] = deque()

    def send(self, x: torch.Tensor) -> None:
        with self.condition:
            self._letters.append(x.clone(memory_format=torch.contiguous_format))
            self.condition.notify_all()

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        wait = Wait(self._target, "receive", lambda: [self._source])
        with self.condition:
            self._world.wait(self.condition, lambda: bool(self._letters), wait)
            letter = self._letters.popleft()
        if letter.shape != torch.Size(shape) or letter.dtype != dtype:
            raise CollectiveMismatch(
                f"rank {self._target} expected {tuple(shape)} {dtype} from rank {self._source} "
                f"and got {tuple(letter.shape)} {letter.dtype}."
            )
        return letter

    def flush(self) -> None:
        """Nothing to wait for: a letter is a copy."""


class ThreadGroup:
    """One member's view of a meeting."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.index = index
        self.size = len(meeting.ranks)
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor, op: Reduction) -> torch.Tensor:
        def combine(values: list[Tensors]) -> list[torch.Tensor]:
            return self._copies(reduce_in_order([value[0] for value in values], op))

        return self._exchange(f"all_reduce {op}", [x], combine)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        def combine(values: list[Tensors]) -> list[torch.Tensor]:
            return [torch.stack([value[0] for value in values]) for _ in range(self.size)]

        return self._exchange("all_gather", [x], combine)

    def reduce_scatter(self, pieces: torch.Tensor) -> torch.Tensor:
        def combine(values: list[Tensors]) -> list[torch.Tensor]:
            columns = zip(*values, strict=True)
            return [reduce_in_order(list(column), "sum") for column in columns]

        return self._exchange("reduce_scatter", list(pieces), combine)

    def all_to_all(self, pieces: torch.Tensor) -> torch.Tensor:
        def combine(values: list[Tensors]) -> list[torch.Tensor]:
            return [torch.stack(column) for column in zip(*values, strict=True)]

        return self._exchange("all_to_all", list(pieces), combine)

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        def combine(values: list[Tensors]) -> list[torch.Tensor]:
            return self._copies(values[root][0].clone(memory_format=torch.contiguous_format))

        return self._exchange(f"broadcast from {root}", [x], combine)

    def _copies(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x, *(x.clone() for _ in range(self.size - 1))]

    def _exchange(
        self, name: str, tensors: Tensors, combine: Callable[[list[Tensors]], Sequence[Result]]
    ) -> Result:
        subject = (name, *((tuple(x.shape), x.dtype) for x in tensors))
        return self._meeting.exchange(self.index, tensors, subject, combine)


class ThreadTransport:
    """One thread's connection to the others."""

    def __init__(self, world: World, rank: int, device: torch.device) -> None:
        if not 0 <= rank < world.size:
            raise UsageError(f"rank {rank} is not in a world of {world.size} ranks.")
        self.rank = rank
        self.world_size = world.size
        self.device = device
        self._world = world

    def group(self, ranks: tuple[int, ...]) -> ThreadGroup:
        return ThreadGroup(self._world.meeting(ranks), ranks.index(self.rank))

    def stand_by(self) -> None:
        """Nothing: groups are found by their ranks."""

    def channel(self, source: int, target: int) -> Mailbox:
        return self._world.mailbox(source, target)


def reduce_in_order(values: Sequence[torch.Tensor], op: Reduction) -> torch.Tensor:
    """The reduction of equal shapes, first to last: always the same bits. Booleans: or, and."""
    total = values[0].clone(memory_format=torch.contiguous_format)
    for value in values[1:]:
        match op:
            case "sum":
                total += value
            case "max":
                torch.maximum(total, value, out=total)
            case "min":
                torch.minimum(total, value, out=total)
    return total
