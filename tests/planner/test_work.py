"""Work of nodes, fused groups, and the calibrated model on them."""

import pytest
from small_models import chain

from ir.batch import flow
from ir.cluster import Cluster, Mesh
from ir.errors import UsageError
from ir.graph import Node, Ref, TensorType
from ir.lower import Degrees
from ir.spmd import lower_all
from ir.variants import variants
from planner.attention_time import attention_s
from planner.calibrated import Calibrated, Paces, cost_model
from planner.cost import CostModel, Roofline
from planner.fusion import groups
from planner.kernels import matmul_s, memory_s
from planner.pieces import whole
from planner.price import COLLECTIVES
from planner.recompute import boundary, everything
from planner.storage import storage_of
from planner.traits import Traits
from planner.work import AttentionShape, Product, Work, work_of

H100 = Cluster.parse("2x8xH100-SXM")
DEVICE = H100.device


def _bf16(*shape: int) -> TensorType:
    return TensorType(shape, "bfloat16")


def _einsum(text: str, first: TensorType, second: TensorType, result: TensorType) -> Work:
    node = Node("einsum", (text, Ref("x"), Ref("w")), (), ("y",))
    return work_of(node, [first, second], [result])


@pytest.mark.parametrize(
    ("text", "first", "second", "result", "product"),
    [
        ("aby,zy->abz", (2, 64, 32), (16, 32), (2, 64, 16), Product(1, 128, 16, 32)),
        ("abz,zy->aby", (2, 64, 16), (16, 32), (2, 64, 32), Product(1, 128, 32, 16)),
        ("abz,aby->zy", (2, 64, 16), (2, 64, 32), (16, 32), Product(1, 16, 32, 128)),
        ("bqd,bkd->bqk", (4, 8, 16), (4, 24, 16), (4, 8, 24), Product(4, 8, 24, 16)),
    ],
    ids=["forward", "input gradient", "weight gradient", "batched"],
)
def test_a_product_is_read_from_letters(text, first, second, result, product) -> None:
    work = _einsum(text, _bf16(*first), _bf16(*second), _bf16(*result))
    assert work.product == product
    assert work.flops == 2 * product.batch * product.m * product.n * product.k


def test_a_misaligned_vocabulary_is_slow_in_all_three_products() -> None:
    model = Calibrated(H100, Mesh())
    for text, first, second, result in (
        ("aby,zy->abz", (8, 1024, 4096), (50257, 4096), (8, 1024, 50257)),
        ("abz,zy->aby", (8, 1024, 50257), (50257, 4096), (8, 1024, 4096)),
        ("abz,aby->zy", (8, 1024, 50257), (8, 1024, 4096), (50257, 4096)),
    ):
        odd, even = (
            model.compute_s(_einsum(text, *(_bf16(*_padded(s, pad)) for s in shapes)))
            for pad, shapes in ((0, (first, second, result)), (47, (first, second, result)))
        )
        assert odd > 1.5 * even


def _padded(shape: tuple[int, ...], pad: int) -> tuple[int, ...]:
    return tuple(size + pad if size == 50257 else size for size in shape)


def test_attention_is_read_from_its_operands() -> None:
    q, k = _bf16(2, 8, 128, 64), _bf16(2, 2, 256, 64)
    node = Node("attention", (Ref("q"), Ref("k"), Ref("v"), None, True, 0.1), (), ("o", "l"))
    work = work_of(node, [q, k, k], [q, TensorType((2, 8, 128), "float32")])
    assert work.attention == AttentionShape(2, 8, 2, 128, 256, 64, True)
    assert Calibrated(H100, Mesh()).compute_s(work) == attention_s(
        DEVICE, batch=2, heads=8, kv_heads=2, queries=128, keys=256, head_dim=64,
        dtype="bfloat16", causal=True, kernel="unfused", pace=Paces().hopper,
    )  # fmt: skip


def test_a_lookup_reads_only_the_rows_that_it_returns() -> None:
    node = Node("embedding.default", (Ref("table"), Ref("ids")), (), ("x",))
    work = work_of(node, [_bf16(50304, 1024), TensorType((64,), "int64")], [_bf16(64, 1024)])
    assert work.touched_bytes == 2 * 64 * 1024 * 2 < work.moved_bytes


def test_products_cost_what_their_kernels_take() -> None:
    work = _einsum("ay,zy->az", _bf16(4096, 4096), _bf16(8192, 4096), _bf16(4096, 8192))
    plain = Calibrated(H100, Mesh()).compute_s(work)
    alone = matmul_s(DEVICE, 4096, 8192, 4096, "bfloat16")
    assert alone <= plain < 2 * alone  # a training step sustains less than a benchmark
    low = Calibrated(H100, Mesh(), Traits(matmul_precision="float8_e4m3fn")).compute_s(work)
    assert matmul_s(DEVICE, 4096, 8192, 4096, "float8_e4m3fn") < low < plain


def test_a_precision_that_the_device_lacks_is_named() -> None:
    work = _einsum("ay,zy->az", _bf16(4096, 4096), _bf16(4096, 4096), _bf16(4096, 4096))
    with pytest.raises(UsageError, match="no units for products in mxfp8"):
        Calibrated(H100, Mesh(), Traits(matmul_precision="mxfp8")).compute_s(work)
    with pytest.raises(UsageError, match="unknown attention 'flash9'"):
        Traits(attention="flash9")


def test_only_an_eager_host_is_waited_for() -> None:
    assert Calibrated(H100, Mesh(), Traits()).host_s(100) == 0.0
    assert Calibrated(H100, Mesh(), Traits(eager=True)).host_s(100) == pytest.approx(7e-4)


def test_the_model_of_a_cpu_is_a_roofline() -> None:
    models: list[CostModel] = [cost_model(H100, Mesh()), cost_model(Cluster.local(2), Mesh())]
    assert [type(model) for model in models] == [Calibrated, Roofline]


def test_a_zero_group_communicates_in_its_own_node() -> None:
    model = Calibrated(H100, Mesh(1, 16, 1), Traits(zero_stage=3, zero_group=8))
    near, far = (model.collective_s("all_gather", 1e9, axis) for axis in ("zero", "data"))
    assert near < far
    assert model.collective_s("all_reduce", 1e9, "replica") > 0
    whole_axis = Calibrated(H100, Mesh(1, 16, 1), Traits(zero_stage=3))
    assert whole_axis.collective_s("all_reduce", 1e9, "replica") == 0.0


def _layer():
    graph = chain(width=64, hidden=256, seq=32)
    batch_flow = flow(graph)
    kinds = variants(graph, batch_flow)
    result = whole(graph, kinds)
    lowered = lower_all(graph, batch_flow, kinds, result.shardings, Degrees(8, 1, 1, 1))
    layer = next(piece for piece, kind in zip(lowered, kinds, strict=True) if len(kind.calls) > 1)
    return layer, storage_of(layer)


def test_what_lies_between_products_is_one_group() -> None:
    layer, storage = _layer()
    found = groups(layer.forward, storage, {*layer.saved, *layer.outputs}, COLLECTIVES)
    memory = {node.outputs[0]: node.op for node in layer.forward}
    ops = [tuple(memory[name].partition(".")[0] for name in group.nodes) for group in found]
    assert any("gelu" in names and "add" in names for names in ops)
    assert len(found) <= 3  # norm; bias and gelu; bias and residual


def test_a_group_costs_its_boundary_once() -> None:
    layer, storage = _layer()
    wanted = {*layer.saved, *layer.outputs}
    fused = sum(group.moved_bytes for group in groups(layer.forward, storage, wanted, COLLECTIVES))
    alone = sum(
        storage.size_bytes.get(storage.owner[name], 0)
        for node in layer.forward if node.op != "einsum"
        for name in (*node.inputs, *node.outputs) if name in storage.owner
    )  # fmt: skip
    assert 0 < fused < alone
    model = Calibrated(H100, Mesh(), Traits(fused_elementwise=True))
    assert model.group_s(fused) == memory_s(DEVICE, fused)


def test_fused_kernels_keep_less() -> None:
    layer, storage = _layer()
    always = frozenset(n for n in layer.block.inputs if "weight" in n or "bias" in n)
    kept = boundary(layer, storage, always)
    everything_kept = everything(layer, storage, always)
    assert storage.bytes_of(kept) <= storage.bytes_of(everything_kept)
