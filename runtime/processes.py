"""The transport of ranks that are processes: torch.distributed, NCCL on GPUs and Gloo on CPUs.

Tensors move as bytes, so every dtype does; reductions view booleans as uint8 and complex numbers as
pairs of reals. Each channel has a process group of its own, because NCCL ignores tags and runs what
shares a group one after the other: on one group, two ranks that send to each other would lock up.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.errors import PeerLost, UsageError
from runtime.host_memory import keep_freed_memory
from runtime.orphans import end_without_launcher
from runtime.transport import Reduction

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed these two; the older names are all that 2.11 has.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def connect_processes(device: str | None = None, *, timeout_s: float = 600.0) -> "ProcessTransport":
    """Joins the processes that torchrun or `runtime.launch` started, as their environment says.

    `device` is "cuda" (one GPU per local rank, NCCL), "cpu" (Gloo) or None: GPUs if there are any.
    """
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise UsageError(
            f"{missing[0]} is not set, so this process knows no others. Start it by "
            "`torchrun --nproc-per-node=N train.py` or `python -m runtime.launch FOLDER`."
        )
    end_without_launcher()
    chosen = _choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    else:
        keep_freed_memory()
    if not dist.is_initialized():
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return ProcessTransport(chosen, timeout_s)


def disconnect() -> None:
    """Leaves the other processes; the last thing that a training script does."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _choose_device(wanted: str | None) -> torch.device:
    if wanted not in (None, "cpu", "cuda"):
        raise UsageError(f'device "{wanted}" is not "cpu" or "cuda".')
    gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted is None and gpus == 0):
        return torch.device("cpu")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_ranks > gpus:
        raise UsageError(
            f"{local_ranks} ranks on this machine share {gpus} GPUs, and each needs its own. "
            'Start at most one rank per GPU, or choose device="cpu".'
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def _telling_lost_peers() -> Iterator[None]:
    """Raises `PeerLost` where the connection to another rank broke; also a decorator.

    Gloo's errors have no type of their own: its text begins with the file that found it.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if not isinstance(error, dist.DistError) and "gloo/" not in said:
            raise
        reason = said.rpartition("] ")[2] if "gloo/" in said else said
        raise PeerLost(
            f"rank {dist.get_rank()} lost its connection to another rank, which ended or did not "
            f"answer in time: its error says why. {reason.split('. ')[0].strip()}."
        ) from error


class ProcessTransport:
    """This process's connection to the others; the default process group must exist. `timeout_s`:
    how long any of its groups waits for a rank."""

    def __init__(self, device: torch.device, timeout_s: float = 600.0) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)

    def group(self, ranks: tuple[int, ...]) -> "ProcessGroup":
        return ProcessGroup(self._new_group(ranks), ranks.index(self.rank), len(ranks))

    def stand_by(self) -> None:
        self._new_group((self.rank,))

    def channel(self, source: int, target: int) -> "ProcessChannel":
        peer = target if self.rank == source else source
        return ProcessChannel(self._new_group((source, target)), peer, self.device)

    @_telling_lost_peers()
    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A new group of these ranks; only they call this, after as many groups on each of them:
        torch names it by its ranks and that number."""
        group = dist.new_group(
            sorted(ranks), timeout=self.timeout, use_local_synchronization=True
        )
        assert isinstance(group, dist.ProcessGroup)
        return group


class ProcessGroup:
    """A group of ranks over one torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self._group = group

    @_telling_lost_peers()
    def all_reduce(self, x: torch.Tensor, op: Reduction) -> torch.Tensor:
        if x.dtype == torch.bool:  # a sum of booleans is "or"
            wide = self.all_reduce(x.to(torch.uint8), "min" if op == "min" else "max")
            return wide.to(torch.bool)
        if x.is_complex():
            if op != "sum":
                raise UsageError(f"complex numbers have no order: all_reduce {op} of {x.dtype}.")
            return torch.view_as_complex(self.all_reduce(torch.view_as_real(x.resolve_conj()), op))
        result = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, OPS[op], group=self._group)
        return result

    @_telling_lost_peers()
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        mine = as_bytes(x)
        everyone = mine.new_empty(self.size * mine.numel())
        ALL_GATHER(everyone, mine, group=self._group)
        return everyone.view(x.dtype).reshape(self.size, *x.shape)

    @_telling_lost_peers()
    def reduce_scatter(self, pieces: torch.Tensor) -> torch.Tensor:
        if pieces.dtype == torch.bool:  # a sum of booleans is "or"
            return self.reduce_scatter(pieces.to(torch.int32)).to(torch.bool)
        row = pieces.contiguous()
        if row.is_complex():
            row = torch.view_as_real(row)
        result = torch.empty_like(row[0])
        REDUCE_SCATTER(result.view(-1), row.view(-1), group=self._group)
        return torch.view_as_complex(result) if pieces.is_complex() else result

    @_telling_lost_peers()
    def all_to_all(self, pieces: torch.Tensor) -> torch.Tensor:
        outgoing = as_bytes(pieces)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self._group)
        return from_bytes(incoming, pieces)

    @_telling_lost_peers()
    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        carried = as_bytes(x).clone()
        dist.broadcast(carried, dist.get_global_rank(self._group, root), group=self._group)
        return from_bytes(carried, x)


class ProcessChannel:
    """A one-way stream of tensors between two processes; what is sent lives until it has left."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group = group
        self._peer = peer
        self._device = device
        self._leaving: deque[tuple[dist.Work, torch.Tensor]] = deque()

    @_telling_lost_peers()
    def send(self, x: torch.Tensor) -> None:
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()[0].wait()
        carried = as_bytes(x)
        work = dist.isend(carried, self._peer, group=self._group)
        assert work is not None  # None only for ranks outside the group
        self._leaving.append((work, carried))

    @_telling_lost_peers()
    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        result = torch.empty(shape, dtype=dtype, device=self._device)
        work = dist.irecv(as_bytes(result), self._peer, group=self._group)
        assert work is not None
        work.wait()
        return result

    @_telling_lost_peers()
    def flush(self) -> None:
        while self._leaving:
            self._leaving.popleft()[0].wait()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of `x` as one row of uint8; a view where `x` is contiguous."""
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(row: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `as_bytes`, for a tensor of the shape and dtype of `like`."""
    return row.view(like.dtype).reshape(like.shape)

