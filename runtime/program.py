"""What an emitted program consists of (`Stage`) and what its functions are told (`Context`).

- prologue(ctx, w, x) -> namespace       once per step, with all of this data rank's rows
- forward(ctx, w, x) -> (y, saved)       once per micro-batch
- backward(ctx, w, g, saved, dy) -> dx   once per micro-batch; adds into g in place

or, where the schedule runs the two halves of a backward apart,

- backward_input(ctx, w, g, saved, dy) -> (dx, pending)
- backward_weight(ctx, w, g, pending)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from runtime.collectives import cut
from runtime.mesh import Mesh
from runtime.random import Where, mix_key


@dataclass(frozen=True, slots=True)
class Stage:
    """The functions of one pipeline stage; the backward is one function or two halves."""

    forward: Callable[..., tuple[SimpleNamespace, Any]]
    backward: Callable[..., SimpleNamespace] | None = None
    prologue: Callable[..., SimpleNamespace] | None = None
    backward_input: Callable[..., tuple[SimpleNamespace, Any]] | None = None
    backward_weight: Callable[..., None] | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """Where and when a stage function runs: the mesh, the micro-batch, the step, the seed.

    In a prologue, which sees the rows of all micro-batches, `micro` is 0 of 1 micro-batches.
    """

    mesh: Mesh
    device: torch.device
    seed: int
    step: int
    micro: int
    micro_batches: int
    prologue: SimpleNamespace | None = None

    def at(self, micro: int, micro_batches: int, prologue: SimpleNamespace | None) -> "Context":
        """The same context in another micro-batch."""
        return replace(self, micro=micro, micro_batches=micro_batches, prologue=prologue)

    def key(self, op: int, call: int = 0) -> int:
        """The random key of one op of the program in this step; the same on every rank."""
        return mix_key(self.seed, self.step, op, call)

    def rows(self, x: torch.Tensor, dim: int, outer: int = 1) -> torch.Tensor:
        """The piece of `x` along a batch dim that belongs to this data rank and micro-batch."""
        pieces = self.mesh.data.size * self.micro_batches
        if pieces == 1:
            return x
        return cut(x, pieces, dim, outer)[self._batch_index()]

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x` on the first data rank's first micro-batch, else zeros: a partial sum."""
        return x.clone() if self._batch_index() == 0 else torch.zeros_like(x)

    def where(
        self,
        shape: Sequence[int],
        data: tuple[int, int] | None = None,
        tensor: tuple[int, int] | None = None,
    ) -> Where:
        """The global indices, per dim, of the local elements of a tensor of global `shape`.

        `data` and `tensor` say as (dim, outer) which dim each axis cuts; data is applied first.
        """
        indices = [torch.arange(size, device=self.device) for size in shape]
        if data is not None:
            dim, outer = data
            indices[dim] = self.rows(indices[dim], 0, outer)
        if tensor is not None and self.mesh.tensor.size > 1:
            dim, outer = tensor
            axis = self.mesh.tensor
            indices[dim] = cut(indices[dim], axis.size, 0, outer)[axis.index]
        return Where(tuple(indices), tuple(shape))

    def _batch_index(self) -> int:
        return self.mesh.data.index * self.micro_batches + self.micro


def build_namespace(tree: Any, leaves: Sequence[Any]) -> Any:
    """The namespace of a layout's "weights": dicts become attributes, numbers become `leaves`."""
    match tree:
        case dict():
            return SimpleNamespace(**{k: build_namespace(v, leaves) for k, v in tree.items()})
        case list():
            return [build_namespace(branch, leaves) for branch in tree]
        case _:
            return leaves[tree]
