"""What stacks hold beside a step's own values, in numbers worked out by hand."""

import pytest

from ir.cluster import GIB
from ir.errors import UsageError
from planner.calibrated import cost_model
from planner.device_memory import COMMUNICATORS_BYTES, CONTEXT_BYTES, FRAGMENTATION
from planner.kernels import memory_s
from planner.memory_traits import Memory, Update
from planner.predict import Predictor, layers_per_stage
from planner.rows import read_configuration
from planner.stacks import STACKS, has_wide_logits, padded_vocabulary, stack_of
from prediction import RowGraphs
from runtime.row_models import row_shape

LAYERS, HIDDEN, HEADS, SEQ, ROWS = 8, 1024, 16, 2048, 2
TOKENS = SEQ * ROWS
ROW = {
    "id": "x", "family": "gpt", "layers": "8", "hidden": "1024", "heads": "16", "kv_heads": "16",
    "ffn_hidden": "4096", "gated_mlp": "0", "vocab": "51200", "seq_len": "2048",
    "tied_embeddings": "0", "attention_flash": "0", "device": "A100-SXM4-80GB", "nodes": "1",
    "devices_per_node": "8", "nvlink_domain": "8", "n_devices": "8", "tp": "1", "pp": "1",
    "dp": "8", "zero_stage": "1", "micro_batch": "2", "global_batch": "64", "recompute": "full",
    "sequence_parallel": "0", "precision": "bf16", "framework": "megatron-deepspeed",
}  # fmt: skip
PARAMETERS = row_shape(ROW).parameters


@pytest.fixture(scope="module")
def predicted():
    graphs, predictor = RowGraphs(), Predictor()

    def run(**changes):
        row = ROW | {key: str(value) for key, value in changes.items()}
        return predictor.predict(graphs(row), read_configuration(row))

    return run


def stage(found, number=0):
    return found.evaluated.prediction.stages[number]


def layer_bytes(found, label):
    """What one layer keeps of a micro-batch."""
    evaluated = found.evaluated
    kinds, menus = evaluated.program.kinds, evaluated.pieces.menus
    layer = max(range(len(kinds)), key=lambda n: len(kinds[n].calls))
    point = next(p for p in menus[layer] if p.label == label)
    return point.saved_bytes + point.input_bytes


# what the update takes


def test_an_update_counts_whole_shards_and_buckets():
    update = Update(whole=2, shard=6, early=4, bucket_bytes=1000)
    assert update.live_bytes([300, 100], members=4) == 2 * 400 + 6 * 100 + 1000
    assert update.cached_bytes([300, 100], members=4) == 2 * 400 + 6 * 100 + 1000 + 4 * 100
    assert update.live_bytes([], members=4) == 0


def test_copies_of_the_largest_parameter_are_reused_by_what_follows():
    update = Update(shard=6, largest=8)
    assert update.live_bytes([300, 100], members=1) == 6 * 400
    assert update.live_bytes([300, 100], members=4) == 8 * 300


# state


def test_a_bf16_optimizer_keeps_bf16_gradients_beside_whole_fp32_sums(predicted):
    """2 + (2 + 4) bytes per parameter, and 12 divided by ZeRO-1; 2 more for the reduction."""
    found = stage(predicted())
    assert found.parameter_bytes == 2 * PARAMETERS
    assert found.gradient_bytes == 6 * PARAMETERS
    assert found.optimizer_bytes == pytest.approx(12 * PARAMETERS / 8, abs=8 * LAYERS * 16)


def test_gradients_that_stay_in_bf16_are_cast_and_added():
    """Per fp32 byte: half read, one written; then two read and one written."""
    wanted = read_configuration(ROW)
    cost = cost_model(wanted.cluster, wanted.mesh, wanted.traits)
    assert cost.accumulate_s(1e9, 1, 2) == memory_s(wanted.cluster.device, 4.5e9, kernels=0)


def test_fp16_gradients_are_summed_in_fp16(predicted):
    assert stage(predicted(precision="fp16")).gradient_bytes == 2 * PARAMETERS


def test_shards_in_the_parameters_dtype_stay_beside_fp32_ones(predicted):
    kept = stage(predicted(framework="internevo", zero_stage=3))
    cast = stage(predicted(framework="llm-foundry (FSDP1)", zero_stage=3))
    assert kept.parameter_bytes == pytest.approx(2 * PARAMETERS / 8, abs=8 * LAYERS * 16)
    assert cast.parameter_bytes == 0


def test_suspended_reductions_sum_whole_gradients(predicted):
    """All in bf16 but the sums: 2 and 4 bytes per parameter divided, 4 whole."""
    found = stage(predicted(framework="kempnerforge (FSDP2)", zero_stage=3))
    assert found.gradient_bytes == 4 * PARAMETERS
    assert found.optimizer_bytes == pytest.approx(4 * PARAMETERS / 8, abs=8 * LAYERS * 16)
    assert found.parameter_bytes == pytest.approx(2 * PARAMETERS / 8, abs=8 * LAYERS * 16)


# activations


def test_layers_keep_what_korthikanti_counts(predicted):
    """sbh (34 + 5 a s / h), Reducing Activation Recomputation, table 2; ours has the merged heads
    as a copy (2 sbh) and the row statistics of the softmax."""
    found = layer_bytes(predicted(recompute="none"), "none")
    per_value = 34 + 5 * HEADS * SEQ / HIDDEN
    statistics = 4 * ROWS * HEADS * SEQ
    assert found == TOKENS * HIDDEN * (per_value + 2) + statistics


def test_tensor_parallel_layers_keep_what_korthikanti_counts(predicted):
    """sbh (10 + 24 / t + 5 a s / (h t))."""
    found = layer_bytes(predicted(recompute="none", tp=4, dp=2), "none")
    per_value = 10 + (24 + 5 * HEADS * SEQ / HIDDEN) / 4
    statistics = 4 * ROWS * HEADS * SEQ // 4
    assert found == TOKENS * HIDDEN * (per_value + 2 / 4) + statistics


def test_recomputed_layers_keep_their_input_only(predicted):
    assert layer_bytes(predicted(), "full") == 2 * TOKENS * HIDDEN


def test_first_stages_hold_masks_of_the_embedding_and_outputs_on_their_way(predicted):
    """A byte and two per value, for each of the four micro-batches that are under way."""
    changes = {"pp": 4, "dp": 2, "virtual_stages": 1}
    held, plain = stage(predicted(**changes)), stage(predicted(**changes, framework="jax-pax"))
    assert held.saved_bytes - plain.saved_bytes == 4 * (1 + 2) * TOKENS * HIDDEN


def test_selective_recomputation_per_operator_keeps_every_second_product(predicted):
    """q, v, the gate and attention with its statistics, and the input; not k, out, up, down."""
    found = predicted(
        framework="torchtitan (FSDP2)", family="llama", gated_mlp=1, attention_flash=1,
        kv_heads=8, recompute="selective", zero_stage=3, compile=1,
    )  # fmt: skip
    kept = HIDDEN + HIDDEN // 2 + 4096 + HIDDEN + HIDDEN
    assert layer_bytes(found, "op") == 2 * TOKENS * kept + 4 * ROWS * HEADS * SEQ


def test_gathered_logits_are_whole_on_every_tensor_rank(predicted):
    """Four tensors of 2 bytes per logit on any tensor degree."""
    changes = {"tp": 4, "dp": 1, "n_devices": 4, "zero_stage": 0, "global_batch": 32}
    whole = stage(predicted(framework="kempnerforge (FSDP2)", **changes))
    parted = stage(predicted(framework="fms-fsdp (FSDP1)", **changes))
    assert whole.saved_bytes + whole.transient_bytes > 8 * TOKENS * 51200
    assert parted.saved_bytes + parted.transient_bytes < 4 * TOKENS * 51200


# readings


def test_readings_add_what_allocators_and_contexts_take(predicted):
    """jax-pax holds nothing beside state and activations; one axis, so no further groups."""
    row = {"framework": "jax-pax"}
    found = predicted(**row, mem_kind="allocated").peak_GiB
    assert predicted(**row, mem_kind="reserved").peak_GiB == pytest.approx(
        found * (1 + FRAGMENTATION)
    )
    whole = (found * (1 + FRAGMENTATION) * GIB + CONTEXT_BYTES) / GIB
    assert predicted(**row, mem_kind="device").peak_GiB == pytest.approx(whole)


def test_every_further_axis_has_groups(predicted):
    row = {"framework": "jax-pax", "pp": 4, "dp": 2}
    found = predicted(**row, mem_kind="allocated").peak_GiB * (1 + FRAGMENTATION)
    whole = found + (CONTEXT_BYTES + COMMUNICATORS_BYTES) / GIB
    assert predicted(**row, mem_kind="device").peak_GiB == pytest.approx(whole)


def test_updates_are_reserved_beside_activations_but_not_alive_with_them(predicted):
    state = 2 + 6 + 12 / 8
    found = predicted(mem_kind="allocated")
    kept = stage(found).saved_bytes + stage(found).transient_bytes
    copies = 2 * PARAMETERS + 10**9
    peak = (state * PARAMETERS + max(kept, copies)) / GIB
    assert found.peak_GiB == pytest.approx(peak, rel=1e-6)
    cached = (state * PARAMETERS + kept + copies) / GIB
    reserved = predicted(mem_kind="reserved").peak_GiB
    assert reserved == pytest.approx(cached * (1 + FRAGMENTATION), rel=1e-6)


def test_planned_memory_is_not_fragmented(predicted):
    found = predicted(framework="oneflow", mem_kind="allocated").peak_GiB
    whole = found + CONTEXT_BYTES / GIB
    assert predicted(framework="oneflow", mem_kind="device").peak_GiB == pytest.approx(whole)


# the table


def test_special_entries_come_before_general_ones():
    assert stack_of({"framework": "internevo", "zero_stage": "3"}) == STACKS["internevo zero 3"]
    assert stack_of({"framework": "internevo", "zero_stage": "1"}) == STACKS["internevo"]
    deepspeed = {"framework": "megatron-deepspeed", "precision": "fp16"}
    assert stack_of(deepspeed) == STACKS["megatron-deepspeed fp16"]
    february = deepspeed | {"release": "2022-02 NHEADs comparison"}
    assert stack_of(february) == STACKS["megatron-deepspeed fp16 of 2022-02"]
    first = stack_of(deepspeed | {"release": "2022-02 fp16"})
    assert first is not None and not first.blocking
    assert stack_of({"framework": "unheard of"}) is None


def test_megatron_pads_the_vocabulary():
    row = {"framework": "megatron-core", "tp": "4"}
    assert padded_vocabulary(row, 131073) == 131584 and padded_vocabulary(row, 51200) == 51200
    assert padded_vocabulary({"framework": "torchtitan (FSDP2)"}, 131073) == 131073


def test_a_compiled_loss_makes_no_fp32_logits():
    row = {"framework": "torchtitan (FSDP2)", "compile": "1"}
    assert not has_wide_logits(row) and has_wide_logits(row | {"compile": "0"})
    assert has_wide_logits(row | {"release": "Table 1"})


def test_stacks_differ_in_where_the_rest_goes():
    assert layers_per_stage(32, 6, "last") == [5, 5, 5, 5, 6, 6]
    assert layers_per_stage(32, 6) == [5, 5, 6, 6, 5, 5]
    # bigscience, chronicles-prequel.md: "78/12=6.5 - so the last stage has 1 block, while the rest
    # have 7"
    assert layers_per_stage(78, 12, "filled") == [7] * 11 + [1]
    with pytest.raises(UsageError, match="13 layers, 3 on a stage"):
        layers_per_stage(13, 6, "filled")


def test_nothing_is_held_by_default():
    assert Memory().update.cached_bytes([1000], members=1) == 0
