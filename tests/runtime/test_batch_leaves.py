"""The tensors of a step's arguments are numbered and named as torch's pytree does it."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, replace

import pytest
import tiny_program as tiny
import torch
from torch.utils import _pytree as pytree

from runtime.batch import local_batch, tensor_leaves
from runtime.errors import UsageError
from runtime.layout import parse_layout

Pair = namedtuple("Pair", "left right")
A, B, C, D = (torch.full((1,), float(i)) for i in range(4))
TREES = [
    ((A, B), {}),
    ((), {"z": A, "a": B}),
    (({"z": A, "a": [B, {"k": C}]}, None, 3, "text", (D,)), {"flag": True}),
    ((Pair(A, [B, None]), OrderedDict(z=C, a=D)), {}),
    (([[], {}, ()], A), {"x": {1: B, (2, 3): C}}),
]


@pytest.mark.parametrize("tree", TREES)
def test_leaves_are_torchs(tree):
    wanted = [
        (pytree.keystr(path), leaf)
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]
        if isinstance(leaf, torch.Tensor)
    ]
    found = list(tensor_leaves(tree))
    assert [leaf for _, leaf in found] == [leaf for _, leaf in wanted]
    assert [leaf for _, leaf in found] == [
        leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)
    ]


@pytest.mark.parametrize("tree", TREES[:3])
def test_paths_read_as_torchs(tree):
    leaves, _ = pytree.tree_flatten_with_path(tree)
    wanted = [pytree.keystr(path) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert [path for path, _ in tensor_leaves(tree)] == wanted


def test_a_dataclass_gives_its_fields_in_order():
    @dataclass
    class Batch:
        second: torch.Tensor
        first: object

    found = list(tensor_leaves(((Batch(B, [A]),), {})))
    assert found == [("[0][0].second", B), ("[0][0].first[0]", A)]


SCALED = {"x": A, "scale": 2.0, "flags": [True, None]}
OTHER = [
    ({"scale": 3.0}, r"\[1\]\['scale'\] is 3.0 there, and is 2.0 in the batch"),
    ({"scale": 2}, "is 2 there, and is 2.0"),
    ({"flags": [True]}, r"\[1\]\['flags'\]\[1\] is not there, and is None"),
    ({"more": "word"}, "is 'word' there, and is not in the batch"),
]


@pytest.mark.parametrize(("change", "said"), OTHER)
def test_plain_values_are_part_of_the_program(change, said):
    plain = {"['scale']": "2.0", "['flags'][0]": "True", "['flags'][1]": "None"}
    table = tiny.layout() | {
        "plain": [{"path": f"[1]{path}", "value": value} for path, value in plain.items()]
    }
    parsed = replace(parse_layout(table), inputs=())
    assert local_batch(parsed, None, (), SCALED) == {}
    with pytest.raises(UsageError, match=said):
        local_batch(parsed, None, (), SCALED | change)
