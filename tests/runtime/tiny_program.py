"""A hand-written two-stage program: pipeline 2 x data 2 x tensor 2, tied weight, a running mean.

The model it stands for is `TinyModel`. Stage 0: a column-parallel and a row-parallel linear.
Stage 1: dropout, a residual from stage 0, and logits over the tied embedding.
"""

from types import SimpleNamespace

import torch
from torch import nn

from ir.schedules import schedule_order
from runtime.collectives import all_reduce
from runtime.program import Stage
from runtime.random import Where, dropout, mix_key

BATCH, HIDDEN, FFN, VOCAB, SEED = 8, 4, 6, 10, 3
P_DROP = 0.25


class TinyModel(nn.Module):
    """loss(ids, target) = mean((dropout(mlp(table[ids])) @ table.T - target)^2)."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def parameter(*shape):
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.embed = nn.Module()
        self.embed.table = parameter(VOCAB, HIDDEN)
        self.mlp = nn.Module()
        self.mlp.up = parameter(FFN, HIDDEN)
        self.mlp.bias = parameter(FFN)
        self.mlp.down = parameter(HIDDEN, FFN)
        self.head = nn.Module()
        self.head.table = self.embed.table
        self.frozen = nn.Parameter(torch.full((), 0.5, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mean", torch.zeros(HIDDEN, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids, *, target, step=0):
        x = self.embed.table[ids]
        h = torch.relu(x @ self.mlp.up.T + self.mlp.bias) @ self.mlp.down.T
        where = Where(tuple(torch.arange(size) for size in h.shape), tuple(h.shape))
        d = dropout(h, P_DROP, mix_key(SEED, step, 7, 0), where) * self.frozen + x
        with torch.no_grad():
            self.mean += 0.1 * (h.mean(0) - self.mean)
            self.calls += 1
        logits = d @ self.head.table.T
        return ((logits - target) ** 2).mean(), h.abs().sum()


def stage0_forward(ctx, w, x):
    e = w.embed.table[x.ids]  # f64[2, 4]
    u = e @ w.mlp.up.T + w.mlp.bias  # f64[2, 3]  ffn/tensor
    h = all_reduce(torch.relu(u) @ w.mlp.down.T, ctx.mesh.tensor)  # f64[2, 4]
    mean = 0.1 * h.sum(0) / BATCH - ctx.first(0.1 * w.mean)
    new_mean = ctx.first(w.mean) + mean
    y = SimpleNamespace(h=h, e=e, new_mean=new_mean, calls=w.calls + 1, size=h.abs().sum())
    return y, (x.ids, e, u)


def stage0_backward(ctx, w, g, saved, dy):
    ids, e, u = saved
    g.mlp.down += dy.h.T @ torch.relu(u)
    du = (dy.h @ w.mlp.down) * (u > 0)
    g.mlp.up += du.T @ e
    g.mlp.bias += du.sum(0)
    de = dy.e / ctx.mesh.tensor.size + du @ w.mlp.up  # partial over tensor
    g.embed.table.index_add_(0, ids, de)
    return SimpleNamespace()


def _where(ctx):
    return ctx.where((BATCH, HIDDEN), data=(0, 1))


def stage1_forward(ctx, w, x):
    d = dropout(x.h, P_DROP, ctx.key(7), _where(ctx)) * w.frozen + x.e
    difference = d @ w.head.table.T - x.target
    loss = (difference**2).sum() / (BATCH * VOCAB)
    return SimpleNamespace(loss=loss), (d, difference)


def stage1_backward(ctx, w, g, saved, dy):
    d, difference = saved
    dz = difference * (2 / (BATCH * VOCAB))
    if ctx.mesh.tensor.index == 0:  # replicated over tensor, summed over it later
        g.head.table += dz.T @ d
    dd = dz @ w.head.table
    return SimpleNamespace(h=dropout(dd * w.frozen, P_DROP, ctx.key(7), _where(ctx)), e=dd)


STAGES = (
    Stage(forward=stage0_forward, backward=stage0_backward),
    Stage(forward=stage1_forward, backward=stage1_backward),
)


def layout(schedule="1f1b", micro_batches=2, data=2):
    """The layout.json of the program; the tied table is replicated, the mlp cut over tensor."""
    rows = BATCH // data // micro_batches
    over_data = {"op": "all_reduce", "axis": "data"}
    over_tensor = {"op": "all_reduce", "axis": "tensor"}

    def entry(names, shape, stages, *, kind="parameter", cut=None, sync=(), **more):
        shards = [] if cut is None else [{"axis": "tensor", "dim": cut, "outer": 1}]
        trainable = kind == "parameter" and names != ["frozen"]
        return {
            "names": names,
            "kind": kind,
            "shape": shape,
            "dtype": "float64",
            "trainable": trainable,
            "shards": shards,
            "stages": stages,
            "gradient_shards": shards,
            "sync": [over_data, *sync] if trainable else [],
            "update": None,
            **more,
        }

    def update(value, reduce, sync):
        return {"stage": 0, "value": value, "reduce": reduce, "sync": sync}

    def transfer(value, end, stage):
        shape, dtype = [rows, HIDDEN], "float64"
        return {"value": value, end: stage, "shape": shape, "dtype": dtype, "gradient": True}

    order = schedule_order(schedule, ranks=2, micro_batches=micro_batches)
    return {
        "format": "shardwright-layout/2",
        "plan": "tiny",
        "mesh": {"pipeline": 2, "data": data, "tensor": 2},
        "schedule": {"name": schedule, "order": [" ".join(map(str, row)) for row in order]},
        "micro_batches": micro_batches,
        "global_batch": BATCH,
        "state": [
            entry(["embed.table", "head.table"], [VOCAB, HIDDEN], [0, 1], sync=[over_tensor]),
            entry(["mlp.up"], [FFN, HIDDEN], [0], cut=0),
            entry(["mlp.bias"], [FFN], [0], cut=0),
            entry(["mlp.down"], [HIDDEN, FFN], [0], cut=1),
            entry(["frozen"], [], [1]),
            entry(
                ["mean"],
                [HIDDEN],
                [0, 1],
                kind="buffer",
                update=update("new_mean", "sum", [over_data]),
            ),
            entry(
                ["calls"],
                [],
                [0],
                kind="buffer",
                dtype="int64",
                update=update("calls", "keep", []),
            ),
        ],
        "inputs": [
            {"name": "ids", "index": 0, "shape": [BATCH], "dtype": "int64", "batch_dim": 0},
            {
                "name": "target",
                "index": 1,
                "shape": [BATCH, VOCAB],
                "dtype": "float64",
                "batch_dim": 0,
            },
        ],
        "stages": [
            {
                "weights": {
                    "embed": {"table": 0},
                    "mlp": {"up": 1, "bias": 2, "down": 3},
                    "mean": 5,
                    "calls": 6,
                },
                "inputs": ["ids"],
                "receives": [],
                "sends": [transfer("h", "to", 1), transfer("e", "to", 1)],
                "has_prologue": False,
            },
            {
                "weights": {"head": {"table": 0}, "frozen": 4},
                "inputs": ["target"],
                "receives": [transfer("e", "from", 0), transfer("h", "from", 0)],
                "sends": [],
                "has_prologue": False,
            },
        ],
        "loss": {"stage": 1, "value": "loss", "reduce": "sum", "sync": [over_data]},
        "metrics": [
            {"name": "size", "stage": 0, "value": "size", "reduce": "sum", "sync": [over_data]}
        ],
    }


def batches(count):
    """Global batches (ids, target)."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(VOCAB, (BATCH,), generator=generator),
            torch.randn(BATCH, VOCAB, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]
