"""`shardwright predict` on bad input: every broken row has its reason, the others go on."""

import csv
import os

import pytest

import prediction
import shardwright
from ir.errors import UsageError
from planner.predict_table import COLUMNS, predict_table
from planner.table_file import read_rows
from prediction import RowGraphs
from tests.planner.test_predict import ROW

GOOD = ROW | {"layers": "2"}
BROKEN = [
    # what is broken, its cells, what the reason says
    ("not a number", {"micro_batch": "nan"}, "micro_batch='nan' is not a number"),
    ("infinite", {"seq_len": "inf"}, "seq_len='inf' is not a number"),
    ("negative", {"global_batch": "-64"}, "global_batch=-64: it is a whole number from 1"),
    ("zero", {"tp": "0"}, "tp=0: "),
    ("text", {"hidden": "wide"}, "hidden='wide' is not a number"),
    ("a fraction", {"micro_batch": "1.5"}, "micro_batch=1.5: it is a whole number"),
    ("other digits", {"layers": "２"}, "layers='\\uff12' is not a number"),
    ("a control character", {"hidden": "10\n24"}, "hidden='10\\n24' is not a number"),
    ("a long cell", {"hidden": "9" * 5000}, "hidden='9999999999"),
    ("huge", {"hidden": "1e18"}, "hidden=1e18: it is a whole number from 1 to 1000000"),
    ("too many layers", {"layers": "100000000"}, "layers=100000000: "),
    ("too many devices", {"dp": "100000", "tp": "16", "n_devices": ""}, "1600000 devices"),
    ("no layers", {"layers": ""}, "layers is missing"),
    ("no heads", {"heads": ""}, "heads is missing"),
    ("no vocabulary", {"vocab": " "}, "vocab is missing"),
    ("no micro-batch", {"micro_batch": ""}, "micro_batch is missing"),
    ("no device", {"device": ""}, "device is missing"),
    ("unknown device", {"device": "H900"}, "no device is called 'H900'. Nearest: H200-SXM, H100"),
    ("unknown family", {"family": "lama"}, "family='lama': .* did you mean llama?"),
    ("unknown precision", {"precision": "bf61"}, "precision='bf61': .* did you mean bf16?"),
    ("unsupported precision", {"precision": "fp8"}, "precision=fp8: A100-80GB has no units"),
    ("unknown recompute", {"recompute": "some"}, "recompute='some': it is one of none, "),
    ("unknown modules", {"recompute_modules": "mlp"}, "recompute_modules='mlp'"),
    ("unknown optimizer", {"optimizer": "lion"}, "optimizer='lion': it is one of adam, adamw"),
    ("unknown ZeRO stage", {"zero_stage": "7"}, "zero_stage='7': it is one of 0, 1, 2, 3"),
    ("a flag that is none", {"gated_mlp": "maybe"}, "gated_mlp='maybe': it is 0, 1 or empty"),
    ("heads over tensor ranks", {"tp": "8", "dp": "1", "heads": "12", "hidden": "1536"},
     "heads=12 can't be divided by tp=8"),
    ("kv heads over heads", {"kv_heads": "3"}, "heads=16 can't share kv_heads=3"),
    ("hidden over heads", {"heads": "7"}, "hidden=1024 can't be divided by heads=7"),
    ("odd rotary heads", {"head_dim": "33"}, "head_dim=33"),
    ("more stages than layers", {"pp": "8", "dp": "1"}, "layers=2 can't fill 8"),
    ("nodes without devices", {"nodes": "3", "devices_per_node": "4"}, "leave some of nodes=3"),
    ("stages of no pipeline", {"virtual_stages": "2"}, "virtual_stages=2 with pp=1"),
    ("degrees against devices", {"dp": "4"}, "tp x pp x dp = 4, but n_devices=8"),
    ("degrees against nodes", {"devices_per_node": "4"}, "nodes x devices_per_node = 4"),
    ("devices over nodes", {"devices_per_node": "3"}, "devices_per_node=3"),
    ("batch over ranks", {"global_batch": "60"}, "global_batch=60 is no multiple"),
    ("shards over ranks", {"shard_group": "3"}, "dp=8 can't be divided by shard_group=3"),
    ("parts of no recomputation", {"recompute": "none", "recompute_modules": "op"},
     "recompute=none leaves nothing to recompute_modules=op"),
    ("parts of all recomputation", {"recompute": "full", "recompute_modules": "op"},
     "recompute=full leaves nothing"),
    ("a domain of parts of nodes", {"nodes": "2", "devices_per_node": "4", "nvlink_domain": "6"},
     "nvlink_domain=6 is not made of whole nodes of devices_per_node=4"),
    ("experts", {"experts": "8"}, "experts: "),
    ("context", {"cp": "2"}, "cp: "),
    ("adapters", {"lora_rank": "16"}, "lora_rank: "),
    ("misspelt column", {"micro_bach": "2"}, "column 'micro_bach': did you mean micro_batch"),
    ("unknown column", {"wibble": "2"}, "unknown column 'wibble'"),
    ("a network rate", {"inter_node_GBps_per_device": "fast"}, "inter_node_GBps_per_device="),
]  # fmt: skip


@pytest.mark.parametrize(("what", "cells", "said"), BROKEN, ids=[item[0] for item in BROKEN])
def test_a_broken_row_has_its_reason_on_one_line(what, cells, said):
    (found,) = predict_table([GOOD | cells], RowGraphs())
    reason = found["error"]
    first, _, rest = said.partition(" .* ")
    assert first in reason and rest in reason
    assert "\n" not in reason and len(reason) < 200 and "Traceback" not in reason
    assert "defect" not in reason
    assert not any(found[column] for column in COLUMNS if column not in ("id", "error"))


def written(folder, rows, name="rows.csv"):
    path = folder / name
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_others_go_on_and_a_line_says_how_many_were_refused(tmp_path, capsys):
    rows = [GOOD, *(GOOD | cells for _, cells, _ in BROKEN[:8] + BROKEN[-3:]), GOOD]
    table, out = written(tmp_path, rows), tmp_path / "pred.csv"
    assert shardwright.main(["predict", str(table), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("2 rows predicted, 11 refused (") and not printed.err
    records = list(csv.DictReader(out.open()))
    assert [bool(record["error"]) for record in records] == [False, *[True] * 11, False]
    assert records[0]["step_s"] == records[-1]["step_s"]
    assert sorted(os.listdir(tmp_path)) == ["pred.csv", "rows.csv"]


def test_a_defect_in_one_row_loses_no_other_row(monkeypatch):
    def graphs(row):
        raise RuntimeError("overflow\nin a kernel")

    (found,) = predict_table([GOOD], graphs)
    assert "defect" in found["error"] and "RuntimeError: overflow in a kernel" in found["error"]


HEADER = ",".join(GOOD)
LINE = ",".join(GOOD.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (HEADER.encode(), "has a header and no rows"),
        (f"{HEADER},tp\n{LINE},2\n".encode(), "has the column 'tp' twice"),
        (f"{HEADER}\n{LINE}\n".replace(",", ";").encode(), "looks separated by semicolons"),
        (f"{HEADER}\n{LINE}\n".replace(",", "\t").encode(), "looks separated by tabs"),
        (b"a,b\n1,2\n", "none of the columns"),
        (f'{HEADER}\n{LINE},"open\n'.encode(), "line 2: not a CSV table"),
        (f"{HEADER}\n{LINE}\n".replace("llama", "ll\u00e4ma").encode("latin-1"), "is not UTF-8"),
        (bytes(range(256)), "is not UTF-8"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, capsys, text, message):
    path, out = tmp_path / "rows.csv", tmp_path / "pred.csv"
    path.write_bytes(text)
    assert shardwright.main(["predict", str(path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff{HEADER}\n{LINE}\n",
        f"{HEADER}\r\n{LINE}\r\n",
        f"{HEADER}\n\n{LINE}\n\n",
        f"{HEADER.replace(',', ' , ')}\n{LINE}\n",
    ],
    ids=["byte order mark", "CRLF", "blank lines", "spaces in the header"],
)
def test_harmless_forms_of_a_table_are_read(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_bytes(text.encode())
    assert read_rows(path) == [GOOD]


def test_a_row_with_more_or_fewer_cells_than_columns_is_that_row_s_error(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"{HEADER}\n{LINE},1,2\nx,llama\n{LINE}\n")
    rows = read_rows(path)
    more, fewer = predict_table(rows[:2], RowGraphs())
    assert "more cells than the header has columns: '1, 2'" in more["error"]
    assert "device is missing" in fewer["error"]
    assert rows[2] == GOOD


@pytest.mark.parametrize("name", ["", "nowhere/pred.csv", "rows.csv"])
def test_a_place_that_can_not_be_written_is_refused_before_any_work(
    tmp_path, monkeypatch, capsys, name
):
    table = written(tmp_path, [GOOD])
    monkeypatch.setattr(prediction, "predict_rows", lambda rows: pytest.fail("worked first"))
    before = table.read_bytes()
    assert shardwright.main(["predict", str(table), "--out", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert table.read_bytes() == before


def test_a_folder_as_the_table_is_refused(tmp_path, capsys):
    assert shardwright.main(["predict", str(tmp_path), "--json"]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_explaining_a_broken_row_is_an_error_without_a_traceback(tmp_path, capsys):
    table = written(tmp_path, [GOOD | {"kv_heads": "3"}])
    assert shardwright.main(["predict", str(table), "--explain", "x"]) == 2
    assert "kv_heads=3" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "said"), [
    ({"micro_bach": 2}, "micro_bach"), ({"kv_heads": 3}, "kv_heads=3"), ({"hidden": "x"}, "hidden"),
    ({"tp": 8, "dp": 1, "ffn_hidden": 4097}, "ffn_hidden=4097"),
])  # fmt: skip
def test_from_python_the_same_mistakes_are_usage_errors(change, said):
    with pytest.raises(UsageError, match=said):
        shardwright.predict(None, None, GOOD | change)


def test_flags_from_python_may_be_booleans_and_dp_is_what_is_left():
    config = {key: int(value) if value.isdigit() else value for key, value in GOOD.items()}
    flags = {"gated_mlp": True, "tied_embeddings": False, "sequence_parallel": True, "dp": None}
    plain = shardwright.predict(None, None, config)
    assert shardwright.predict(None, None, config | flags).step_s == plain.step_s
