"""What stacks and devices do differently, each mechanism by numbers worked out by hand."""

from collections import Counter
from dataclasses import replace

import pytest

from ir.cluster import Cluster, Mesh
from ir.device import find_device, inner_link
from planner.attention_time import attention_s
from planner.calibrated import PACES, WAITED_OP_S, Calibrated
from planner.collectives import fastest
from planner.exchange import BUCKET_BYTES, Load, exchange
from planner.fusion import groups, library_members
from planner.kernels import matmul_s, memory_s
from planner.links import axis_groups
from planner.logits import logit_products
from planner.predict import Predictor
from planner.price import COLLECTIVES, Seconds
from planner.quantise import quantise_bytes
from planner.rows import read_configuration
from planner.sends import crossing_s
from planner.stacks import least_recompute, padded_vocabulary, traits_of
from planner.tiles import last_wave, waves
from planner.traits import Traits
from planner.work import Product, Work
from prediction import RowGraphs

H100 = Cluster.parse("8xH100-SXM")
NODES = Cluster.parse("4x8xA100-80GB")
ROW = {
    "family": "gpt", "layers": "4", "hidden": "1024", "heads": "16", "ffn_hidden": "4096",
    "vocab": "50000", "seq_len": "2048", "tied_embeddings": "1", "device": "A100-SXM4-80GB",
    "devices_per_node": "8", "nvlink_domain": "8", "n_devices": "8", "tp": "2", "pp": "2",
    "dp": "2", "zero_stage": "1", "micro_batch": "2", "global_batch": "16", "recompute": "none",
    "sequence_parallel": "0", "precision": "bf16", "framework": "megatron-deepspeed",
}  # fmt: skip


@pytest.fixture(scope="module")
def found():
    """A pipelined row of Megatron-DeepSpeed, predicted."""
    return Predictor().predict(RowGraphs()(ROW), read_configuration(ROW))


def test_megatron_pads_the_vocabulary_to_128_per_rank() -> None:
    row = {"framework": "megatron-deepspeed", "tp": "8"}
    assert padded_vocabulary(row, 250000) == 245 * 1024
    assert padded_vocabulary(row | {"tp": "1"}, 50257) == 50304
    assert padded_vocabulary({"framework": "torchtitan (FSDP2)", "tp": "8"}, 50257) == 50257


def test_only_the_logits_keep_16_bits(found) -> None:
    kept = [logit_products(lowered) for lowered in found.evaluated.pieces.lowered]
    assert sorted(map(len, kept)) == [0, 0, 3]
    model = Calibrated(H100, Mesh(), Traits(matmul_precision="float8_e4m3fn"))
    work = Work("matmul", 0.0, 0.0, "bfloat16", Product(1, 8192, 8192, 8192))
    device, pace = H100.device, PACES.hopper
    logits_s = model.compute_s(replace(work, keeps_precision=True))
    assert logits_s == pytest.approx(matmul_s(device, 8192, 8192, 8192, "bfloat16") / pace)
    assert model.compute_s(work) < 0.75 * logits_s


@pytest.mark.parametrize(
    ("scaling", "fused", "per_element"),
    [("delayed", True, 1.0), ("delayed", False, 2.0), ("tensorwise", True, 3.0),
     ("rowwise", True, 4.0), ("block", True, 2.0)],
)  # fmt: skip
def test_operands_are_scaled_by_recipe(scaling: str, fused: bool, per_element: float) -> None:
    assert quantise_bytes(scaling, 1e6, fused=fused) == per_element * 1e6


def test_rows_name_their_recipe_and_blocks_come_with_the_precision() -> None:
    device = H100.device
    row = {"framework": "torchtitan (FSDP2)", "precision": "fp8"}
    assert traits_of(row, device).scaling == "tensorwise"
    assert traits_of(row | {"release": "float8 rowwise, bf16"}, device).scaling == "rowwise"
    assert traits_of(row | {"framework": "megatron-core"}, device).scaling == "delayed"
    blackwell = find_device("GB200")
    assert traits_of(row | {"precision": "mxfp8"}, blackwell).scaling == "block"


def test_dynamic_scales_cost_passes_over_the_operands() -> None:
    work = Work("matmul", 0.0, 0.0, "bfloat16", Product(1, 8192, 4096, 4096))
    seconds = [
        Calibrated(H100, Mesh(), Traits(
            matmul_precision="float8_e4m3fn", scaling=scaling, fused_elementwise=True,
        )).compute_s(work)
        for scaling in ("delayed", "tensorwise")
    ]  # fmt: skip
    elements = 8192 * 4096 + 4096 * 4096
    more_s = memory_s(H100.device, 2 * elements, kernels=0)
    assert seconds[1] - seconds[0] == pytest.approx(more_s)


def test_a_broadcast_moves_the_whole_tensor_past_every_rank() -> None:
    lying = axis_groups(NODES, Mesh(1, 32, 1), "data")
    curve = fastest(lying, "broadcast", 1e10)
    assert (curve.algorithm, curve.protocol) == ("ring", "Simple")
    assert curve.s_per_byte == pytest.approx(1 / lying.ring_bytes_per_s)
    gather = fastest(lying, "all_gather", 1e10)
    assert gather.s_per_byte == pytest.approx(31 / 32 * curve.s_per_byte)


def test_owners_of_whole_tensors_broadcast_them_one_by_one() -> None:
    model = Calibrated(NODES, Mesh(1, 32, 1), Traits(zero_stage=1, whole_tensors=True))
    load = Load(1e9, 1e9, 10, 1.0, 2.0, tensors=20)
    reduced_s = 10 * model.collective_s("all_reduce", 1e8, "data")
    sent_s = 20 * model.collective_s("broadcast", 5e7, "zero")
    assert exchange(load, model).step_s == pytest.approx(reduced_s + sent_s)


def test_gradients_that_are_not_combined_are_reduced_tensor_by_tensor() -> None:
    load = Load(4.0 * BUCKET_BYTES, 0.0, 4, 1.0, 0.0, tensors=100)
    seconds = []
    for combines in (True, False):
        traits = Traits(overlap_gradients=True, combines_gradients=combines)
        model = Calibrated(NODES, Mesh(1, 32, 1), traits)
        pieces = 4 if combines else 100
        each_s = model.collective_s("all_reduce", load.gradient_bytes / pieces, "data")
        seconds.append(exchange(load, model).step_s)
        assert seconds[-1] == pytest.approx(pieces * each_s)
    assert seconds[1] > 2 * seconds[0]


def test_tensor_ranks_share_what_they_send(found) -> None:
    program, mesh = found.evaluated.program, Mesh(2, 2, 2)
    cluster = Cluster.parse("8xA100-80GB")
    message = program.messages[0]
    size = 2 * 2048 * 1024 * 2
    assert message.type.bytes(1) == size
    whole = Calibrated(cluster, mesh, Traits())
    shared = Calibrated(cluster, mesh, Traits(scatters_sends=True))
    assert crossing_s(program, message.value, whole, whole.send_s) == whole.send_s(size)
    expected_s = shared.send_s(size / 2) + shared.collective_s("all_gather", size, "tensor")
    assert crossing_s(program, message.value, shared, shared.send_s) == expected_s


def test_hand_written_norms_read_what_the_residual_wrote(found) -> None:
    pieces = found.evaluated.pieces
    lowered, storage = next(
        (block, stored) for block, stored in zip(pieces.lowered, pieces.storages, strict=True)
        if block.block.name == "layers"
    )  # fmt: skip

    def moved(across: bool) -> int:
        found = groups(lowered.forward, storage, lowered.outputs, COLLECTIVES, across)
        return sum(group.moved_bytes for group in found)

    assert moved(False) - moved(True) == 2 * 2048 * 1024 * 2


def test_library_kernels_hold_a_norm_and_a_splits_gradients(found) -> None:
    lowered = next(
        block for block in found.evaluated.pieces.lowered if block.block.name == "layers"
    )
    ops = {node.outputs[0]: node.op for node in (*lowered.forward, *lowered.backward)}

    def counts(nodes) -> dict[str, int]:
        return Counter(ops[name] for name in library_members(nodes))

    assert counts(lowered.forward) == {"normalize": 2, "mul.Tensor": 2, "add.Tensor": 2}
    assert counts(lowered.backward) == {
        "normalize_backward": 2, "mul.Tensor": 4, "sum": 2, "select_backward.default": 3,
        "add.Tensor": 2,
    }  # fmt: skip


def test_clipping_and_a_scaled_loss_pass_over_wide_gradients() -> None:
    def gigabytes(**traits: bool) -> float:
        model = Calibrated(NODES, Mesh(), Traits(master_weights=True, **traits))
        rate = NODES.device.sustained_bandwidth_bytes_per_s
        return model.optimizer_s(2e9, 12e9) * rate / 1e9

    assert gigabytes() == pytest.approx(30)
    assert gigabytes(clips=True) == pytest.approx(30 + 3 * 4)
    assert gigabytes(clips=True, scales_loss=True) == pytest.approx(30 + 3 * 4 + 4.5 * 4)


def test_products_that_add_to_the_sum_save_a_pass() -> None:
    seconds = [
        Calibrated(NODES, Mesh(), Traits(fused_accumulation=fused)).accumulate_s(9e9, 1, 2)
        for fused in (False, True)
    ]
    assert seconds[0] / seconds[1] == pytest.approx(3 / 2)


def test_gradients_of_fp16_stay_in_fp16() -> None:
    row = {"framework": "megatron-deepspeed", "precision": "bf16"}
    assert traits_of(row, NODES.device).gradient_dtype == "float32"
    half = traits_of(row | {"precision": "fp16"}, NODES.device)
    assert half.gradient_dtype == "" and half.scales_loss


def test_last_waves_are_whole_before_hopper() -> None:
    assert last_wave(NODES.device) == 1.0 and waves(120, 108, 1.0) == 2.0
    assert last_wave(H100.device) < 1.0


def test_clocks_follow_the_cube_root_of_the_power_limit() -> None:
    assert find_device("H100-SXM").power_pace == pytest.approx(1.0)
    assert find_device("H100-96GB").power_pace == pytest.approx((500 / 700) ** (1 / 3))
    assert find_device("GB300").power_pace == pytest.approx((1400 / 1200) ** (1 / 3))
    assert find_device("A100-80GB").power_pace == 1.0


def test_flash1_is_as_much_slower_on_hopper_as_on_ampere() -> None:
    def seconds(name: str, kernel: str) -> float:
        return attention_s(
            find_device(name), batch=1, heads=32, kv_heads=32, queries=16384, keys=16384,
            head_dim=128, dtype="bfloat16", causal=True, backward=False, kernel=kernel,
        )  # fmt: skip

    ampere = seconds("A100-80GB", "flash1") / seconds("A100-80GB", "flash2")
    hopper = seconds("H100-SXM", "flash1") / seconds("H100-SXM", "flash2")
    assert hopper > 1.4 and hopper == pytest.approx(ampere, rel=0.1)


def test_boards_without_a_switch_have_a_link_to_each_neighbour() -> None:
    assert inner_link("V100-SXM2-16GB", 8).point_to_point
    assert not inner_link("A100-80GB", 8).point_to_point
    cluster = Cluster.parse("8xV100-16GB")
    pair, all_eight = (axis_groups(cluster, Mesh(1, 8 // t, t), "tensor") for t in (2, 8))
    assert all_eight.ring_bytes_per_s == pytest.approx(7 * pair.ring_bytes_per_s)


def test_a_host_that_waits_for_every_kernel_adds_its_time() -> None:
    work = Seconds(1e-3, 2e-3, 100.0)
    plain = Calibrated(NODES, Mesh(), Traits(eager=True))
    waits = Calibrated(NODES, Mesh(), Traits(eager=True, blocking=True))
    assert work.launched(plain) == work
    assert Seconds(0.0, 0.0, 100.0).launched(plain).total_s == pytest.approx(100 * 7e-6)
    assert work.launched(waits).total_s == pytest.approx(3e-3 + 100 * WAITED_OP_S)


def test_scanned_layers_recompute_at_least_core_attention() -> None:
    assert least_recompute({"framework": "jax-pax +TE"}) == "selective"
    assert least_recompute({"framework": "megatron-core"}) == "none"
