"""Configurations are pinned, laid out and priced; what is left open is decided."""

import pytest

from ir.errors import UsageError
from planner.explain import PARTS, explain_json
from planner.predict import Predictor, layers_per_stage
from planner.predict_table import record
from planner.rows import read_configuration
from planner.stacks import STACKS, traits_of
from prediction import RowGraphs

ROW = {
    "id": "x", "family": "llama", "layers": "8", "hidden": "1024", "heads": "16", "kv_heads": "8",
    "ffn_hidden": "4096", "gated_mlp": "1", "vocab": "32000", "seq_len": "2048",
    "tied_embeddings": "0", "attention_flash": "1", "device": "A100-SXM4-80GB", "nodes": "1",
    "devices_per_node": "8", "nvlink_domain": "8", "n_devices": "8", "tp": "1", "pp": "1",
    "dp": "8", "zero_stage": "1", "micro_batch": "2", "global_batch": "64", "recompute": "none",
    "sequence_parallel": "1", "precision": "bf16", "framework": "megatron-core",
}  # fmt: skip


@pytest.fixture(scope="module")
def predicted():
    graphs, predictor = RowGraphs(), Predictor()

    def run(**changes):
        row = ROW | {key: str(value) for key, value in changes.items()}
        return predictor.predict(graphs(row), read_configuration(row))

    return run


def test_parts_are_there_and_the_step_is_reproducible(predicted):
    found = predicted()
    assert found.step_s > found.compute_s > 0 and found.peak_GiB > 1 and found.fits
    assert predicted() == found or predicted().step_s == found.step_s


@pytest.mark.parametrize("changes", [
    {}, {"tp": 2, "dp": 4}, {"zero_stage": 3}, {"pp": 2, "dp": 4},
    {"pp": 4, "dp": 2, "virtual_stages": 2, "global_batch": 16}, {"pp": 4, "tp": 2, "dp": 1},
], ids=str)  # fmt: skip
def test_the_columns_of_a_row_add_up_to_its_step(predicted, changes):
    cells = record("x", predicted(**changes))
    parts = sum(float(cells[name]) for name in PARTS)
    assert parts == pytest.approx(float(cells["step_s"]), rel=1e-5)  # of six digits each
    told = explain_json(predicted(**changes))
    assert sum(told["parts"].values()) == pytest.approx(told["step_s"], rel=1e-9)


def test_recomputation_costs_time_and_saves_memory(predicted):
    none, full = predicted(), predicted(recompute="full")
    assert 1.15 < full.step_s / none.step_s < 1.45
    assert full.peak_GiB < none.peak_GiB


def test_sharding_state_over_data_ranks_saves_memory(predicted):
    sizes = [predicted(zero_stage=stage).peak_GiB for stage in (0, 1, 3)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.1 * sizes[2]


def test_tensor_parallelism_cuts_matrices_and_communicates(predicted):
    whole, cut = predicted(tp=1, dp=8), predicted(tp=4, dp=2)
    plain = predicted(tp=4, dp=2, sequence_parallel=0)
    assert cut.exposed_comm_s > whole.exposed_comm_s
    assert cut.peak_GiB < whole.peak_GiB and cut.peak_GiB < plain.peak_GiB
    state = cut.evaluated.program.state
    cuts = [name for name, place in state.items() if "weight" in name and str(place) != "whole"]
    assert len(cuts) == 7 * 8 + 2


def test_pipelines_idle_less_with_more_micro_batches_or_virtual_stages(predicted):
    few = predicted(pp=4, dp=2, global_batch=16, virtual_stages=1)
    many = predicted(pp=4, dp=2, global_batch=128, virtual_stages=1)
    virtual = predicted(pp=4, dp=2, global_batch=16, virtual_stages=2)
    assert few.bubble_s / few.step_s > many.bubble_s / many.step_s
    assert virtual.step_s < few.step_s


def test_what_is_open_is_the_fastest_that_fits(predicted):
    opened = predicted(recompute="")
    assert opened.step_s == predicted().step_s
    tight = predicted(recompute="", micro_batch=128, global_batch=1024)
    assert tight.fits and tight.recompute != "none"


@pytest.mark.parametrize(("change", "said"), [
    ({"device": "H900"}, "no device is called"), ({"experts": "8"}, "^experts"),
    ({"cp": "2"}, "^cp"), ({"dp": "4"}, "n_devices=8"), ({"micro_batch": ""}, "micro_batch is"),
    ({"global_batch": "60"}, "no multiple of micro_batch=2"), ({"precision": "int3"}, "precision"),
    ({"tp": "8", "dp": "1", "heads": "12"}, "heads=12"), ({"zero_stage": "7"}, "zero_stage"),
    ({"pp": "8", "dp": "1", "virtual_stages": "4"}, "layers=8"), ({"tp": "0"}, "^tp=0"),
    ({"recompute": "some"}, "recompute='some'"), ({"micro_batch": "1.5"}, "whole number"),
])  # fmt: skip
def test_a_row_that_can_not_be_is_refused_by_its_column(change, said):
    with pytest.raises(UsageError, match=said):
        read_configuration(ROW | change)


def test_stages_are_equal_with_embedding_and_head_as_layers_where_that_helps():
    assert layers_per_stage(8, 4) == [2, 2, 2, 2]
    assert layers_per_stage(78, 4) == [19, 20, 20, 19]
    assert sum(layers_per_stage(32, 5)) == 32 and min(layers_per_stage(32, 5)) == 6


def test_stacks_are_mechanisms_and_rows_override_them():
    device = read_configuration(ROW).cluster.device
    for name in STACKS:
        traits_of({"framework": name, "precision": "bf16"}, device)
    row = {"framework": "torchtitan (FSDP2)", "precision": "fp8", "compile": "1"}
    traits = traits_of(row, device)
    assert traits.fused_elementwise and not traits.eager
    assert traits.matmul_precision == "float8_e4m3fn"
