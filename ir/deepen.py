"""A traced graph with another number of repeated layers: tracing two is enough.

Input: a `Graph` in which some neighbouring calls run the same block, each on the results of the
one before it. Output: the graph with `count` such calls, equal to the trace of the deeper model
but for the names of values.
"""

from __future__ import annotations

from dataclasses import replace

from ir.graph import Call, Graph, State


def layer_run(graph: Graph) -> range:
    """The longest stretch of neighbouring calls that run the same block; `ValueError` if none."""
    best, start = range(0), 0
    for end in range(1, len(graph.calls) + 1):
        if end == len(graph.calls) or graph.calls[end].block != graph.calls[start].block:
            best = max(best, range(start, end), key=len)
            start = end
    if len(best) < 2:
        raise ValueError(f"{graph.model} has no two neighbouring calls of the same block")
    return best


def deepen(graph: Graph, run: range, count: int) -> Graph:
    """`graph` with `count` calls in place of those of `run`, of which there are two or more.

    New calls get state of their own where the last two calls differ, and share what they share.
    `ValueError` if the calls do not form a chain, or a layer's buffer changes in a step.
    """
    if len(run) < 2 or count < 1:
        raise ValueError(f"a run of {len(run)} calls can't become one of {count}")
    layers = [graph.calls[i] for i in run]
    own = _own_state(graph, layers)
    made: dict[str, State] = {}
    chain = layers[:count]
    for number in range(len(layers), count):
        chain.append(_next_layer(chain[-1], layers, own, number, made))
    swap = dict(zip(layers[-1].results, chain[-1].results, strict=True))
    after = [
        replace(call, arguments=tuple(swap.get(v, v) for v in call.arguments))
        for call in graph.calls[run.stop :]
    ]
    dropped = {v for call in layers[count:] for v in call.arguments if v in own}
    state = [item for item in graph.state if item.name not in dropped]
    return replace(
        graph, state=(*state, *made.values()),
        calls=(*graph.calls[: run.start], *chain, *after), loss=swap.get(graph.loss, graph.loss),
    )  # fmt: skip


def _own_state(graph: Graph, layers: list[Call]) -> dict[str, State]:
    """The state that only one layer reads, by name."""
    last, before = layers[-1], layers[-2]
    shared = set(last.arguments) & set(before.arguments)
    state = {item.name: item for item in graph.state}
    own = {v: state[v] for call in layers for v in call.arguments
           if v in state and v not in shared}  # fmt: skip
    chained = set(before.results)
    for value in set(last.arguments) - shared - own.keys() - chained:
        raise ValueError(f"{last.path} reads {value}, which {before.path} did not make")
    if changing := [item.names[0] for item in own.values() if item.update]:
        raise ValueError(f"{changing[0]} changes in every step: a layer with it can't be repeated")
    return own


def _next_layer(
    previous: Call, layers: list[Call], own: dict[str, State], number: int, made: dict[str, State]
) -> Call:
    """The layer after `previous`: like the last traced one, one further."""
    last, before = layers[-1], layers[-2]
    arguments = []
    for value in last.arguments:
        if value in own:
            arguments.append(_copied(own[value], last.path, number, made))
        elif value in before.results:
            arguments.append(previous.results[before.results.index(value)])
        else:
            arguments.append(value)
    results = tuple(f"{value}_at_{number}" for value in last.results)
    return Call(last.block, tuple(arguments), results, _path(last.path, number))


def _copied(item: State, path: str, number: int, made: dict[str, State]) -> str:
    """The name of the same state of layer `number`."""
    names = tuple(_path(path, number) + n.removeprefix(path) for n in item.names)
    name = f"{item.name}_at_{number}"
    made[name] = replace(item, name=name, names=names)
    return name


def _path(path: str, number: int) -> str:
    return f"{path.rpartition('.')[0]}.{number}" if "." in path else f"{path}.{number}"
