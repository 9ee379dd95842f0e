"""A small example of every row of the op table, with its right result from plain torch.

Dims have 12 elements, so that 2, 3 and 4 ranks divide them, those that must stay whole too; some
others have 5 or 7, which no number of ranks divides. `cuts` and `partials` state which strategies
the row must offer.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ir.graph import Node, Ref, references
from ir.ops.table import aten_overload
from runtime.program import Context
from runtime.random import dropout
from tests.ir.one_node import Example, on_lone_ranks

N = 12
EXAMPLES: list[Example] = []


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def whole_numbers(limit: int, *shape: int) -> Tensor:
    return torch.randint(limit, shape, generator=GENERATOR)


ONE_RANK = on_lone_ranks(1, lambda mesh: Context(mesh, torch.device("cpu"), 3, 0, 0, 1))[0]
GENERATOR = torch.Generator().manual_seed(0)


def example(
    op: str, args: Iterable[Any], cuts: int, partials: int = 0, *, name: str = "",
    right: Callable[..., Any] | None = None, literals: Any = None, **kwargs: Any,
) -> None:  # fmt: skip
    """Adds an example; tensors among `args` become operands a, b, c, ...

    `right` computes the results from `args`; without it the ATen overload `op` does.
    `literals` replaces `args` in the node where the traced form differs from the ATen call.
    """
    inputs: dict[str, Tensor] = {}

    def lift(item: Any) -> Any:
        if isinstance(item, Tensor):
            word = "abcdefgh"[len(inputs)]
            inputs[word] = item
            return Ref(word)
        return tuple(map(lift, item)) if isinstance(item, (tuple, list)) else item

    args = tuple(args)
    node_args = lift(args if literals is None else literals)
    if right is None:
        right = aten_overload(op)
        assert right is not None, op
    found = right(*args, **kwargs)
    values = (found,) if isinstance(found, Tensor) else tuple(found)
    results = {f"y{i}": value for i, value in enumerate(values) if value is not None}
    pairs = tuple((key, lift(value)) for key, value in sorted(kwargs.items()))
    node = Node(op, node_args, pairs, tuple(f"y{i}" for i in range(len(values))))
    assert {ref.name for ref in references((node.args, node.kwargs))} == set(inputs)
    EXAMPLES.append(Example(f"{op} {name}".strip(), node, inputs, results, cuts, partials))


def einsum(equation: str, x: Tensor, y: Tensor, cuts: int) -> None:
    example("einsum", (equation, x, y), cuts, 2, right=torch.einsum, name=equation)


einsum("bsy,zy->bsz", real(5, N, N), real(N, N), 3)
einsum("bsz,zy->bsy", real(N, N, N), real(N, N), 4)
einsum("bsz,bsy->zy", real(N, 5, N), real(N, 5, N), 3)
einsum("bhxy,bhyz->bhxz", real(5, N, 7, N), real(5, N, N, 7), 2)
einsum("ebsd,bse->bsd", real(N, 7, 5, N), real(7, 5, N), 2)
einsum("xy,yz->xz", real(1, N), real(N, 1), 1)


def view(x: Tensor, shape: tuple[int, ...], cuts: int) -> None:
    example("view", (x,), cuts, 1, right=lambda x: x.reshape(shape),
            name=f"{list(x.shape)} to {list(shape)}")  # fmt: skip


view(real(N, 5 * N), (N, N, 5), 2)
view(real(N, 5, N), (N * 5, N), 2)
view(real(N, 5 * N), (N, 5, N), 2)
view(real(5, N), (1, 5, 1, N), 1)
view(real(N, 8), (16, 6), 0)
view(real(7, N, 8), (7, 16, 6), 0)
view(real(N), (N, 1), 1)
example("expand", (real(N, 1, 5),), 2, 1, right=lambda x: x.expand(N, N, 5))
example("expand", (real(5, N),), 2, 1, right=lambda x: x.expand(N, 5, N), name="new dim")
example("permute", (real(5, N, N), (2, 0, 1)), 2, 1, right=lambda x, p: x.permute(p))
example("sum", (real(N, N, 5), (1,), False), 2, 1, right=lambda x, d, k: x.sum(d, k))
example("sum", (real(N, N, 5), (0, 1), True), 2, 1, right=lambda x, d, k: x.sum(d, k), name="keep")
example("sum", (real(N, 5), (0, 1), False), 1, 1, right=lambda x, d, k: x.sum(), name="all")
example("full", (1.5,), 2, right=lambda v: torch.full((N, 5, N), v, dtype=torch.float64))
example("full", (float("-inf"),), 1, right=lambda v: torch.full((N,), v), name="minus infinity")


def attention(
    heads: int, kv: int, mask: Tensor | None, causal: bool, cuts: int, name: str
) -> None:
    keys = N if causal else 2 * N
    q, k, v, scale = real(N, heads, N, N), real(N, kv, keys, N), real(N, kv, keys, N), 0.5

    def right(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: float) -> Any:
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=kv != heads
        )
        scores = q @ k.repeat_interleave(heads // kv, 1).mT * scale
        seen = torch.ones(scores.shape[-2:]).tril() > 0 if causal else mask
        scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
        return out, scores.logsumexp(-1)

    args = (q, k, v, mask, causal, scale)
    out, logsumexp = right(*args)
    example("attention", args, cuts, right=right, name=name)

    def right_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(right(*leaves, *rest[2:])[0], leaves, grad)

    example("attention_backward", (real(*out.shape), q, k, v, out, logsumexp, mask, causal, scale),
            cuts, 1, right=right_back, name=name)  # fmt: skip


some_keys = whole_numbers(2, 1, 1, N, 2 * N).bool() | (torch.arange(2 * N) == 0)
attention(N, N, None, True, 2, "causal")
attention(N, N, None, False, 2, "all")
attention(5 * N, N, None, True, 2, "key heads cut")
attention(5 * N, 5, None, False, 2, "groups cut")
attention(N, 1, None, True, 2, "one key head")
attention(N, N, some_keys, False, 2, "mask")
attention(N, N, some_keys.expand(N, N, N, 2 * N), False, 2, "mask per head")
attention(5 * N, N, some_keys.expand(N, 5 * N, N, 2 * N), False, 2, "grouped, mask per head")


def normalize(x: Tensor, dims: int, eps: float) -> Any:
    over = tuple(range(-dims, 0))
    rstd = (x.var(over, correction=0, keepdim=True) + eps).rsqrt()
    return functional.layer_norm(x, x.shape[-dims:], eps=eps), rstd


def normalize_backward(grad: Tensor, normalised: Tensor, rstd: Tensor, dims: int) -> Tensor:
    x = (normalised / rstd).requires_grad_()
    over = tuple(range(-dims, 0))
    eps = float((rstd**-2 - x.detach().var(over, correction=0, keepdim=True)).mean())
    y = functional.layer_norm(x, x.shape[-dims:], eps=eps)
    return torch.autograd.grad(y, x, grad)[0]


for shape, last, cuts in (((N, 5, N), 1, 1), ((N, N, N), 1, 2), ((N, N, N), 2, 1)):
    x = real(*shape)
    done = normalize(x, last, 1e-3)
    example("normalize", (x, last, 1e-3), cuts, right=normalize, name=f"last {last} of {shape}")
    example("normalize_backward", (real(*shape), *done, last), cuts, 1, right=normalize_backward,
            name=f"last {last} of {shape}")  # fmt: skip


def resample(x: Tensor, kind: str, size: tuple, align: bool, scales: tuple) -> Any:
    mode = {"upsample_nearest2d": "nearest", "upsample_bilinear2d": "bilinear"}[kind]
    settings = {} if mode == "nearest" else {"align_corners": align}
    return functional.interpolate(x, size, mode=mode, **settings)


def resample_backward(grad: Tensor, kind: str, size: tuple, align: bool, scales: tuple) -> Any:
    x = torch.zeros(*grad.shape[:2], *size, dtype=grad.dtype, requires_grad=True)
    y = resample(x, kind, grad.shape[2:], align, scales)
    return torch.autograd.grad(y, x, grad)[0]


for kind in ("upsample_nearest2d", "upsample_bilinear2d"):
    rest = (kind, (6, 8), True, ())
    example("resample", (real(N, N, 3, 4), *rest), 2, 1, right=resample, name=kind)
    example("resample_backward", (real(N, N, 3, 4), *rest), 2, 1, right=resample_backward,
            name=kind)  # fmt: skip


def cross_entropy(logits: Tensor, target: Tensor, ignore: int) -> Any:
    losses = functional.cross_entropy(logits, target, ignore_index=ignore, reduction="none")
    return losses, logits.logsumexp(-1)


def cross_entropy_backward(
    g: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, ignore: int
) -> Tensor:
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(cross_entropy(leaf, target, ignore)[0], leaf, g)[0]


logits, target = real(N, N), whole_numbers(N, N)
losses, lse = cross_entropy(logits, target, 3)
example("cross_entropy", (logits, target, 3), 2, right=cross_entropy)
example("cross_entropy_backward", (real(N), logits, target, lse, 3), 2, 1,
        right=cross_entropy_backward)  # fmt: skip
example("dropout", (torch.ones(N, 5, N, dtype=torch.float64), 0.5, 7), 2, 1,
        right=lambda x, p, op: dropout(x, p, ONE_RANK.key(op), ONE_RANK.where(x.shape)),
        )  # fmt: skip
