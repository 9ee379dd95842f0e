"""A hand-written four-stage program with what the tiny one lacks.

A value that jumps over stages and whose gradients come from two of them, a mask without a gradient,
a prologue, a constant, a weight cut over data (gathered to be used, its gradient reduce-scattered),
a weight cut over both axes, and a running sum cut over tensor. It stands for `ChainModel`.
"""

from types import SimpleNamespace

import torch
from torch import nn

from ir.schedules import schedule_order
from runtime.collectives import all_gather, all_reduce, shard
from runtime.program import Stage

BATCH, WIDTH = 8, 4
CONSTANTS = {"offset": torch.arange(WIDTH, dtype=torch.float64)}


class ChainModel(nn.Module):
    """Four stages: x = input * a + offset; y = x @ b; z = y * m + x; loss = mean((z + x) ** 2)."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.a = nn.Parameter(torch.rand(WIDTH, generator=generator, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, batch):
        x = batch["x"] * self.a + CONSTANTS["offset"]
        y = x @ self.b
        mask = (batch["x"] > batch["bound"]).double()
        z = y * mask + x
        self.seen += y.detach().sum(0)
        return ((z + x) ** 2).mean()


def stage0_prologue(ctx, w, x):
    assert ctx.micro_batches == 1
    return SimpleNamespace(mask=x.x > x.bound)


def stage0_forward(ctx, w, x):
    a = all_gather(w.a, ctx.mesh.data, 0)
    value = x.x * a + w.offset
    rows = x.x.shape[0]
    mask = ctx.prologue.mask[ctx.micro * rows : (ctx.micro + 1) * rows]
    return SimpleNamespace(x=value, mask=mask), x.x


def stage0_backward(ctx, w, g, saved, dy):
    assert not hasattr(dy, "mask")
    g.a += (dy.x * saved).sum(0)
    return SimpleNamespace()


def stage1_forward(ctx, w, x):
    y = all_gather(x.x @ all_gather(w.b, ctx.mesh.data, 0), ctx.mesh.tensor, 1)
    seen = w.seen / (ctx.micro_batches * ctx.mesh.data.size) + shard(y.sum(0), ctx.mesh.tensor, 0)
    return SimpleNamespace(y=y, seen=seen), x.x


def stage1_backward(ctx, w, g, saved, dy):
    dy_local = shard(dy.y, ctx.mesh.tensor, 1)
    g.b += saved.T @ dy_local
    b = all_gather(w.b, ctx.mesh.data, 0)
    return SimpleNamespace(x=all_reduce(dy_local @ b.T, ctx.mesh.tensor))


def stage2_forward(ctx, w, x):
    return SimpleNamespace(z=x.y * x.mask + x.x), x.mask


def stage2_backward(ctx, w, g, saved, dy):
    return SimpleNamespace(y=dy.z * saved, x=dy.z)


def stage3_forward(ctx, w, x):
    t = x.z + x.x
    return SimpleNamespace(loss=(t**2).sum() / (BATCH * WIDTH)), t


def stage3_backward(ctx, w, g, saved, dy):
    dt = saved * (2 / (BATCH * WIDTH))
    return SimpleNamespace(z=dt, x=dt)


STAGES = (
    Stage(stage0_forward, stage0_backward, stage0_prologue),
    Stage(stage1_forward, stage1_backward),
    Stage(stage2_forward, stage2_backward),
    Stage(stage3_forward, stage3_backward),
)


def layout(schedule, micro_batches):
    """The layout.json for pipeline 4 x data 2 x tensor 2."""
    rows = BATCH // 2 // micro_batches
    over_data = {"axis": "data", "dim": 0, "outer": 1}
    over_tensor = {"axis": "tensor", "dim": 1, "outer": 1}
    common = {"dtype": "float64", "shards": [], "gradient_shards": [], "sync": [], "update": None}

    def transfer(value, end, stage, dtype="float64"):
        shape, gradient = [rows, WIDTH], dtype == "float64"
        return {"value": value, end: stage, "shape": shape, "dtype": dtype, "gradient": gradient}

    def stage(weights, inputs, receives, sends, has_prologue=False):
        return {
            "weights": weights,
            "inputs": inputs,
            "receives": receives,
            "sends": sends,
            "has_prologue": has_prologue,
        }

    update = {
        "stage": 1,
        "value": "seen",
        "reduce": "sum",
        "sync": [{"op": "all_reduce", "axis": "data"}],
    }
    scatter = {"op": "reduce_scatter", **over_data}
    order = schedule_order(schedule, ranks=4, micro_batches=micro_batches)
    return {
        "format": "shardwright-layout/2",
        "plan": "chain",
        "mesh": {"pipeline": 4, "data": 2, "tensor": 2},
        "schedule": {"name": schedule, "order": [" ".join(map(str, row)) for row in order]},
        "micro_batches": micro_batches,
        "global_batch": BATCH,
        "state": [
            common
            | {"names": ["a"], "kind": "parameter", "shape": [WIDTH], "trainable": True}
            | {"stages": [0], "shards": [over_data], "sync": [scatter]},
            common
            | {"names": ["b"], "kind": "parameter", "shape": [WIDTH, WIDTH], "trainable": True}
            | {"stages": [1], "shards": [over_tensor, over_data], "sync": [scatter]}
            | {"gradient_shards": [over_tensor]},
            common
            | {"names": ["seen"], "kind": "buffer", "shape": [WIDTH], "trainable": False}
            | {"stages": [1], "shards": [{**over_tensor, "dim": 0}], "update": update},
            common
            | {"names": ["offset"], "kind": "constant", "shape": [WIDTH], "trainable": False}
            | {"stages": [0]},
        ],
        "inputs": [
            # the path finds it, whatever the order in which the batch lists its tensors
            {"name": "x", "index": 1, "shape": [BATCH, WIDTH], "dtype": "float64", "batch_dim": 0}
            | {"path": "[0][0]['x']"},
            {"name": "bound", "index": 0, "shape": [], "dtype": "float64", "batch_dim": None}
            | {"path": "[0][0]['bound']"},
        ],
        "stages": [
            stage(
                {"a": 0, "offset": 3},
                ["x", "bound"],
                [],
                [transfer("x", "to", 1), transfer("x", "to", 2), transfer("x", "to", 3)]
                + [transfer("mask", "to", 2, "bool")],
                True,
            ),
            stage({"b": 1, "seen": 2}, [], [transfer("x", "from", 0)], [transfer("y", "to", 2)]),
            stage(
                {},
                [],
                [transfer("y", "from", 1), transfer("mask", "from", 0, "bool")]
                + [transfer("x", "from", 0)],
                [transfer("z", "to", 3)],
            ),
            stage({}, [], [transfer("z", "from", 2), transfer("x", "from", 0)], []),
        ],
        "loss": {
            "stage": 3,
            "value": "loss",
            "reduce": "sum",
            "sync": [{"op": "all_reduce", "axis": "data"}],
        },
        "metrics": [],
    }


def batches(count):
    """Global batches, in an order of keys that is not the layout's."""
    generator = torch.Generator().manual_seed(5)
    bound = torch.tensor(0.1, dtype=torch.float64)
    return [
        {"x": torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64), "bound": bound}
        for _ in range(count)
    ]
