"""The kernels that are measured, as emitted programs call them, at given sizes.

Output: `Call`s with the name, size and dtype under which the measurement is kept, and the `company`
that they keep. In a program a kernel's first operand is what the one before just made; the others
were mostly saved long ago, and results are saved where others were: both have left the caches. So
here the first operand is the same in every call, the others take turns, and results stay alive for
some calls. Sizes are bytes of operands and results, each once.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from runtime import ops

RING = 2
"""Results kept alive where a kernel computes more than it reads."""
COLD_BYTES, MOST_TURNS = 2**25, 64
"""Tensors that take turns have so many bytes together, more than the caches of a few cores, unless
they are so small that there would be too many of them."""
WIDTH = 128
"""Elements of a row of the measured tensors."""
COMPANY_BYTES = 2**13
ALWAYS_THREADED = ("gelu", "scatter")
"""Kinds that wake all threads at any size, and would have the others wait for them."""
CLASSES = 256
"""Classes of the measured cross-entropy, rows of the measured table."""
BATCHES = (1, 16)
LARGEST_BATCHED = 256
"""Side of a product in a batch."""
HEADS = 4
ADAMW_TENSORS = 4


@dataclass(frozen=True, slots=True)
class Call:
    """One measurement: `size` is bytes, or (m, n, k); `per` units of it happen in a
    call; after `warm_up` calls all memory is in use."""

    name: str
    size: float | tuple[int, ...]
    run: Callable[[], Any]
    dtype: str = "float32"
    batch: int = 0
    head_dim: int = 0
    per: float = 1.0
    warm_up: int = RING + 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: bytes of curves, sides of products, query rows of attention, its depths."""

    kernel_bytes: tuple[int, ...] = (512, 2**14, 2**17, 2**20, 2**22, 2**24)
    sides: tuple[int, ...] = (16, 64, 256, 1024)
    queries: tuple[int, ...] = (8, 32, 128, 512)
    head_dims: tuple[int, ...] = (4, 32, 128)
    low_sides: tuple[int, ...] = (32, 512)
    low_dtypes: tuple[str, ...] = ("bfloat16",)


QUICK = Sizes((512, 2**18, 2**22), (16, 128, 512), (16, 128), (8, 64), low_dtypes=())


def kernel_calls(sizes: Sizes, device: torch.device) -> Iterator[Call]:
    """All measurements of one process but products, the large ones last."""
    yield Call("view", 1.0, _views(device), per=3.0)
    for queries, depth in product(sizes.queries, sizes.head_dims):
        yield from _attention_calls(queries, depth, device)
    for size_bytes in sizes.kernel_bytes:
        for name, make in KERNELS.items():
            yield _curve_call(name, make, size_bytes, device)
        for name, kind in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
            update = _update(kind, size_bytes, device)
            yield Call(name, float(size_bytes), update, per=float(ADAMW_TENSORS))


def product_calls(sides: tuple[int, ...], dtype: str, device: torch.device) -> Iterator[Call]:
    """Products over the grid of sides, one by one and in batches."""
    for batch in BATCHES:
        sides = sides if batch == 1 else tuple(s for s in sides if s <= LARGEST_BATCHED)
        for m, n, k in product(sides, repeat=3):
            kind = getattr(torch, dtype)
            lead = () if batch == 1 else (batch,)
            x = torch.randn(*lead, m, k, device=device).to(kind)
            w = torch.randn(*lead, k, n, device=device).to(kind)
            equation = "xy,yz->xz" if batch == 1 else "axy,ayz->axz"
            run = _kept(partial(torch.einsum, equation, x, w))
            yield Call("product", (m, n, k), run, dtype, batch)


def _rows(size_bytes: float, tensors: float, device: torch.device) -> Tensor:
    """One of `tensors` float32 matrices that have `size_bytes` together."""
    elements = max(1, int(size_bytes / tensors / 4))
    width = min(WIDTH, elements)
    return torch.randn(max(1, elements // width), width, device=device)


def _turns(size_bytes: float) -> int:
    """How many tensors of that size take turns."""
    return max(RING, min(MOST_TURNS, int(COLD_BYTES / max(1.0, size_bytes))))


def _cold(x: Tensor) -> Iterator[Tensor]:
    """Endless copies of `x`, each of which was last read so long ago that no cache has it."""
    return cycle([x.clone() for _ in range(_turns(x.nbytes))])


def _pair(
    size_bytes: float, tensors: float, device: torch.device
) -> tuple[Tensor, Iterator[Tensor]]:
    """An operand that was just made, and others that were saved."""
    x = _rows(size_bytes, tensors, device)
    return x, _cold(torch.randn_like(x))


def _elementwise(size_bytes: int, device: torch.device) -> Callable[[], Any]:
    x, saved = _pair(size_bytes, 3, device)
    return lambda: x * next(saved)


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[[int, torch.device], Any]:
    def make(size_bytes: int, device: torch.device) -> Callable[[], Any]:
        x = _rows(size_bytes, 2, device)
        return lambda: function(x)

    return make


def _reduce(size_bytes: int, device: torch.device) -> Callable[[], Any]:
    x = _rows(size_bytes, 1, device)
    return lambda: x.sum((0,), keepdim=True)


def _copy(size_bytes: int, device: torch.device) -> Callable[[], Any]:
    """Heads put behind the sequence again, as after attention."""
    x = _rows(size_bytes, 2, device)
    heads = HEADS if x.shape[1] % HEADS == 0 and x.shape[0] % HEADS == 0 else 1
    turned = x.reshape(heads, x.shape[0] // heads, x.shape[1]).permute(1, 0, 2)
    return lambda: turned.reshape(turned.shape[0], -1)


def _cat(size_bytes: int, device: torch.device) -> Callable[[], Any]:
    x, saved = _pair(size_bytes, 4, device)
    return lambda: torch.cat([x, next(saved)], -1)


def _gather(size_bytes: int, device: torch.device) -> Callable[[], Any]:
    rows = _rows(size_bytes, 2, device)
    table = torch.randn(CLASSES, rows.shape[1], device=device)
    ids = torch.randint(CLASSES, (rows.shape[0],), device=device)
    return lambda: ops.embedding(table, ids)


def _scatter(size_bytes: int, device: torch.device) -> Callable[[], Any]:
    rows = _rows(size_bytes, 1, device)
    ids = torch.randint(CLASSES, (rows.shape[0],), device=device)
    return lambda: ops.embedding_backward(rows, ids, CLASSES, -1)


def _normalize(size_bytes: int, device: torch.device) -> Callable[[], Any]:
    x = _rows(size_bytes, 2, device)
    return lambda: ops.normalize(x, 1, 1e-5)


def _normalize_backward(size_bytes: int, device: torch.device) -> Callable[[], Any]:
    gradient = _rows(size_bytes, 3, device)
    normalised, rstd = ops.normalize(torch.randn_like(gradient), 1, 1e-5)
    saved = _cold(normalised)
    return lambda: ops.normalize_backward(gradient, next(saved), rstd, 1)


def _logits(size_bytes: float, tensors: float, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = max(1, int(size_bytes / tensors / 4 / CLASSES))
    targets = torch.randint(CLASSES, (rows,), device=device)
    return torch.randn(rows, CLASSES, device=device), targets


def _cross_entropy(size_bytes: int, device: torch.device) -> Callable[[], Any]:
    logits, targets = _logits(size_bytes, 1, device)
    return lambda: ops.cross_entropy(logits, targets, -100)


def _cross_entropy_backward(size_bytes: int, device: torch.device) -> Callable[[], Any]:
    logits, targets = _logits(size_bytes, 2, device)
    losses, logsumexp = ops.cross_entropy(logits, targets, -100)
    saved = _cold(logits)
    return lambda: ops.cross_entropy_backward(losses, next(saved), targets, logsumexp, -100)


KERNELS: dict[str, Callable[[int, torch.device], Callable[[], Any]]] = {
    "elementwise": _elementwise,
    "exp": _unary(torch.exp),
    "tanh": _unary(torch.tanh),
    "silu": _unary(torch.nn.functional.silu),
    "gelu": _unary(torch.nn.functional.gelu),
    "reduce": _reduce,
    "copy": _copy,
    "cat": _cat,
    "gather": _gather,
    "scatter": _scatter,
    "normalize": _normalize,
    "normalize_backward": _normalize_backward,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
}


def _curve_call(
    name: str,
    make: Callable[[int, torch.device], Callable[[], Any]],
    size_bytes: int,
    device: torch.device,
) -> Call:
    run = make(size_bytes, device)
    made = run()
    turns = _turns(made.nbytes if isinstance(made, Tensor) else sum(x.nbytes for x in made))
    return Call(name, float(size_bytes), _kept(run, turns), warm_up=turns + 1)


def company(device: torch.device) -> Callable[[], None]:
    """One small call of every kind: what runs between two calls of a kernel in a program."""
    kinds = (make for name, make in KERNELS.items() if name not in ALWAYS_THREADED)
    calls = [make(COMPANY_BYTES, device) for make in kinds]
    x = torch.randn(16, 16, device=device)
    calls += [lambda: torch.einsum("xy,yz->xz", x, x), _views(device)]

    def run() -> None:
        for call in calls:
            call()

    return run


def _kept(call: Callable[[], Any], results: int = RING) -> Callable[[], None]:
    """Keeps the last results alive, so that new ones are written elsewhere."""
    ring: deque[Any] = deque(maxlen=results)
    return lambda: ring.append(call())


def _views(device: torch.device) -> Callable[[], Any]:
    """Three views: of another shape, of turned dims, of a part."""
    x = torch.randn(8, 16, WIDTH, device=device)
    return lambda: (x.reshape(128, WIDTH), x.permute(0, 2, 1), x[:, :, :32])


def _update(
    kind: type[torch.optim.Optimizer], size_bytes: int, device: torch.device
) -> Callable[[], Any]:
    """A step of a few parameters, with what the runtime does to each of their gradients."""
    parameters = [_rows(size_bytes, 1, device) for _ in range(ADAMW_TENSORS)]
    sums = [torch.zeros_like(p) for p in parameters]
    optimizer = kind([{"params": parameters}], lr=1e-6)  # type: ignore[call-arg]

    def update() -> None:
        for parameter, total in zip(parameters, sums, strict=True):
            total.zero_()
            parameter.grad = total.copy_(total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def _attention_calls(queries: int, depth: int, device: torch.device) -> Iterator[Call]:
    """Causal, `HEADS` heads of 4 rows; the size is that of the scores."""
    shape = (4, HEADS, queries, depth)
    q, k, v = (torch.randn(shape, device=device) for _ in range(3))
    out, logsumexp = ops.attention(q, k, v, None, True, 0.1)
    scores_bytes = 4.0 * 4 * HEADS * queries * queries
    run = _kept(lambda: ops.attention(q, k, v, None, True, 0.1))
    yield Call("attention", scores_bytes, run, head_dim=depth)
    back = _kept(lambda: ops.attention_backward(out, q, k, v, out, logsumexp, None, True, 0.1))
    yield Call("attention_backward", scores_bytes, back, head_dim=depth)
