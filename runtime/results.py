"""What the forwards give besides sent values: the loss, metrics and buffer updates of a step.

Each is added up (or its last value kept) over the micro-batches of the stage that makes it, then
synchronised over that stage's ranks, then told to all that need it: scalars to every rank, updates
to every rank that holds the buffer.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from runtime.errors import UsageError
from runtime.gradients import synchronise
from runtime.layout import Scalar
from runtime.mesh import Mesh
from runtime.state import SharingGroups, State, sharing_ranks

SCALAR_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)


class Results:
    """Collects the named results of a rank's stages over the micro-batches of a step."""

    def __init__(self, wanted: Sequence[Scalar]) -> None:
        self._wanted = wanted
        self._totals: dict[Scalar, torch.Tensor] = {}

    def add(self, stage: int, y: SimpleNamespace) -> None:
        """Takes in what a stage's forward of the next micro-batch returned."""
        for scalar in (scalar for scalar in self._wanted if scalar.stage == stage):
            value = getattr(y, scalar.value, None)
            if value is None:
                raise UsageError(
                    f'the forward of stage {scalar.stage} returned no "{scalar.value}", which the '
                    f'layout says is the value of "{scalar.name}". Emit the program again.'
                )
            before = self._totals.get(scalar)
            adds = scalar.reduce == "sum" and before is not None
            self._totals[scalar] = before + value if adds else value

    def total(self, scalar: Scalar, mesh: Mesh) -> torch.Tensor:
        """The synchronised result, on the ranks of the stage that makes it."""
        return synchronise(self._totals[scalar], scalar.sync, mesh)


class Announcer:
    """Makes the scalars of every stage known to all ranks, in the dtypes that they were made in."""

    def __init__(self, scalars: Sequence[Scalar], mesh: Mesh, device: torch.device) -> None:
        self._scalars = scalars
        self._mesh = mesh
        self._device = device
        self._dtypes: list[torch.dtype] | None = None

    def announce(self, results: Results) -> list[torch.Tensor]:
        """One 0-d tensor per scalar, the same on every rank."""
        here = self._mesh.pipeline.index
        mine = {
            number: self._as_scalar(scalar, results.total(scalar, self._mesh))
            for number, scalar in enumerate(self._scalars)
            if scalar.rank == here
        }
        if self._mesh.pipeline.group is None:
            return list(mine.values())
        row = torch.zeros(len(self._scalars), dtype=torch.float64, device=self._device)
        for number, value in mine.items():
            row[number] = value
        if self._dtypes is None:  # static, so learnt once: reading it back would stall a GPU
            self._dtypes = self._exchange_dtypes(mine)
        return [value.to(t) for value, t in zip(self._spread(row), self._dtypes, strict=True)]

    def _exchange_dtypes(self, mine: dict[int, torch.Tensor]) -> list[torch.dtype]:
        codes = torch.zeros(len(self._scalars), dtype=torch.int64, device=self._device)
        for number, value in mine.items():
            codes[number] = SCALAR_DTYPES.index(value.dtype)
        return [SCALAR_DTYPES[int(code)] for code in self._spread(codes)]

    def _spread(self, row: torch.Tensor) -> list[torch.Tensor]:
        """From each rank's row the entries that the rank makes."""
        assert self._mesh.pipeline.group is not None
        rows = self._mesh.pipeline.group.all_gather(row)
        return [rows[scalar.rank][number] for number, scalar in enumerate(self._scalars)]

    def _as_scalar(self, scalar: Scalar, value: torch.Tensor) -> torch.Tensor:
        if value.numel() != 1 or value.dtype not in SCALAR_DTYPES:
            raise UsageError(
                f'"{scalar.name}" of stage {scalar.stage} has shape {tuple(value.shape)} and '
                f"{value.dtype}; a loss or metric is one real number. Reduce it in the model."
            )
        return value.reshape(())


def new_buffers(
    results: Results, state: State, mesh: Mesh, groups: SharingGroups
) -> tuple[torch.Tensor | None, ...]:
    """Per state entry the buffer's new value in its own layout, where this rank holds one."""
    here = mesh.pipeline.index
    updates: list[torch.Tensor | None] = []
    for entry, tensor in zip(state.entries, state.tensors, strict=True):
        ranks = sharing_ranks(entry)
        if entry.update is None or here not in ranks:
            updates.append(None)
            continue
        update = None
        if here == entry.update.rank:
            update = results.total(entry.update, mesh).to(entry.dtype)
        if len(ranks) > 1:
            given = update if update is not None else torch.empty_like(_held(tensor))
            update = groups[ranks].broadcast(given, ranks.index(entry.update.rank))
        updates.append(update if tensor is not None else None)
    return tuple(updates)


def _held(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None  # a rank shares an entry because it holds it or updates it
    return tensor
