"""Four stages with skips, a prologue and ZeRO-like shards train as plain torch does, to 1e-9."""

import chain_program as chain
import pytest
import torch

from runtime.errors import UsageError
from runtime.program import Stage
from runtime.trainer import run_threads

OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
CLIP = 0.7


def plain_torch():
    model, losses = chain.ChainModel(), []
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for batch in chain.batches(3):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.detach())
    return losses, gradients, norm.double(), dict(model.state_dict())


def train(trainer):
    losses = [trainer.step(batch) for batch in chain.batches(3)]
    norm = trainer.gradient_norm
    return losses, trainer.gradients(), norm, trainer.gather(), trainer.replica_differences()


@pytest.mark.parametrize(
    ("schedule", "micro_batches"), [("gpipe", 4), ("1f1b", 4), ("1f1b", 2), ("gpipe", 1)]
)
def test_training_equals_plain_torch(schedule, micro_batches):
    ranks = run_threads(
        chain.layout(schedule, micro_batches),
        chain,
        chain.ChainModel(),
        16,
        train,
        optimizer_options=OPTIONS,
        clip_norm=CLIP,
        keep_gradients=True,
    )
    for *found, differing in ranks:
        torch.testing.assert_close(tuple(found), plain_torch(), rtol=1e-9, atol=1e-12)
        assert differing == []
        assert torch.equal(found[2], ranks[0][2])


def test_a_value_of_another_shape_than_the_layouts_is_told():
    def wrong(ctx, w, x):
        y, saved = chain.stage2_forward(ctx, w, x)
        y.z = y.z[:, :3]
        return y, saved

    class Program:
        CONSTANTS = chain.CONSTANTS
        STAGES = (*chain.STAGES[:2], Stage(wrong, chain.stage2_backward), chain.STAGES[3])

    with pytest.raises(UsageError, match=r'stage 2 made "z" as \(2, 3\)'):
        run_threads(chain.layout("1f1b", 2), Program, chain.ChainModel(), 16, train)


def test_a_missing_constant_is_told():
    class Program:
        STAGES = chain.STAGES

    with pytest.raises(UsageError, match='no constant "offset"'):
        run_threads(chain.layout("1f1b", 2), Program, chain.ChainModel(), 16, train)
