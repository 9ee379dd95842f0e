"""Writes the functions of one block: prologue, forward and backward (or its two halves), in local
shapes.

Input: an `Spmd` program and a variant with its menu point. Output: source lines. Parameters are
read as `w.name`, gradients added to `g.name`; a tensor is deleted where it dies; the comment
behind a line says its local shape and how it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from codegen.groups import weight_path
from codegen.host_text import fetched_lines, stored_words, taken_words
from codegen.node_text import NodeText
from ir.graph import SHORT_DTYPES, Node, TensorType
from ir.layout import Partial, Replicate, Shard
from ir.lower import Lowered
from ir.names import identifier
from ir.split import Split
from ir.spmd import Spmd

COLUMN = 60


class BlockText:
    """The source of one (variant, menu point)."""

    def __init__(self, spmd: Spmd, variant: int, keep: str, name: str, *, splits: bool = False):
        """`splits`: the schedule runs the halves of a backward apart."""
        self.spmd, self.variant, self.keep, self.name = spmd, variant, keep, name
        self.splits = splits
        self.lowered: Lowered = spmd.lowered[variant]
        self.block = self.lowered.block
        self.always = spmd.always(variant)
        self.kept = spmd.kept(variant, keep)
        self.hosted = spmd.hosted(variant, keep)
        self.words = self._words()

    def _words(self) -> dict[str, str]:
        """The Python name of each value."""
        words = {}
        for name in (*self.lowered.types, *self.lowered.early_types):
            words[name] = f"w.{weight_path(name)}" if name in self.always else identifier(name)
        for node in (*self.lowered.prologue, *self.lowered.forward, *self.lowered.backward):
            for name in node.outputs:
                words.setdefault(name, identifier(name))
        return words

    @property
    def arguments(self) -> tuple[str, ...]:
        """Inputs that the caller passes: those that are not state."""
        return tuple(name for name in self.block.inputs if name not in self.always)

    @property
    def draws(self) -> bool:
        """Whether the block needs to know which call it is (for its dropout masks)."""
        return any(node.op == "dropout" for node in (*self.lowered.forward, *self.lowered.backward))

    @property
    def has_backward(self) -> bool:
        return bool(self.lowered.gradients)

    @cached_property
    def split(self) -> Split:
        return self.spmd.split(self.variant, self.keep)

    @property
    def has_halves(self) -> bool:
        """Whether backward is two functions: the schedule wants it and there is a second half."""
        return self.splits and self.has_backward and self.split.has_weight_half

    def lines(self) -> list[str]:
        text = self._prologue() if self.lowered.prologue else []
        text += self._forward()
        if not self.has_backward:
            return text
        return text + (self._backward_halves() if self.has_halves else self._backward())

    def _prologue(self) -> list[str]:
        lowered = self.lowered
        read = {n for node in lowered.prologue for n in node.inputs}
        passed = [self.words[n] for n in self.arguments if n in read]
        head = f"def {self.name}_prologue({', '.join(['ctx', 'w', *passed])}):"
        says = '    """What needs the rows of all micro-batches, once per step."""'
        rows = self.spmd.degrees.data
        writer = NodeText(self.spmd, lowered, rows, self.words, lowered.early_types)
        body = self._body(lowered.prologue, writer, set(lowered.early), set(passed))
        result = self._tuple([self.words[n] for n in lowered.early])
        return [head, says, *self._mesh(lowered.prologue), *body, f"    return {result}", "", ""]

    def prologue_arguments(self) -> list[str]:
        read = {n for node in self.lowered.prologue for n in node.inputs}
        return [name for name in self.arguments if name in read]

    def _forward(self) -> list[str]:
        lowered = self.lowered
        passed = [self.words[n] for n in self.arguments]
        extra = (["early"] if lowered.early else []) + (["call"] if self.draws else [])
        head = f"def {self.name}_forward({', '.join(['ctx', 'w', *passed, *extra])}):"
        keeps = {*lowered.outputs, *self.kept}
        writer = self._writer()
        body = self._body(lowered.forward, writer, keeps, set(self.arguments))
        outputs = self._tuple([self.words[n] for n in lowered.outputs])
        kept = stored_words(self.kept, self.hosted, self.words)
        return [head, *self._unpack_early(), *self._mesh(lowered.forward), *body,
                f"    return {outputs}, {self._tuple(kept)}", "", ""]  # fmt: skip

    def _backward(self) -> list[str]:
        nodes = self.spmd.backward(self.variant, self.keep)
        sums = [(value, name) for value, name in self.lowered.gradients if value in self.always]
        handed = self._handed_names()
        return self._pass("backward", nodes, self.kept, "saved", sums, handed, [])

    def _backward_halves(self) -> list[str]:
        split, handed = self.split, self._handed_names()
        return [
            *self._pass(
                "backward_input", split.input, self.kept, "saved", split.summed_early, handed,
                split.pending,
            ),
            *self._pass(
                "backward_weight", split.weight, split.pending, "pending", split.summed_late,
                None, [],
            ),
        ]  # fmt: skip

    def _pass(
        self, what: str, nodes: tuple[Node, ...], given: Sequence[str], word: str,
        sums: Sequence[tuple[str, str]], handed: Sequence[str] | None, pending: Sequence[str],
    ) -> list[str]:  # fmt: skip
        """A backward function: `given` values come as `word`; `sums` are added to accumulators.

        Returns the gradients `handed` back (the weights' half, with None, returns nothing), and
        the `pending` values if there is another half.
        """
        tangents = [] if handed is None else [t for _, t in self.block.tangents]
        extra = (["early"] if self.lowered.early else []) + (["call"] if self.draws else [])
        arguments = ["ctx", "w", "g", word, *(self.words[t] for t in tangents), *extra]
        lines = [
            f"def {self.name}_{what}({', '.join(arguments)}):",
            *self._unpack_early(), *self._mesh(nodes),
        ]  # fmt: skip
        if given:
            hosted = self.hosted if word == "saved" else ()
            lines.append(f"    {self._tuple(taken_words(given, hosted, self.words))} = {word}")
            lines.append(f"    del {word}")
            lines += fetched_lines(hosted, self.words)
        added: dict[str, list[str]] = {}
        for value, name in sums:
            added.setdefault(name, []).append(value)
        kept = {*(handed or ()), *pending}
        lines += self._body(nodes, self._writer(), kept, {*given, *tangents}, added)
        if handed is None:
            return [*lines, "", ""]
        results = [self._tuple([self.words[name] for name in handed])]
        if what == "backward_input":
            results.append(self._tuple([self.words[name] for name in pending]))
        return [*lines, f"    return {', '.join(results)}", "", ""]

    def _handed_names(self) -> list[str]:
        return [name for value, name in self.lowered.gradients if value not in self.always]

    def handed_gradients(self) -> list[str]:
        """Inputs whose gradients backward returns, in order."""
        return [v for v, _ in self.lowered.gradients if v not in self.always]

    def _writer(self) -> NodeText:
        types = {**self.lowered.early_types, **self.lowered.types}
        return NodeText(self.spmd, self.lowered, self.spmd.degrees.rows, self.words, types)

    def _unpack_early(self) -> list[str]:
        if not self.lowered.early:
            return []
        return [f"    {self._tuple([self.words[n] for n in self.lowered.early])} = early"]

    @staticmethod
    def _mesh(nodes: tuple[Node, ...]) -> list[str]:
        """`mesh = ctx.mesh` where a line may need it."""
        uses = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shard", "first",
                "embedding.default", "embedding_dense_backward.default", "cross_entropy",
                "cross_entropy_backward"}  # fmt: skip
        return ["    mesh = ctx.mesh"] if any(n.op in uses for n in nodes) else []

    @staticmethod
    def _tuple(words: list[str]) -> str:
        return "(" + ", ".join(words) + ("," if len(words) == 1 else "") + ")"

    def _body(
        self, nodes: tuple[Node, ...], writer: NodeText, keep: set[str], present: set[str],
        sums: dict[str, list[str]] | None = None,
    ) -> list[str]:  # fmt: skip
        """Statements with comments, gradient sums, and `del` at last use."""
        sums = dict(sums or {})
        last = {name: i for i, node in enumerate(nodes) for name in node.inputs}
        made = {name for node in nodes for name in node.outputs}
        lines: list[str] = []
        for name in [n for n in sums if n not in made]:
            lines += self._sum_lines(name, sums.pop(name))
        for i, node in enumerate(nodes):
            lines.append(self._statement(node, writer))
            dead = []
            for name in node.outputs:
                if name in sums:
                    lines += self._sum_lines(name, sums[name])
                if name not in keep and name not in last:
                    dead.append(name)
            dead += [
                name for name in node.inputs
                if last[name] == i and name not in keep and name not in self.always
                and name not in self.lowered.early and (name in made or name in present)
            ]  # fmt: skip
            if dead:
                lines.append(f"    del {', '.join(self.words[name] for name in dead)}")
        return lines

    def _sum_lines(self, name: str, values: list[str]) -> list[str]:
        return [f"    g.{weight_path(value)} += {self.words[name]}" for value in values]

    def _statement(self, node: Node, writer: NodeText) -> str:
        left = ", ".join(self.words[name] for name in node.outputs)
        text = f"    {left} = {writer(node)}"
        name = node.outputs[0]
        comment = self._comment(name, writer.types.get(name))
        return f"{text:<{COLUMN}}  # {comment}" if comment else text

    def _comment(self, name: str, kind: TensorType | None) -> str:
        """`bf16[2, 1024, 4096]  dim 0/data, dim 1/tensor`."""
        if kind is None:
            return ""
        shape = ", ".join(map(str, kind.shape))
        layout = self.lowered.layouts.get(name)
        parts = []
        degrees = self.spmd.degrees
        for axis, place, degree in (
            ("data", layout.data if layout else None, degrees.rows),
            ("tensor", layout.tensor if layout else None, degrees.tensor),
        ):
            match place:
                case Shard() if degree > 1:
                    parts.append(f"dim {place.dim}/{axis}")
                case Partial() if degree > 1:
                    parts.append(f"partial over {axis}")
                case Replicate() | Shard() | Partial() | None:
                    pass
        text = f"{SHORT_DTYPES.get(kind.dtype, kind.dtype)}[{shape}]"
        return f"{text}  {', '.join(parts)}" if parts else text
