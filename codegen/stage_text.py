"""Writes the functions of one stage: its calls in order, loops over repeated blocks, gradients.

Input: an `Spmd` program, a stage and the texts of its blocks. Output: source lines of
`stageN_prologue`, `stageN_forward` and `stageN_backward`; where the schedule runs its halves apart,
`stageN_backward_input` and `stageN_backward_weight` instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from codegen.block_text import BlockText
from codegen.groups import Group
from codegen.zero_text import around_backward, gradient_word, whole_weights
from ir.names import identifier
from ir.spmd import Spmd, StageCall


class StageText:
    """The source of one stage."""

    def __init__(self, spmd: Spmd, number: int, groups: tuple[Group, ...],
                 blocks: dict[tuple[int, str], BlockText], *, splits: bool = False):  # fmt: skip
        self.spmd, self.number, self.groups, self.blocks = spmd, number, groups, blocks
        self.splits = splits
        self.received = {m.value for m in spmd.messages if m.target == number}
        self.inputs = {item.name for item in spmd.graph.inputs}

    def block(self, group: Group) -> BlockText:
        return self.blocks[group.variant, group.keep]

    def lines(self) -> list[str]:
        halves = self._backward_weight() if self.splits else []
        return [*self._prologue(), *self._forward(), *self._backward(), *halves]

    @property
    def has_prologue(self) -> bool:
        return any(self.block(group).lowered.prologue for group in self.groups)

    def entry(self) -> str:
        """This stage's line in STAGES."""
        backward = ["backward_input", "backward_weight"] if self.splits else ["backward"]
        names = ["forward", *backward, *(["prologue"] if self.has_prologue else [])]
        words = [f"{name}=stage{self.number}_{name}" for name in names]
        line = f"    Stage({', '.join(words)}),"
        if not self.splits:
            return line
        return "\n".join(["    Stage(", *(f"        {word}," for word in words), "    ),"])

    # prologue

    def _prologue(self) -> list[str]:
        if not self.has_prologue:
            return []
        lines = [f"def stage{self.number}_prologue(ctx, w, x):", "    return SimpleNamespace("]
        for group in self.groups:
            block = self.block(group)
            if block.lowered.prologue:
                call = self.spmd.call(group.calls[0])
                values = dict(zip(block.block.inputs, call.arguments, strict=True))
                words = ["ctx", self._weights(group, None, "prologue")]
                words += [f"x.{values[name]}" for name in block.prologue_arguments()]
                lines.append(f"        {group.name}={block.name}_prologue({', '.join(words)}),")
        return [*lines, "    )", "", ""]

    # forward

    def _forward(self) -> list[str]:
        lines = [f"def stage{self.number}_forward(ctx, w, x):", "    saved = []"]
        sent = self._sent_values()
        for group in self.groups:
            dead = [name for name in self._last_read(group) if name not in sent]
            lines += (
                self._forward_loop(group, dead) if group.many else self._forward_call(group, dead)
            )
        words = ", ".join(f"{name}={self._word(name)}" for name in sent)
        return [*lines, f"    return SimpleNamespace({words}), saved", "", ""]

    def _sent_values(self) -> list[str]:
        """Values that leave the stage: messages, loss, metrics and buffer updates."""
        made = {
            name for group in self.groups for placed in group.calls
            for name in self.spmd.call(placed).results
        }  # fmt: skip
        graph = self.spmd.graph
        ends = [graph.loss, *(v for _, v in graph.metrics)]
        ends += [state.update for state in graph.state if state.update]
        leaving = [m.value for m in self.spmd.messages if m.source == self.number]
        return list(dict.fromkeys([*leaving, *(name for name in ends if name in made)]))

    def _last_read(self, group: Group) -> list[str]:
        """Values of calls that no later group reads: arguments and results of this one."""
        place = self.groups.index(group)
        later = {
            value for other in self.groups[place + 1 :] for placed in other.calls
            for value in self.spmd.call(placed).arguments
        }  # fmt: skip
        first, last = self.spmd.call(group.calls[0]), self.spmd.call(group.calls[-1])
        names = dict.fromkeys((*first.arguments, *last.results))
        return [n for n in names if n in self.spmd.makers and n not in later]

    def _deleted(self, values: Sequence[str]) -> list[str]:
        words = ", ".join(map(self._word, values))
        return [f"    del {words}"] if words else []

    def _word(self, value: str) -> str:
        """How the stage function spells a graph-level value."""
        if value in self.received or value in self.inputs:
            return f"x.{value}"
        return identifier(value)

    def _tail(self, group: Group, index: str, block: BlockText) -> list[str]:
        words = [f"ctx.prologue.{group.name}"] if block.lowered.early else []
        return words + ([index] if block.draws else [])

    def _leaves(self, group: Group, index: str | None, tree: str) -> str:
        return f"{tree}.{group.name}[{index}]" if index else f"{tree}.{group.name}"

    def _weights(self, group: Group, index: str | None, phase: str) -> str:
        return whole_weights(self.spmd, group, self._leaves(group, index, "w"), phase)

    def _gradients(self, group: Group, index: str | None) -> str:
        return gradient_word(self.spmd, group, self._leaves(group, index, "g"))

    def _arguments(self, group: Group, placed: StageCall) -> list[str]:
        block = self.block(group)
        values = dict(zip(block.block.inputs, self.spmd.call(placed).arguments, strict=True))
        return [self._word(values[name]) for name in block.arguments]

    def _forward_call(self, group: Group, dead: Sequence[str]) -> list[str]:
        block, placed = self.block(group), group.calls[0]
        words = ["ctx", self._weights(group, None, "forward"), *self._arguments(group, placed)]
        words += self._tail(group, str(placed.index), block)
        outs = [identifier(name) for name in self.spmd.call(placed).results]
        return [
            f"    {_tuple(outs)}, kept = {block.name}_forward({', '.join(words)})",
            "    saved.append(kept)",
            *self._deleted(dead),
        ]

    def _forward_loop(self, group: Group, dead: Sequence[str]) -> list[str]:
        """Carried values keep one name, that of the last call's result, through the loop."""
        block = self.block(group)
        first, last = self.spmd.call(group.calls[0]), self.spmd.call(group.calls[-1])
        outs = [identifier(name) for name in last.results]
        carried = dict(group.carried)
        lines = [
            f"    {outs[result]} = {self._word(first.arguments[place])}"
            for place, result in group.carried
        ]
        renamed = [first.arguments[place] for place, _ in group.carried]
        lines += self._deleted([name for name in dead if name in renamed])
        words = []
        for place, name in enumerate(block.block.inputs):
            if name in block.arguments:
                value = self._word(first.arguments[place])
                words.append(outs[carried[place]] if place in carried else value)
        words = ["ctx", self._weights(group, "i", "forward"), *words]
        words += self._tail(group, self._call(group), block)
        return [
            *lines,
            f"    for i in range({len(group.calls)}):",
            f"        {_tuple(outs)}, kept = {block.name}_forward({', '.join(words)})",
            "        saved.append(kept)",
            *self._deleted([name for name in dead if name not in renamed]),
        ]

    # backward

    def _backward(self) -> list[str]:
        name = "backward_input" if self.splits else "backward"
        lines = [f"def stage{self.number}_{name}(ctx, w, g, saved, dy):"]
        lines += ["    pending = []"] if self.splits else []
        have: set[str] = set()
        for message in self.spmd.messages:
            if message.source == self.number and message.gradient and message.value not in have:
                have.add(message.value)
                lines.append(f"    d_{identifier(message.value)} = dy.{message.value}")
                lines.append(f"    del dy.{message.value}")
        if self.spmd.stage_of[self.spmd.makers[self.spmd.graph.loss][0]] == self.number:
            kind = self.spmd.local_type_of(self.spmd.graph.loss)
            word = f"d_{identifier(self.spmd.graph.loss)}"
            fill = f"torch.ones((), dtype=torch.{kind.dtype}, device=ctx.device)"
            if not self.spmd.is_summed(self.spmd.graph.loss):  # whole on every rank: count it once
                fill = f"ctx.first({fill})"
            before = f"{word} + " if self.spmd.graph.loss in have else ""
            lines.append(f"    {word} = {before}{fill}")
            have.add(self.spmd.graph.loss)
        for group in reversed(self.groups):
            if group.many:
                lines += self._backward_loop(group, have)
            else:
                lines += self._backward_call(group, have)
            lines += self._deleted_gradients(group, have)
        given = [
            m.value for m in self.spmd.messages
            if m.target == self.number and m.gradient and m.value in have
        ]  # fmt: skip
        words = ", ".join(f"{name}=d_{identifier(name)}" for name in given)
        more = ", pending" if self.splits else ""
        return [*lines, f"    return SimpleNamespace({words}){more}", "", ""]

    def _deleted_gradients(self, group: Group, have: set[str]) -> list[str]:
        """Behind a group: the gradients of its results, and those that nobody takes."""
        if not self.block(group).has_backward:
            return []
        first, last = self.spmd.call(group.calls[0]), self.spmd.call(group.calls[-1])
        made = {v for g in self.groups for p in g.calls for v in self.spmd.call(p).results}
        names = dict.fromkeys((*self._tangents(group, group.calls[-1]), *first.arguments))
        dead = [
            name for name in names if name in have
            and (name in last.results or name not in made and name not in self.received)
        ]  # fmt: skip
        have.difference_update(dead)
        words = ", ".join(f"d_{identifier(name)}" for name in dead)
        return [f"    del {words}"] if dead else []

    def _backward_weight(self) -> list[str]:
        """The second half of every block's backward, first block first: the last pending."""
        body = []
        for group in self.groups:
            block = self.block(group)
            if not block.has_halves:
                continue
            index = "i" if group.many else None
            weights = self._weights(group, index, "backward")
            words = ["ctx", weights, self._gradients(group, index)]
            words += ["pending.pop()", *self._tail(group, self._call(group), block)]
            call = f"    {block.name}_backward_weight({', '.join(words)})"
            loop = f"    for i in range({len(group.calls)}):"
            body += [loop, f"    {call}"] if group.many else [call]
        head = f"def stage{self.number}_backward_weight(ctx, w, g, pending):"
        return [head, *(body or ["    pass"]), "", ""]

    @staticmethod
    def _call(group: Group) -> str:
        """The number of the call, in a loop over `i` or alone."""
        start = str(group.calls[0].index)
        if not group.many:
            return start
        return f"{start} + i" if group.calls[0].index else "i"

    def _called(self, block: BlockText, targets: list[str], words: list[str]) -> list[str]:
        """The call of a block's backward, and of a half what it hands to the other."""
        left = [_tuple(targets)] if targets else []
        name = f"{block.name}_backward"
        if not block.has_halves:
            call = f"{name}({', '.join(words)})"
            return [f"{' '.join([*left, '='])} {call}" if targets else call]
        left = left or ["_"]
        return [
            f"{', '.join([*left, 'kept'])} = {name}_input({', '.join(words)})",
            "pending.append(kept)",
        ]

    def _tangents(self, group: Group, placed: StageCall) -> list[str]:
        block = self.block(group).block
        results = dict(zip(block.outputs, self.spmd.call(placed).results, strict=True))
        return [results[output] for output, _ in block.tangents]

    def _backward_call(self, group: Group, have: set[str]) -> list[str]:
        block, placed = self.block(group), group.calls[0]
        if not block.has_backward:
            return ["    saved.pop()"]
        weights = self._weights(group, None, "backward")
        words = ["ctx", weights, self._gradients(group, None), "saved.pop()"]
        words += [f"d_{identifier(name)}" for name in self._tangents(group, placed)]
        words += self._tail(group, self._call(group), block)
        values = dict(zip(block.block.inputs, self.spmd.call(placed).arguments, strict=True))
        targets: list[str] = []
        sums: list[str] = []
        for name in block.handed_gradients():
            word = f"d_{identifier(values[name])}"
            if values[name] in have or word in targets:
                targets.append(f"more_{len(targets)}")
                sums += [f"    {word} = {word} + {targets[-1]}", f"    del {targets[-1]}"]
            else:
                targets.append(word)
            have.add(values[name])
        lines = [f"    {line}" for line in self._called(block, targets, words)]
        leaves = self._leaves(group, None, "g")
        return [*around_backward(self.spmd, group, leaves, lines, " " * 4), *sums]

    def _backward_loop(self, group: Group, have: set[str]) -> list[str]:
        """Gradients of carried values keep one name through the loop."""
        block = self.block(group)
        first, last = self.spmd.call(group.calls[0]), self.spmd.call(group.calls[-1])
        count = len(group.calls)
        if not block.has_backward:
            return [f"    del saved[-{count}:]"]
        carried = dict(group.carried)
        place_of = {name: place for place, name in enumerate(block.block.inputs)}
        tangents = [f"d_{identifier(name)}" for name in self._tangents(group, group.calls[-1])]
        weights = self._weights(group, "i", "backward")
        words = ["ctx", weights, self._gradients(group, "i"), "saved.pop()"]
        words += [*tangents, *self._tail(group, self._call(group), block)]
        targets = [
            f"d_{identifier(last.results[carried[place_of[name]]])}"
            for name in block.handed_gradients()
        ]
        call_lines = [f"        {line}" for line in self._called(block, targets, words)]
        leaves = self._leaves(group, "i", "g")
        lines = [
            f"    for i in reversed(range({count})):",
            *around_backward(self.spmd, group, leaves, call_lines, " " * 8),
        ]
        for name, word in zip(block.handed_gradients(), targets, strict=True):
            value = first.arguments[place_of[name]]
            final = f"d_{identifier(value)}"
            lines.append(f"    {final} = {final + ' + ' if value in have else ''}{word}")
            have.add(value)
        return lines


def _tuple(words: list[str]) -> str:
    return "(" + ", ".join(words) + ("," if len(words) == 1 else "") + ")"
