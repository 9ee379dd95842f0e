"""The hand-written program under ZeRO: the numbers of plain torch, and only pieces held."""

from types import SimpleNamespace

import pytest
import tiny_program as tiny
import torch
from test_trainer import ADAMW, SGD, close, plain_torch, train

from runtime.errors import LayoutError
from runtime.layout import parse_layout
from runtime.program import Stage
from runtime.trainer import run_threads
from runtime.zero import gather, scatter_add, zeros

RANKS = {"data 2": (2, 2), "data 4": (4, 1)}


def leaves(tree, change):
    """The nested namespaces of the tiny program, changed block by block."""
    done = change(SimpleNamespace(**{k: v for k, v in vars(tree).items() if not nested(v)}))
    below = {k: leaves(v, change) for k, v in vars(tree).items() if nested(v)}
    return SimpleNamespace(**vars(done), **below)


def nested(value):
    return isinstance(value, SimpleNamespace)


def added(g, grads, mesh):
    scatter_add(SimpleNamespace(**{k: v for k, v in vars(g).items() if not nested(v)}), grads, mesh)
    for name in [name for name, value in vars(g).items() if nested(value)]:
        added(getattr(g, name), vars(grads)[name], mesh)


def under_zero(stage):
    """A stage that gathers its weights, and scatters its gradients in every micro-batch."""

    def forward(ctx, w, x):
        return stage.forward(ctx, leaves(w, lambda names: gather(names, ctx.mesh)), x)

    def backward(ctx, w, g, saved, dy):
        whole, grads = leaves(w, lambda names: gather(names, ctx.mesh)), leaves(g, zeros)
        dx = stage.backward(ctx, whole, grads, saved, dy)
        added(g, grads, ctx.mesh)
        return dx

    return Stage(forward, backward)


class ZeroProgram:
    STAGES = tuple(under_zero(stage) for stage in tiny.STAGES)


def layout(zero, data=2, micro_batches=2):
    table = tiny.layout("1f1b", micro_batches, data) | {"format": "shardwright-layout/2"}
    for entry in table["state"]:
        entry["zero"] = zero if entry["kind"] == "parameter" else 0
    return table


def run(zero, fn, data=2, micro_batches=2, **options):
    program = tiny if zero < 2 else ZeroProgram
    return run_threads(
        layout(zero, data, micro_batches), program, tiny.TinyModel(), 4 * data, fn,
        seed=tiny.SEED, keep_gradients=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("name", "options", "clip_norm"), [("sgd", SGD, None), ("adamw", ADAMW, 0.5), ("sgd", SGD, 0.3)]
)
def test_training_equals_plain_torch(zero, ranks, name, options, clip_norm):
    data, micro_batches = RANKS[ranks]
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    losses, sizes, gradients, norm, values = plain_torch(lambda p: kind(p, **options), clip_norm)
    found = run(
        zero, train, data, micro_batches, optimizer=name, optimizer_options=options,
        clip_norm=clip_norm,
    )  # fmt: skip
    for found_losses, size, found_gradients, found_norm, found_values, differing in found:
        close(found_losses, losses)
        close(size, sizes[-1])
        assert found_gradients.keys() >= gradients.keys()
        for tensor_name, gradient in gradients.items():
            close(found_gradients[tensor_name], gradient)
        for tensor_name, value in values.items():
            close(found_values[tensor_name], value)
        assert differing == []
        if norm is not None:
            close(found_norm, norm)
            assert torch.equal(found_norm, found[0][3])


def elements(tensors):
    return sum(t.numel() for t in tensors if t is not None)


def test_each_stage_divides_what_it_says():
    """Elements of parameters, of gradients and of the optimizer's state on rank 0 of four."""

    def fn(trainer):
        trainer.step(*tiny.batches(1)[0])
        state, held = trainer.state, trainer.optimizer.local_state()
        slots = [t for found in held.values() for k, t in found.items() if k != "step"]
        of_parameters = [e.kind == "parameter" for e in state.entries]
        tensors = [t for t, p in zip(state.tensors, of_parameters, strict=True) if p]
        return elements(tensors), elements(state.accumulators), elements(slots)

    table, up = tiny.VOCAB * tiny.HIDDEN, tiny.FFN * tiny.HIDDEN // 2
    whole = table + up + tiny.FFN // 2 + up
    pieces = table // 4 + up // 4 + 1 + up // 4  # three biases in four pieces: one each
    found = [run(zero, fn, 4, 1)[0] for zero in range(4)]
    assert found == [
        (whole, whole, 2 * whole), (whole, whole, 2 * pieces), (whole, pieces, 2 * pieces),
        (pieces, pieces, 2 * pieces),
    ]  # fmt: skip


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_optimizers_state_is_given_whole(zero):
    def fn(trainer):
        before = trainer.optimizer_state()
        trainer.step(*tiny.batches(1)[0])
        return before, trainer.optimizer_state()

    model = tiny.TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    ids, target = tiny.batches(1)[0]
    model(ids, target=target)[0].backward()
    optimizer.step()
    for before, after in run(zero, fn, optimizer_options=ADAMW):
        assert before == {}
        for name in ("embed.table", "mlp.up", "mlp.bias", "mlp.down"):
            for slot in ("exp_avg", "exp_avg_sq"):
                close(after[f"{slot} of {name}"], optimizer.state[model.get_parameter(name)][slot])


def test_a_drifted_piece_of_a_tied_parameter_is_found():
    def fn(trainer):
        if trainer.rank == 5:
            trainer.state.tensors[0][1] += 1e-12
        return trainer.replica_differences()

    assert run(3, fn) == [["embed.table"]] * 8


def test_a_summed_piece_lies_in_the_memory_of_its_accumulator():

    def fn(trainer):
        trainer.step(*tiny.batches(1)[0])
        pairs = zip(trainer.state.accumulators, trainer._gradients, strict=True)
        return all(
            a.untyped_storage().data_ptr() == g.untyped_storage().data_ptr()
            for a, g in pairs if a is not None
        )  # fmt: skip

    assert all(run(1, fn))


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (1, {"zero": 4}, r'state\[1\]: "zero" is 4, not 0, 1, 2 or 3'),
        (1, {"zero": "2"}, "is .2., not of type int"),
        (5, {"zero": 1}, "is 1 for a buffer that is not a parameter whole on every data rank"),
        (1, {"zero": 1, "shards": [{"axis": "data", "dim": 0, "outer": 1}]}, "is not a parameter"),
        (
            1,
            {"zero": 2, "sync": [{"op": "reduce_scatter", "axis": "data", "dim": 0, "outer": 1}]},
            "is not a parameter whole",
        ),
    ],
)
def test_a_wrong_division_is_refused(number, change, message):
    table = tiny.layout()
    table["state"][number] |= change
    with pytest.raises(LayoutError, match=message):
        parse_layout(table)


def test_a_layout_of_the_first_version_divides_nothing():
    assert {entry.zero for entry in parse_layout(tiny.layout()).state} == {0}
