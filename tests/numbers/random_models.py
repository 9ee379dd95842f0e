"""Random small models: chains of blocks, skips, tied, frozen and unused parameters, two losses.

Input: a seed. Output: `Case`, a model with its batch and loss. Widths are multiples of 2, 3 and 4
so that every tensor degree has something to cut; the batch has 12 rows, unlike any other dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, SEQ, WIDTH, VOCAB = 12, 6, 24, 48
ACTIVATIONS = (functional.gelu, torch.tanh, functional.silu, torch.relu, torch.sigmoid)


@dataclass(frozen=True)
class Case:
    """A model, its arguments and how its loss is found."""

    seed: int
    model: nn.Module
    args: tuple[Any, ...]
    loss: Callable[[Any], Tensor]


class Feedforward(nn.Module):
    def __init__(self, random: Random):
        super().__init__()
        hidden = random.choice([24, 36, 48])
        self.act = random.choice(ACTIVATIONS)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden, bias=random.random() < 0.5)
        self.gate = nn.Linear(WIDTH, hidden) if random.random() < 0.5 else None
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        y = self.act(self.up(h))
        return x + self.down(y if self.gate is None else y * self.gate(h))


class RMSNorm(nn.Module):
    def __init__(self, random: Random):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class Attention(nn.Module):
    def __init__(self, random: Random):
        super().__init__()
        self.heads, self.kv = random.choice([(12, 12), (12, 6), (12, 4), (6, 6), (4, 2), (12, 1)])
        self.size = WIDTH // self.heads
        self.causal, self.fused = random.random() < 0.5, random.random() < 0.5
        self.by_hand = random.random() < 0.25
        parts = [self.heads, self.kv, self.kv]
        if self.fused:
            self.qkv = nn.Linear(WIDTH, sum(parts) * self.size)
        else:
            self.parts = nn.ModuleList(nn.Linear(WIDTH, p * self.size, bias=False) for p in parts)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        sizes = [self.heads * self.size, self.kv * self.size, self.kv * self.size]
        split = self.qkv(x).split(sizes, -1) if self.fused else [p(x) for p in self.parts]
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in split)
        if self.by_hand:
            repeat = self.heads // self.kv
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            y = torch.softmax(q @ k.transpose(-1, -2) / self.size**0.5, -1) @ v
        else:
            y = functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, enable_gqa=self.heads != self.kv
            )
        return x + self.out(y.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    def __init__(self, random: Random):
        super().__init__()
        groups = random.choice([1, 1, 3, WIDTH])
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups, bias=random.random() < 0.5)

    def forward(self, x):
        return x + torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2))


class GroupNorm(nn.Module):
    def __init__(self, random: Random):
        super().__init__()
        self.norm = nn.GroupNorm(random.choice([1, 4, 6]), WIDTH)

    def forward(self, x):
        return x + self.norm(x.transpose(1, 2)).transpose(1, 2)


class BatchNorm(nn.Module):
    def __init__(self, random: Random):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2) + x


class MovingMean(nn.Module):
    """A buffer that follows the activations, and one that counts steps."""

    def __init__(self, random: Random):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.seen.mul_(0.9).add_(x.detach().mean((0, 1)) * 0.1)
        self.steps += 1
        return x * self.scale + x.cumsum(1) * 0.1


class Experts(nn.Module):
    """Softly routed experts, as two einsums over an expert dim."""

    def __init__(self, random: Random):
        super().__init__()
        self.route = nn.Linear(WIDTH, 12)
        self.up = nn.Parameter(torch.randn(12, WIDTH, 4) * 0.2)
        self.down = nn.Parameter(torch.randn(12, 4, WIDTH) * 0.2)

    def forward(self, x):
        weight = torch.softmax(self.route(x), -1)
        h = torch.relu(torch.einsum("bsd,edf->ebsf", x, self.up))
        y = torch.einsum("ebsf,efd->ebsd", h, self.down)
        return x + torch.einsum("ebsd,bse->bsd", y, weight)


class Rotate(nn.Module):
    """Slices, halves, concatenation and a gather by a buffer of indices."""

    def __init__(self, random: Random):
        super().__init__()
        self.register_buffer("order", torch.randperm(SEQ))
        self.weight = nn.Parameter(torch.rand(2, 12))

    def forward(self, x):
        left, right = x.unflatten(-1, (2, 12)).unbind(-2)
        turned = torch.cat([-right, left], -1) * self.weight.flatten()
        return x + turned[:, self.order] + functional.pad(x[:, 1:], (0, 0, 1, 0))


class Unit(nn.Module):
    """Vectors of length one, some of them zero before."""

    def __init__(self, random: Random):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        high = torch.relu(x - x.detach().amax(-1, keepdim=True) / 2)
        return x + functional.normalize(high * self.weight, dim=-1)


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank addition and a parameter that nothing reads."""

    def __init__(self, random: Random):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.low, self.high = nn.Linear(WIDTH, 6, bias=False), nn.Linear(6, WIDTH, bias=False)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x + self.base(x) + self.high(self.low(x))


KINDS = (Feedforward, RMSNorm, Attention, Convolution, GroupNorm, MovingMean, Experts, Rotate, Unit,
         Adapter, Feedforward, Attention)  # fmt: skip


class Chain(nn.Module):
    """Embedding or a projection, random blocks with random skips, one or two losses."""

    def __init__(self, random: Random):
        super().__init__()
        self.tokens = random.random() < 0.6
        self.entry = nn.Embedding(VOCAB, WIDTH) if self.tokens else nn.Linear(10, WIDTH)
        self.body = nn.ModuleList(self._block(random) for _ in range(random.randint(1, 2)))
        if random.random() < 0.5:
            state = random.randrange(2**30)
            kind = random.choice([Feedforward, Attention])
            self.repeated = nn.ModuleList(kind(Random(state)) for _ in range(3))
        else:
            self.repeated = nn.ModuleList()
        self.skip = random.random() < 0.5
        self.shared = nn.Linear(WIDTH, WIDTH) if random.random() < 0.4 else None
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if self.tokens and random.random() < 0.6:
            self.head.weight = self.entry.weight
        self.aux = random.random() < 0.4
        self.masked = random.random() < 0.5

    @staticmethod
    def _block(random: Random) -> nn.Module:
        kind = BatchNorm if random.random() < 0.08 else random.choice(KINDS)
        return kind(random)

    def forward(self, x, target):
        h = start = self.entry(x)
        for block in self.body:
            h = block(h)
        middle = h
        if self.shared is not None:
            h = torch.tanh(self.shared(h))
        for block in self.repeated:
            h = block(h)
        if self.shared is not None:
            h = h + self.shared(h)
        h = h + start if self.skip else h
        logits = self.head(h)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=0 if self.masked else -100
        )
        return {"loss": loss + 0.1 * middle.square().mean() if self.aux else loss, "logits": logits}


def random_case(seed: int) -> Case:
    random = Random(seed)
    torch.manual_seed(seed)
    model = Chain(random)
    x = torch.randint(VOCAB, (ROWS, SEQ)) if model.tokens else torch.randn(ROWS, SEQ, 10)
    target = torch.randint(VOCAB, (ROWS, SEQ))
    return Case(seed, model, (x, target), lambda output: output["loss"])
