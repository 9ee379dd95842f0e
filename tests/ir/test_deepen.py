"""A model traced once: other depths and other sizes are the graph rewritten, not traced again."""

from collections import Counter
from functools import lru_cache

import pytest

from ir.deepen import deepen, layer_run
from ir.resize import resize
from ir.trace import trace
from runtime.row_models import RowShape, build_row_model, probe_of, size_changes

LLAMA = RowShape("llama", 3, 64, 4, 2, 16, 96, True, 200, 32, False)
GPT = RowShape("gpt", 3, 48, 4, 4, 12, 192, False, 160, 24, True, "float16")


@lru_cache
def traced(shape):
    return trace(*build_row_model(shape))


def anonymous(block):
    """A block's operations and types, whatever its values are called."""
    return Counter(
        (node.op, *(str(block.types[n]) for n in (*node.inputs, *node.outputs) if n in block.types))
        for node in block.nodes
    )


def assert_same(found, wanted):
    assert [call.path for call in found.calls] == [call.path for call in wanted.calls]
    assert [call.block for call in found.calls] == [call.block for call in wanted.calls]
    assert [anonymous(b) for b in found.blocks] == [anonymous(b) for b in wanted.blocks]
    facts = [{(s.names, s.type, s.kind, s.trainable) for s in g.state} for g in (found, wanted)]
    assert facts[0] == facts[1]
    made = {s.name for s in found.state} | {i.name for i in found.inputs}
    for call in found.calls:
        assert set(call.arguments) <= made
        made |= set(call.results)
    assert found.loss in made


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=lambda s: s.family)
def test_two_traced_layers_become_the_deep_and_wide_model(shape):
    probe = probe_of(shape)
    small = resize(traced(probe), size_changes(probe, shape))
    assert_same(deepen(small, layer_run(small), shape.layers), traced(shape))


def test_fewer_layers_drop_their_state():
    deep = traced(GPT)
    two = deepen(deep, layer_run(deep), 2)
    assert len(two.calls) == len(deep.calls) - 1 and len(two.state) == len(deep.state) - 12
    assert_same(deepen(two, layer_run(two), 3), deep)


def test_a_graph_without_repeated_layers_is_refused():
    graph = traced(GPT)
    with pytest.raises(ValueError, match="no two neighbouring calls"):
        layer_run(deepen(graph, layer_run(graph), 1))
