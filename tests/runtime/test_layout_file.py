"""Reading layout.json: what is wrong with a damaged one is said, with its place."""

import copy
import json

import pytest
import tiny_program as tiny
import torch

from runtime.errors import LayoutError, UsageError
from runtime.layout import load_layout, parse_layout
from runtime.mesh import MeshShape


def test_a_layout_is_read_from_its_file(tmp_path):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(tiny.layout()))
    layout = load_layout(path)
    assert layout == parse_layout(tiny.layout())
    assert layout.mesh == MeshShape(pipeline=2, data=2, tensor=2)
    assert layout.state[1].names == ("mlp.up",)
    assert layout.state[1].dtype == torch.float64
    assert layout.state[5].update.value == "new_mean"


def test_a_truncated_file_is_told(tmp_path):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(tiny.layout())[:200])
    with pytest.raises(LayoutError, match="is not JSON .* cut short"):
        load_layout(path)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        load_layout(tmp_path / "layout.json")


def changed(*path, to=None):
    """The tiny layout with one value replaced, or removed where `to` is None."""
    table = copy.deepcopy(tiny.layout())
    *parents, last = path
    place = table
    for key in parents:
        place = place[key]
    if to is None:
        del place[last]
    else:
        place[last] = to
    return table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], 'no layout.json: it has no "format"'),
        (changed("format"), 'it has no "format"'),
        (changed("format", to="shardwright-layout/9"), "shardwright-layout/9.*reads.*layout/2"),
        (changed("micro_batches"), 'layout.json has no "micro_batches"'),
        (changed("micro_batches", to=0), "is 0, less than 1"),
        (changed("global_batch"), 'layout.json has no "global_batch"'),
        (changed("schedule", "order", 0, to="0F0 0Z0"), 'holds "0Z0", which is not like 2F5'),
        (changed("schedule", "order", 0, to="0F0 0B0"), "stage 0 must run each of 2 micro-batches"),
        (changed("schedule", "order", 0, to="0B0 0F0"), "stage 0 runs .* before what it needs"),
        (changed("schedule", "order", 0, to="1F0 0F0"), "rank 1 can't run stage 1 too"),
        (changed("mesh", "pipeline", to=3), "order for 2 ranks and 2 stages for pipeline=3"),
        (changed("mesh", "data"), 'mesh has no "data"'),
        (changed("state", 1, "dtype", to="float65"), r"state\[1\]: .dtype. is .float65., not a"),
        (changed("state", 1, "trainable", to=1), r"state\[1\]: .trainable. is 1, not of type bool"),
        (changed("state", 1, "shape", to=["a"]), "not a list of int"),
        (changed("state", 0, "sync", 1, "op", to="gossip"), r"state\[0\] sync\[1\]: .op. is"),
        (changed("stages", 1, to={}), "has no"),
        (changed("stages", 1), "rank 1 can't run stage 1 too"),
        (changed("state", 0, "stages", to=[0, 2]), r"state\[0\] is on stage 2, and there are 2"),
        (changed("stages", 1, "weights", to={"x": [1]}), "stage 1 has no state entry 1"),
        (changed("stages", 1, "weights", to={"x": "y"}), "no number of an entry"),
        (changed("stages", 1, "inputs", to=["labels"]), "unknown inputs {'labels'}"),
        (changed("stages", 1, "receives", 0), 'stage 0 and stage 1 disagree about sending "e"'),
        (changed("stages", 0, "sends", 0, "gradient", to=False), 'disagree about sending "h"'),
    ],
)
def test_a_wrong_layout_is_refused(table, message):
    with pytest.raises(LayoutError, match=message) as e:
        parse_layout(table)
    assert e.value.exit_code == 2
