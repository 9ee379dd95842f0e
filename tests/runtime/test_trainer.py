"""A hand-written program on eight threads does what plain torch does, to 1e-9 in float64."""

import itertools
import os
import signal
import threading
import time

import pytest
import tiny_program as tiny
import torch

from runtime.errors import UsageError
from runtime.trainer import run_threads

STEPS = 3


def plain_torch(make_optimizer, clip_norm):
    """Losses, metrics, last gradients, last norm and final values of the model without any mesh."""
    model, losses, sizes = tiny.TinyModel(), [], []
    optimizer = make_optimizer(model.parameters())
    norm = None
    for step, (ids, target) in enumerate(tiny.batches(STEPS)):
        optimizer.zero_grad()
        loss, size = model(ids, target=target, step=step)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.detach())
        sizes.append(size.detach())
    return losses, sizes, gradients, norm, model.state_dict()


def train(trainer):
    results = [trainer.step(ids, target=target) for ids, target in tiny.batches(STEPS)]
    return (
        results,
        trainer.metrics["size"],
        trainer.gradients(),
        trainer.gradient_norm,
        trainer.gather(),
        trainer.replica_differences(),
    )


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
ADAMW = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "data"),
    [("1f1b", 2, 2), ("gpipe", 2, 2), ("1f1b", 4, 1), ("gpipe", 1, 1), ("1f1b", 1, 2)],
)
@pytest.mark.parametrize(
    ("name", "options", "clip_norm"),
    [("sgd", SGD, None), ("adamw", ADAMW, 0.5), ("sgd", SGD, 1e6)],
)
def test_training_equals_plain_torch(schedule, micro_batches, data, name, options, clip_norm):
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    losses, sizes, gradients, norm, values = plain_torch(lambda p: kind(p, **options), clip_norm)
    ranks = run_threads(
        tiny.layout(schedule, micro_batches, data),
        tiny,
        tiny.TinyModel(),
        4 * data,
        train,
        optimizer=name,
        optimizer_options=options,
        clip_norm=clip_norm,
        seed=tiny.SEED,
        keep_gradients=True,
    )
    for found_losses, size, found_gradients, found_norm, found_values, differing in ranks:
        close(found_losses, losses)
        close(size, sizes[-1])
        for tensor_name, gradient in gradients.items():
            close(found_gradients[tensor_name], gradient)
        for tensor_name, value in values.items():
            close(found_values[tensor_name], value)
        assert differing == []
        assert (norm is None) == (found_norm is None)
        if norm is not None:
            close(found_norm, norm)
            assert torch.equal(found_norm, ranks[0][3])
        assert all(torch.equal(a, b) for a, b in zip(found_losses, ranks[0][0], strict=True))


def test_write_back_trains_the_users_model():
    model = tiny.TinyModel()
    before = model.mlp.up.detach().clone()

    def fn(trainer):
        trainer.step(*tiny.batches(1)[0])
        return trainer.write_back()

    run_threads(tiny.layout(), tiny, model, 8, fn)
    assert not torch.equal(model.mlp.up, before)
    assert model.calls.item() == 1
    assert model.head.table is model.embed.table


def test_a_drifted_replica_is_found():
    def fn(trainer):
        if trainer.rank == 5:
            trainer.state.tensors[0][3, 1] += 1e-12
        return trainer.replica_differences()

    assert run_threads(tiny.layout(), tiny, tiny.TinyModel(), 8, fn) == [["embed.table"]] * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, target: (ids[:6], target[:6]), "global batch 8 .* expected, got 6 rows"),
        (lambda ids, target: (ids.to(torch.int32), target), "torch.int32"),
        (lambda ids, target: (ids,), "got 1 tensors"),
    ],
)
def test_a_wrong_batch_is_refused(change, message):
    def fn(trainer):
        trainer.step(*change(*tiny.batches(1)[0]))

    with pytest.raises(UsageError, match=message):
        run_threads(tiny.layout(), tiny, tiny.TinyModel(), 8, fn)


def test_models_made_by_a_function_that_seeds_torch_are_alike():
    def make():
        torch.manual_seed(3)
        model = tiny.TinyModel()
        for parameter in model.parameters():
            time.sleep(1e-3)  # another thread would draw, or seed, here
            torch.nn.init.normal_(parameter)
        return model

    ranks = run_threads(tiny.layout(), tiny, make, 8, lambda trainer: trainer.replica_differences())
    assert ranks == [[]] * 8


def untied(model):
    model.head.table = torch.nn.Parameter(model.embed.table.detach().clone())
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), 'no parameter "embed.table"'),
        (lambda: tiny.TinyModel().float(), "torch.float32; the program is for"),
        (lambda: tiny.TinyModel().to("meta"), "meta device"),
        (lambda: untied(tiny.TinyModel()), "one parameter in the plan and two"),
    ],
)
def test_another_model_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        run_threads(tiny.layout(), tiny, make, 8, lambda trainer: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, "unknown optimizer"),
        ({"optimizer_options": {"momentum": 0.9}}, "has no option"),
        ({"optimizer_options": {"lr": -1.0}}, "refused its options"),
        ({"optimizer_options": {"lr": float("nan")}}, "lr is nan"),
        ({"optimizer_options": {"lr": float("inf")}}, "lr is inf"),
        ({"clip_norm": 0.0}, "positive norm"),
        ({"clip_norm": float("nan")}, "positive norm"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        run_threads(tiny.layout(), tiny, tiny.TinyModel(), 8, lambda trainer: None, **options)


def test_another_number_of_ranks_is_refused():
    with pytest.raises(UsageError, match="for 8 ranks .* but 4 were started"):
        run_threads(tiny.layout(), tiny, tiny.TinyModel(), 4, lambda trainer: None)


def test_clipped_gradients_are_not_given_for_the_true_ones():
    def fn(trainer):
        trainer.step(*tiny.batches(1)[0])
        trainer.gradients()

    with pytest.raises(UsageError, match="keep_gradients"):
        run_threads(tiny.layout(), tiny, tiny.TinyModel(), 8, fn, clip_norm=1.0)


def test_no_rank_goes_on_after_an_interrupt():
    """Threads that compute while Python ends make it abort."""

    def go_on(trainer):
        for step in itertools.count():
            trainer.step(*tiny.batches(1)[0])
            if step == 1 and trainer.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)

    others = threading.enumerate()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_threads(tiny.layout("1f1b", 2, 2), tiny, tiny.TinyModel(), 8, go_on)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [one for one in threading.enumerate() if one.is_alive() and one not in others]
