"""`shardwright predict`: every row gets a number or a reason."""

import csv
import json
from dataclasses import replace

import pytest

import shardwright
from planner.explain import explain, explain_json
from prediction import predict
from tests.planner.test_predict import ROW


@pytest.fixture
def table(tmp_path):
    rows = [ROW | {"layers": "2"}, ROW | {"id": "y", "experts": "8"},
            ROW | {"id": "z", "heads": "17"}]  # fmt: skip
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, sorted(set().union(*rows)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_rows_that_can_not_be_predicted_do_not_stop_the_others(table, tmp_path, capsys):
    out = tmp_path / "pred.csv"
    assert shardwright.main(["predict", str(table), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("1 rows predicted, 2 refused (")
    good, experts, heads = csv.DictReader(out.open())
    assert float(good["step_s"]) > 0 and good["fits"] == "1" and not good["error"]
    assert experts["error"].startswith("experts") and not experts["step_s"]
    assert "heads=17" in heads["error"]


def test_a_row_can_be_explained(table, capsys):
    assert shardwright.main(["predict", str(table), "--explain", "x"]) == 0
    text = capsys.readouterr().out
    assert "compute" in text and "peak" in text and "layers x2" in text
    assert shardwright.main(["predict", str(table), "--explain", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "x"


@pytest.mark.parametrize("kind", ["device", "reserved", "allocated"])
def test_the_bytes_of_an_explanation_add_up_to_the_peak(kind):
    found = predict(None, None, ROW | {"layers": "2", "mem_kind": kind})
    told = explain_json(found)
    assert sum(told["peak_parts"].values()) == pytest.approx(told["peak_bytes"])
    assert told["peak_bytes"] == pytest.approx(found.peak_GiB * 2**30)
    assert ("context" in told["peak_parts"]) == (kind == "device")
    (stage,) = told["stages"]
    assert stage["capacity_bytes"] == found.evaluated.prediction.capacity_bytes > 0
    lines = [line.split() for line in explain(found).splitlines()]
    sizes = {line[0]: float(line[1]) for line in lines if line[2:3] in (["GiB"], ["GiB:"])}
    assert sum(sizes.values()) == pytest.approx(2 * sizes["peak"], abs=0.03)


def test_what_a_row_leaves_open_is_told_with_what_was_tried():
    row = ROW | {"layers": "4", "pp": "2", "dp": "4", "virtual_stages": "", "recompute": "none"}
    found = predict(None, None, row)
    taken = found.traits.virtual_stages
    told = f"  left open: virtual_stages={taken}, the fastest that fits of 1, 2"
    assert told in explain(found).splitlines()
    assert "left open: recompute" not in explain(found)
    assert explain_json(found)["decided"][0] == {
        "column": "virtual_stages", "value": taken, "tried": (1, 2),
    }  # fmt: skip


def test_virtual_stages_are_in_the_header():
    row = ROW | {"layers": "4", "pp": "2", "dp": "4", "virtual_stages": "2"}
    assert "interleaved x 2, " in explain(predict(None, None, row)).splitlines()[0]


def test_a_file_that_is_no_table_or_an_unknown_row_is_refused(table, tmp_path, capsys):
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    assert shardwright.main(["predict", str(other), "--out", str(tmp_path / "p.csv")]) == 2
    assert shardwright.main(["predict", str(table), "--explain", "nobody"]) == 2
    double = tmp_path / "double.csv"
    double.write_text(table.read_text() + table.read_text().partition("\n")[2])
    assert shardwright.main(["predict", str(double), "--explain", "x"]) == 2
    assert "has 2 rows with the id 'x'" in capsys.readouterr().err
    assert shardwright.main(["predict", str(table)]) == 2
    assert shardwright.main(["predict", str(tmp_path / "none.csv"), "--json"]) == 2


def test_one_configuration_from_python():
    cluster = shardwright.Cluster.parse("8xH100-SXM")
    found = shardwright.predict(None, None, ROW | {"layers": 2})
    faster = shardwright.predict(None, cluster, ROW | {"layers": 2, "device": ""})
    assert 0 < faster.step_s < found.step_s


def test_a_priced_cluster_gives_the_cost_of_a_step():
    cluster = replace(shardwright.Cluster.parse("8xA100-80GB"), usd_per_hour=36.0)
    found = shardwright.predict(None, cluster, ROW | {"layers": 2})
    assert found.usd_per_step == pytest.approx(found.step_s * 0.01)
    assert f"{found.usd_per_step:.4g} USD per step" in explain(found)
