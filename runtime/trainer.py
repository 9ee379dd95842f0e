"""The train step that a user calls, on one rank: `Trainer`, and two ways to get one.

`connect` makes the trainer of this process under torchrun or `runtime.launch`; `run_threads` runs
all ranks as threads of one process. Input: an emitted program module, its layout and the model,
whose tensors are cut to this rank's share at the start and not touched again until `write_back`.
"""

import threading
from collections.abc import Callable, Mapping
from math import inf
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from runtime.batch import local_batch
from runtime.errors import Aborted, UsageError
from runtime.executor import Executor, Outcome
from runtime.gradients import clip, global_norm
from runtime.host import Hosted, fetch
from runtime.layout import Layout, StateEntry, parse_layout
from runtime.mesh import build_mesh
from runtime.optimizers import LocalOptimizer
from runtime.processes import connect_processes
from runtime.program import Context
from runtime.replicas import differing_entries
from runtime.state import build_state, full_tensor, sharing_groups
from runtime.threads import ThreadTransport, World
from runtime.transport import Transport
from runtime.zero import share_updates

Result = TypeVar("Result")
STOPPING_S = 5.0
"""For ranks that are threads to reach their next collective, where they notice a stop."""


class Trainer:
    """Trains this rank's share of a model. Every method is collective: all ranks call it."""

    def __init__(
        self,
        program: ModuleType | Any,
        layout: Layout | Mapping[str, Any],
        model: nn.Module,
        *,
        transport: Transport,
        optimizer: str = "adamw",
        optimizer_options: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        keep_gradients: bool = False,
    ) -> None:
        """`keep_gradients` keeps a copy from before clipping, for `gradients`."""
        self.layout = layout if isinstance(layout, Layout) else parse_layout(layout)
        self.mesh = build_mesh(self.layout.mesh, transport)
        self.device = transport.device
        self.model = model
        self.steps_done = 0
        self.metrics: dict[str, torch.Tensor] = {}
        self.gradient_norm: torch.Tensor | None = None  # of the last step; None without clipping
        if len(program.STAGES) != len(self.layout.stages):
            raise UsageError(
                f"program.py has {len(program.STAGES)} stages and layout.json "
                f"{len(self.layout.stages)}; they don't belong together. Emit the program again."
            )
        if clip_norm is not None and not 0 < clip_norm < inf:
            raise UsageError(f"clip_norm is {clip_norm}; give a positive norm, or None.")
        constants = getattr(program, "CONSTANTS", {})
        self.state = build_state(
            self.layout, model, self.mesh, device=self.device, constants=constants
        )
        self._groups = sharing_groups(self.layout, self.mesh, transport)
        self._executor = Executor(
            self.layout,
            program.STAGES,
            self.state,
            mesh=self.mesh,
            transport=transport,
            groups=self._groups,
        )
        self.optimizer = LocalOptimizer(optimizer, self.state, optimizer_options or {})
        self._clip_norm = clip_norm
        self._seed = seed
        self._keeps_gradients = keep_gradients
        self._gradients: tuple[torch.Tensor | None, ...] | None = None

    @property
    def rank(self) -> int:
        return self.mesh.rank

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One training step on the GLOBAL batch, given as the model takes it; the global loss."""
        self._gradients = None  # those of the step before may have memory of their own
        batch = local_batch(self.layout, self.mesh, args, kwargs)
        context = Context(self.mesh, self.device, self._seed, self.steps_done, 0, 1)
        outcome = self._executor.run(batch, context, self._update)
        self.metrics = outcome.metrics
        self.steps_done += 1
        return outcome.loss

    def _update(self, outcome: Outcome) -> None:
        self._gradients = outcome.gradients
        if self._clip_norm is not None:
            if self._keeps_gradients:
                self._gradients = tuple(g if g is None else g.clone() for g in outcome.gradients)
            self.gradient_norm = global_norm(self.state, outcome.gradients, self.mesh, self.device)
            clip(outcome.gradients, self.gradient_norm, self._clip_norm)
        self.optimizer.step(outcome.gradients)
        share_updates(self.state, self.mesh)
        for tensor, new in zip(self.state.tensors, outcome.buffers, strict=True):
            if tensor is not None and new is not None:
                tensor.copy_(new)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full synchronised gradients of the last step, before clipping, by parameter name."""
        if self._gradients is None:
            raise UsageError("there are no gradients before the first step; call step first.")
        if self._clip_norm is not None and not self._keeps_gradients:
            raise UsageError(
                "clipping scaled the gradients in place. Make the trainer with keep_gradients=True."
            )
        return {
            name: full
            for entry, local in zip(self.state.entries, self._gradients, strict=True)
            if entry.trainable
            for full in [self._full(entry, local, is_piece=entry.zero > 0)]
            for name in entry.names
        }

    def _full(self, entry: StateEntry, local: torch.Tensor | None, is_piece: bool) -> torch.Tensor:
        return full_tensor(entry, local, self.mesh, self.device, is_piece=is_piece)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The optimizer's whole tensors on every rank, as "exp_avg of NAME"; none before a step."""
        if self.steps_done == 0:
            return {}
        held = self.optimizer.local_state()
        return {
            f"{slot} of {name}": full
            for entry in self.state.entries
            if entry.trainable
            for slot in self.optimizer.slots
            for found in [held.get(entry.names[0], {}).get(slot)]
            for local in [fetch(found)[0] if isinstance(found, Hosted) else found]
            for full in [self._full(entry, local, is_piece=entry.zero > 0)]
            for name in entry.names
        }

    def gather(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer whole, by name, on every rank; tied names share a tensor."""
        return {
            name: full
            for entry, local in zip(self.state.entries, self.state.tensors, strict=True)
            if entry.kind != "constant"
            for full in [self._full(entry, local, is_piece=entry.zero == 3)]
            for name in entry.names
        }

    def write_back(self) -> nn.Module:
        """The model with the trained parameters and buffers copied into it."""
        values = self.gather()
        targets = dict(self.model.named_buffers(remove_duplicate=False))
        targets |= dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, value in values.items():
                targets[name].copy_(value)
        return self.model

    def replica_differences(self) -> list[str]:
        """Names of parameters and buffers whose copies on different ranks are not bit-equal."""
        return differing_entries(self.state, self.mesh, self._groups, self.device)


def connect(
    program: ModuleType | Any,
    layout: Layout | Mapping[str, Any],
    model: nn.Module,
    *,
    device: str | None = None,
    timeout_s: float = 600.0,
    **options: Any,
) -> Trainer:
    """The trainer of this process, started by torchrun or `runtime.launch`.

    `device` is "cuda", "cpu" or None for GPUs where there are any; `options` go to `Trainer`.
    """
    transport = connect_processes(device, timeout_s=timeout_s)
    return Trainer(program, layout, model, transport=transport, **options)


def run_threads(
    layout: Layout | Mapping[str, Any],
    program: ModuleType | Any,
    model: nn.Module | Callable[[], nn.Module],
    n: int,
    fn: Callable[[Trainer], Result],
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = 300.0,
    **options: Any,
) -> list[Result]:
    """Runs `fn(trainer)` on each of `n` ranks, all threads of this process; results by rank.

    `model` is one module, which all ranks only read, or a function that makes one per rank, called
    for one rank at a time: it may seed torch's generator. `options` go to `Trainer`. The first
    error of any rank stops the others and is raised.
    """
    parsed = layout if isinstance(layout, Layout) else parse_layout(layout)
    world = World(n, timeout_s)
    results: dict[int, Result] = {}
    making = threading.Lock()

    def run(rank: int) -> None:
        try:
            transport = ThreadTransport(world, rank, torch.device(device))
            with making:
                own = model if isinstance(model, nn.Module) else model()
            results[rank] = fn(Trainer(program, parsed, own, transport=transport, **options))
        except BaseException as error:
            if not isinstance(error, Aborted):
                error.add_note(f"on rank {rank}")
            world.fail(rank, error)
        finally:
            world.finish(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    cores = torch.get_num_threads()
    torch.set_num_threads(max(1, cores // n))  # each rank would start as many as all cores
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C, say: Python can't end well while they compute
        world.stop()
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join(STOPPING_S)
        raise
    finally:
        torch.set_num_threads(cores)
    if world.failure is not None:
        raise world.failure[1]
    return [results[rank] for rank in range(n)]
