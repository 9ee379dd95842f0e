"""Factor signatures: how the dims of an operation's tensors relate.

Each dim is a letter; equal letters are the same factor. From a signature follow the legal
shardings (any letter that is not `whole`), what becomes a partial sum (a letter of `adds` that a
result lacks), and through which operands a partial sum may pass (`linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ir.graph import Node, TensorType, references

Dims: TypeAlias = "tuple[str | None, ...]"


@dataclass(frozen=True, slots=True)
class Signature:
    """Letters of every operand (each `Ref` in order) and result; `None` is a dim of size one.

    `regroups` marks a view: operand and result are the same elements, differently grouped.
    `gathers` are letters over which the local op communicates by itself (results come out whole),
    `indexed` those whose places other operands count. Both it knows of the tensor axis alone.
    `product` (total, outer, inner) says that the letter `total` is `outer` times `inner`, a letter
    that no dim has alone.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str] = frozenset()
    adds: frozenset[str] = frozenset()
    gathers: frozenset[str] = frozenset()
    indexed: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    regroups: bool = False
    product: tuple[str, str, str] | None = None
    known: bool = field(default=True)


Types: TypeAlias = "tuple[TensorType, ...]"
SignatureRule: TypeAlias = Callable[[Node, Types, Types], Signature]


def letters(prefix: str, kind: TensorType) -> Dims:
    """Fresh letters for each dim; `None` where the size is one."""
    return tuple(None if size == 1 else f"{prefix}{d}" for d, size in enumerate(kind.shape))


def linear_in(*groups: int | tuple[int, ...]) -> tuple[frozenset[int], ...]:
    return tuple(frozenset((g,) if isinstance(g, int) else g) for g in groups)


def unknown(node: Node, operands: Any, results: Any) -> Signature:
    """Nothing may be cut: every input is made whole."""
    ins = tuple(letters(f"i{k}.", t) for k, t in enumerate(operands))
    outs = tuple(letters(f"o{k}.", t) for k, t in enumerate(results))
    every = frozenset(x for dims in (*ins, *outs) for x in dims if x)
    return Signature(ins, outs, whole=every, known=False)


def pointwise(linear: tuple[frozenset[int], ...] = ()) -> SignatureRule:
    """Dims align from the right; size-one dims broadcast."""

    def rule(node: Node, operands: Any, results: Any) -> Signature:
        out = letters("d", results[0])
        ins = tuple(_aligned(t, out, results[0]) for t in operands)
        fitting = tuple(g for g in linear if max(g) < len(operands))
        return Signature(ins, tuple(out for _ in results), linear=fitting)

    return rule


def cast(node: Node, operands: Any, results: Any) -> Signature:
    """Partial sums may be cast, but not to bool."""
    linear = () if results[0].dtype == "bool" else linear_in(0)
    return pointwise(linear)(node, operands, results)


def _aligned(kind: TensorType, out: Dims, result: TensorType) -> Dims:
    shift = len(out) - len(kind.shape)
    return tuple(
        None if size == 1 and result.shape[shift + d] != 1 else out[shift + d]
        for d, size in enumerate(kind.shape)
    )


def along(
    dim_of: Callable[[Node], Any], *, linear: tuple[frozenset[int], ...] = ()
) -> SignatureRule:
    """The dims that `dim_of` names, or all if it names none, stay whole; others pass unchanged."""

    def rule(node: Node, operands: Any, results: Any) -> Signature:
        rank = max(len(t.shape) for t in (*operands, *results))
        named = dim_of(node)
        dims = named if isinstance(named, tuple) else () if named is None else (named,)
        chosen = {d % rank for d in dims or range(rank)} if rank else set()
        ins = [_along_one(t, chosen, rank, f"wi{k}.") for k, t in enumerate(operands)]
        outs = tuple(_along_one(t, chosen, rank, f"wo{k}.") for k, t in enumerate(results))
        every = (x for dims in (*ins, *outs) for x in dims if x and x[0] == "w")
        return Signature(tuple(ins), outs, whole=frozenset(every), linear=linear)

    return rule


def _along_one(kind: TensorType, chosen: set[int], rank: int, held: str) -> Dims:
    """Letters of one tensor; a tensor of lower rank lacks the chosen dims."""
    places = range(rank) if len(kind.shape) == rank else [d for d in range(rank) if d not in chosen]
    return tuple(
        None if size == 1 else (f"{held}{d}" if d in chosen else f"d{d}")
        for d, size in zip(places, kind.shape, strict=True)
    )


def view(node: Node, operands: Any, results: Any) -> Signature:
    return Signature(
        (letters("i", operands[0]),), (letters("o", results[0]),), linear=linear_in(0),
        regroups=True,
    )  # fmt: skip


def expand(node: Node, operands: Any, results: Any) -> Signature:
    out = letters("d", results[0])
    return Signature((_aligned(operands[0], out, results[0]),), (out,), linear=linear_in(0))


def permute(node: Node, operands: Any, results: Any) -> Signature:
    source = letters("d", operands[0])
    return Signature((source,), (tuple(source[d] for d in node.args[1]),), linear=linear_in(0))


def total(node: Node, operands: Any, results: Any) -> Signature:
    """A sum over `args[1]`: a cut of a summed dim leaves a partial sum."""
    source = letters("d", operands[0])
    summed = set(node.args[1])
    keep = node.args[2]
    out = tuple(
        None if d in summed else letter
        for d, letter in enumerate(source) if keep or d not in summed
    )  # fmt: skip
    adds = frozenset(x for d, x in enumerate(source) if x and d in summed)
    return Signature((source,), (out,), adds=adds, linear=linear_in(0))


def einsum(node: Node, operands: Any, results: Any) -> Signature:
    terms, out = node.args[0].split("->")
    first, second = terms.split(",")

    def dims(text: str, kind: TensorType) -> Dims:
        return tuple(None if s == 1 else c for c, s in zip(text, kind.shape, strict=True))

    ins = (dims(first, operands[0]), dims(second, operands[1]))
    adds = frozenset(c for c in first + second if c not in out)
    return Signature(ins, (dims(out, results[0]),), adds=adds, linear=linear_in(0, 1))


def fill(node: Node, operands: Any, results: Any) -> Signature:
    """A constant fill: any cut of it is a smaller fill."""
    return Signature((), (letters("d", results[0]),))


def attention(node: Node, operands: Any, results: Any) -> Signature:
    return _attention(operands, results, ("q", "k", "v", "m"), ("o", "l"), ())


def attention_backward(node: Node, operands: Any, results: Any) -> Signature:
    names = ("o", "q", "k", "v", "o", "l", "m")
    return _attention(operands, results, names, ("q", "k", "v"), linear_in(0))


def _attention(
    operands: Any, results: Any, names: tuple[str, ...], outs: tuple[str, ...], linear: Any
) -> Signature:
    """Batch and heads may be cut. Query heads H are key heads h times the group g that shares
    one; a cut of the group leaves partial gradients of the keys and values."""
    heads, key_heads = operands[names.index("q")].shape[1], operands[names.index("k")].shape[1]
    total = "h" if heads == key_heads else "H"

    def dims(name: str, kind: TensorType) -> Dims:
        spelled = {"q": "bHsd", "o": "bHse", "l": "bHs", "k": "bhtd", "v": "bhte", "m": "bHst"}
        found = [total if c == "H" else c for c in spelled[name]]
        return tuple(None if s == 1 else c for c, s in zip(found, kind.shape, strict=True))

    return Signature(
        tuple(dims(n, t) for n, t in zip(names, operands, strict=False)),
        tuple(dims(n, t) for n, t in zip(outs, results, strict=True)),
        whole=frozenset("sdte"), linear=linear,
        adds=frozenset("Hg") if outs[0] == "q" else frozenset(),
        product=("H", "h", "g") if 1 < key_heads < heads else None,
    )  # fmt: skip


def normalize(node: Node, operands: Any, results: Any) -> Signature:
    return _normalize(operands, results, node.args[1], ())


def normalize_backward(node: Node, operands: Any, results: Any) -> Signature:
    return _normalize(operands, results, node.args[3], linear_in(0))


def _normalize(operands: Any, results: Any, last: int, linear: Any) -> Signature:
    rank = len(operands[0].shape)

    def dims(kind: TensorType) -> Dims:
        names = [f"w{d}" if d >= rank - last else f"d{d}" for d in range(rank)]
        return tuple(None if s == 1 else n for n, s in zip(names, kind.shape, strict=True))

    whole = frozenset(f"w{d}" for d in range(rank - last, rank))
    return Signature(
        tuple(map(dims, operands)), tuple(map(dims, results)), whole=whole, linear=linear
    )


def cross_entropy(node: Node, operands: Any, results: Any) -> Signature:
    v = frozenset("v")
    return Signature((("n", "v"), ("n",)), (("n",), ("n",)), gathers=v, indexed=v)


def cross_entropy_backward(node: Node, operands: Any, results: Any) -> Signature:
    ins = (("n",), ("n", "v"), ("n",), ("n",))
    return Signature(ins, (("n", "v"),), indexed=frozenset("v"), linear=linear_in(0))


def embedding(node: Node, operands: Any, results: Any) -> Signature:
    """A cut of the table's rows leaves partial results: rows held elsewhere read as zero."""
    ids = letters("t", operands[1])
    v = frozenset("v")
    return Signature((("v", "e"), ids), ((*ids, "e"),), adds=v, indexed=v)


def embedding_backward(node: Node, operands: Any, results: Any) -> Signature:
    ids = letters("t", operands[1])
    return Signature(
        ((*ids, "e"), ids), (("v", "e"),), adds=frozenset(x for x in ids if x),
        indexed=frozenset("v"), linear=linear_in(0),
    )  # fmt: skip


def dropout(node: Node, operands: Any, results: Any) -> Signature:
    dims = letters("d", operands[0])
    return Signature((dims,), (dims,), linear=linear_in(0))


def resample(node: Node, operands: Any, results: Any) -> Signature:
    """Rows and channels may be cut, the dims that are made longer or shorter not."""
    spatial = tuple(range(2, len(operands[0].shape)))
    return along(lambda _: spatial, linear=linear_in(0))(node, operands, results)


def convolution(node: Node, operands: Any, results: Any) -> Signature:
    """The batch may be cut; output channels too unless the channels are grouped."""
    plain = node.args[8] == 1 and not node.args[6]
    rest = [f"x{d}" for d in range(len(operands[0].shape) - 2)]
    kernel = [f"k{d}" for d in range(len(rest))]
    outs = [f"y{d}" for d in range(len(rest))]
    ins = [("n", "c", *rest), ("o", "c" if plain else "ci", *kernel), ("o",)]
    whole = frozenset([*rest, *kernel, *outs, "c", "ci", *(() if plain else "o")])
    return Signature(tuple(ins[: len(operands)]), (("n", "o", *outs),), whole=whole)


def convolution_backward(node: Node, operands: Any, results: Any) -> Signature:
    forward = convolution_like(node, operands)
    n_out, x, w = forward
    bias, wanted = ("o",), node.args[10]
    plain = node.args[9] == 1 and not node.args[7]
    whole = frozenset(d for d in (*n_out, *x, *w) if d and d[0] in "xky") | {"c", "ci"}
    whole |= frozenset() if plain else {"o"}
    return Signature(
        (n_out, x, w), tuple(d for d, used in zip((x, w, bias), wanted, strict=True) if used),
        whole=whole,
        adds=frozenset("no") if plain else frozenset("n"), linear=linear_in(0),
    )  # fmt: skip


def convolution_like(node: Node, operands: Any) -> tuple[Dims, Dims, Dims]:
    plain = node.args[9] == 1 and not node.args[7]
    spatial = range(len(operands[1].shape) - 2)
    return (
        ("n", "o", *(f"y{d}" for d in spatial)),
        ("n", "c", *(f"x{d}" for d in spatial)),
        ("o", "c" if plain else "ci", *(f"k{d}" for d in spatial)),
    )


def index(node: Node, operands: Any, results: Any) -> Signature:
    """x[..., i, ...] with one index tensor: the indexed dim stays whole."""
    places = node.args[1]
    used = [d for d, item in enumerate(places) if item is not None]
    if len(used) != 1 or len(list(references(places))) != 1:
        return unknown(node, operands, results)
    at = used[0]
    source = [None if s == 1 else f"d{d}" for d, s in enumerate(operands[0].shape)]
    picks = letters("t", operands[1])
    indexed = source[at]
    out = (*source[:at], *picks, *source[at + 1 :])
    return Signature(
        (tuple(source), picks), (out,), whole=frozenset([indexed] if indexed else []),
        linear=linear_in(0),
    )  # fmt: skip


def index_put(node: Node, operands: Any, results: Any) -> Signature:
    """The reverse of `index`: what is put, and where, stays whole along the indexed dim."""
    if len(operands) != 3:
        return unknown(node, operands, results)
    read = index(node, operands[:2], operands[2:])
    x, where, values = (kind.shape for kind in operands)
    at = next((d for d, item in enumerate(node.args[1]) if item is not None), 0)
    if not read.known or values != (*x[:at], *where, *x[at + 1 :]):
        return unknown(node, operands, results)
    source, picks = read.operands
    return Signature(
        (source, picks, read.results[0]), (source,),
        whole=read.whole | frozenset(letter for letter in picks if letter),
        linear=linear_in((0, 2)),
    )  # fmt: skip


def view_as_real(node: Node, operands: Any, results: Any) -> Signature:
    dims = letters("d", operands[0])
    return Signature((dims,), ((*dims, "pair"),), whole=frozenset(["pair"]), linear=linear_in(0))


def view_as_complex(node: Node, operands: Any, results: Any) -> Signature:
    dims = letters("d", results[0])
    return Signature(((*dims, "pair"),), (dims,), whole=frozenset(["pair"]), linear=linear_in(0))


def rows(node: Node, operands: Any, results: Any) -> Signature:
    """Each row by itself: the first dim may be cut, and no other."""
    if operands[0].shape[0] != results[0].shape[0]:
        return unknown(node, operands, results)
    ins = tuple(_rows(f"i{k}.", kind) for k, kind in enumerate(operands))
    outs = tuple(_rows(f"o{k}.", kind) for k, kind in enumerate(results))
    every = frozenset(x for dims in (*ins, *outs) for x in dims if x and x != "n")
    return Signature(ins, outs, whole=every, linear=linear_in(0))


def _rows(prefix: str, kind: TensorType) -> Dims:
    first, *rest = letters(prefix, kind)
    return (None if first is None else "n", *rest)


def gather(node: Node, operands: Any, results: Any) -> Signature:
    """gather and scatter along `args[1]`: others dims pass if every tensor has all of them."""
    dim = node.args[1] % max(1, len(operands[0].shape))
    others = {(*k.shape[:dim], *k.shape[dim + 1 :]) for k in (*operands, *results)}
    if len(others) > 1:
        return unknown(node, operands, results)
    sums = {"scatter_add.default": linear_in((0, 2)), "gather.default": linear_in(0)}
    return along(lambda _: dim, linear=sums.get(node.op, ()))(node, operands, results)


def grid_sample(node: Node, operands: Any, results: Any) -> Signature:
    """x [n, c, ...] read at grid [n, ..., places] -> [n, c, ...]."""
    ins, out = _sampled(operands[0], operands[1], results[0])
    return Signature(ins, (out,), whole=_places(*ins, out), linear=linear_in(0))


def grid_sample_backward(node: Node, operands: Any, results: Any) -> Signature:
    """The grid's gradient adds up channels."""
    (x, grid), out = _sampled(operands[1], operands[2], operands[0])
    wanted = tuple(d for d, used in zip((x, grid), node.args[6], strict=True) if used)
    return Signature(
        (out, x, grid), wanted, whole=_places(x, grid, out), adds=frozenset("c"),
        linear=linear_in(0),
    )  # fmt: skip


def _sampled(x: TensorType, grid: TensorType, out: TensorType) -> tuple[tuple[Dims, Dims], Dims]:
    def named(kind: TensorType, *words: str) -> Dims:
        return tuple(None if s == 1 else w for s, w in zip(kind.shape, words, strict=True))

    spatial = range(len(x.shape) - 2)
    to = [f"y{d}" for d in spatial]
    source = named(x, "n", "c", *(f"x{d}" for d in spatial))
    return (source, named(grid, "n", *to, "place")), named(out, "n", "c", *to)


def _places(*dims: Dims) -> frozenset[str]:
    return frozenset(d for each in dims for d in each if d and d not in "nc")
