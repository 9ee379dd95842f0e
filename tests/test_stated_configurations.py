"""A configuration beside a model or a cluster: what it says of these must be so."""

import csv
import json
import os
import signal

import pytest
import torch

import prediction
import shardwright
from ir.device import find_device
from ir.errors import UsageError
from ir.trace import trace
from planner.explain import PARTS
from prediction import RowGraphs, summary
from tests.planner.small_models import Chain
from tests.planner.test_predict import ROW

OWN = {"micro_batch": 2, "global_batch": 16}
BATCH = (torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.int64))


@pytest.fixture(scope="module")
def graph():
    return trace(Chain(), BATCH)


@pytest.mark.parametrize(("column", "value", "said"), [
    ("layers", 12, "layers=12: Chain repeats a layer 4 times"),
    ("seq_len", 4096, "seq_len=4096: no tensor of Chain has a dim of that size"),
    ("hidden", 99, "hidden=99: no tensor"), ("vocab", 50257, "vocab=50257: no tensor"),
    ("precision", "bf16", "precision=bf16: Chain was traced in float32"),
    ("device", "H100-SXM", "device=H100-SXM: the cluster that is given is 1x4 A100-80GB"),
    ("device", "H1000", "no device is called"), ("nodes", 2, "nodes=2: the cluster"),
    ("devices_per_node", 8, "devices_per_node=8: the cluster"),
    ("n_devices", 8, "has 4 devices"), ("dp", 3, "use 12 or 18, or another dp"),
])  # fmt: skip
def test_what_contradicts_is_refused(graph, column, value, said):
    with pytest.raises(UsageError, match=said):
        shardwright.predict(graph, "4xA100-80GB", OWN | {column: value})


def test_what_agrees_changes_nothing(graph):
    stated = {
        "layers": 4, "seq_len": 8, "hidden": 16, "vocab": 24, "device": "a100-80gb", "nodes": 1,
        "devices_per_node": 4, "n_devices": 4,
    }  # fmt: skip
    plain = shardwright.predict(graph, "4xA100-80GB", OWN)
    assert shardwright.predict(graph, "4xA100-80GB", OWN | stated).step_s == plain.step_s


def test_a_model_without_layers_makes_no_virtual_stages():
    one = trace(torch.nn.Linear(8, 8), (torch.randn(4, 8),), loss=lambda y: y.mean())
    with pytest.raises(UsageError, match="no two neighbouring calls of the same block"):
        shardwright.predict(one, "4xA100-80GB", OWN | {"pp": 2})


@pytest.mark.parametrize(("changes", "said"), [
    ({"dp": "99", "n_devices": "", "nodes": "", "devices_per_node": ""}, "use 198, or another dp"),
    ({"dp": "99"}, "tp x pp x dp = 99, but n_devices=8: tp x pp = 1 leave dp=8"),
    ({"tp": "3", "dp": ""}, "their product may be 2 or 4"),
    ({"tp": "8", "dp": "1", "heads": "12", "hidden": "1536"}, "heads=12 .*tp=8: use 6 or 12"),
    ({"precision": "bf16", "device": "V100"}, "bf16: V100-32GB has no units for it; it has fp16$"),
    ({"precision": "", "device": "T4"}, "precision=bf16: T4 has no units for it"),
])  # fmt: skip
def test_a_row_that_can_t_be_says_what_can(changes, said):
    with pytest.raises(UsageError, match=said):
        shardwright.predict(None, None, ROW | changes)


def test_only_the_oldest_cards_have_no_units_for_bf16():
    without = {"V100-16GB", "V100-32GB", "T4"}
    for name in (*without, "A100", "H100", "MI250X", "MI300X", "L4", "RTX-3090", "RTX-4090"):
        device = find_device(name)
        assert device.has_units("float16") and device.has_units("float32")
        assert device.has_units("bfloat16") == (device.name not in without)


def test_a_plan_says_which_products_have_no_units():
    half = trace(Chain().to(torch.bfloat16), BATCH)
    made = shardwright.plan_graph(half, "2xV100", global_batch=4)
    assert any("V100-32GB has no units for bfloat16" in note for note in made.approximations)
    made = shardwright.plan_graph(half, "2xA100", global_batch=4)
    assert not any("no units" in note for note in made.approximations)


def test_a_summary_says_how_many_reasons_it_leaves_out():
    records = [{"error": f"{name}=1: wrong"} for name in "aabcdefg"] + [{"error": ""}]
    assert summary(records) == (
        "1 rows predicted, 8 refused (a 2, b 1, c 1, d 1, e 1, and 2 for 2 other reasons)"
    )
    assert summary(records[:-2]) == "0 rows predicted, 7 refused (a 2, b 1, c 1, d 1, e 1, f 1)"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, ROW)
        writer.writeheader()
        writer.writerows([ROW | {"layers": "2"}])
    return path


def test_an_explanation_as_json_says_what_the_text_says(table, capsys):
    assert shardwright.main(["predict", str(table), "--explain", "x", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = shardwright.predict(RowGraphs()(ROW | {"layers": "2"}), None, ROW | {"layers": "2"})
    why = told["explanation"]
    assert float(told["step_s"]) == pytest.approx(found.step_s, rel=1e-4)
    assert sum(why["parts"][part] for part in PARTS) == pytest.approx(why["step_s"], rel=1e-6)
    assert why["traits"]["zero_stage"] == 1 and len(why["stages"]) == 1
    heaviest = max((item for block in why["blocks"] for item in block["forward"]),
                   key=lambda item: item["seconds"])  # fmt: skip
    assert heaviest["op"] == "einsum" and "bfloat16[" in heaviest["makes"][0]


def test_a_termination_while_rows_are_predicted_leaves_no_file(table, monkeypatch):
    def ended(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(prediction, "predict_rows", ended)
    before = signal.getsignal(signal.SIGTERM)
    out = table.with_name("pred.csv")
    assert shardwright.main(["predict", str(table), "--out", str(out)]) == 143
    assert os.listdir(table.parent) == ["rows.csv"]
    assert signal.getsignal(signal.SIGTERM) == before
