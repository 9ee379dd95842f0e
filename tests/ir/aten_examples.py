"""More examples for the op table: the ATen operations that keep their names."""

import torch
from torch.nn import functional

from tests.ir.op_examples import EXAMPLES, GENERATOR, N, example, real, whole_numbers

__all__ = ["EXAMPLES"]

ids = whole_numbers(N, N, 5)
example("embedding.default", (real(N, N), ids, 2), 3)
example("embedding.default", (real(N, 5), whole_numbers(N, 7)), 1, name="one dim of ids")
example("embedding_dense_backward.default", (real(N, 5, N), ids, N, 2, False), 3, 1)
example("embedding_dense_backward.default", (real(N, 5, 7), ids, 5 * N, -1, False), 2, 1,
        name="more rows than ids")  # fmt: skip


def convolutions(groups: int, bias: bool, cuts: int, back_cuts: int, *, transposed: bool) -> None:
    x = real(N, N, 4, 6)
    w = real(N, N // groups, 3, 3)
    b = real(N) if bias else None
    place = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    name = f"groups={groups} bias={bias} transposed={transposed}"
    example("convolution.default", (x, w, b, *place), cuts, name=name)
    y = torch.convolution(x, w, b, *place)
    example("convolution_backward.default",
            (real(*y.shape), x, w, [N] if bias else None, *place, [True, True, bias]),
            back_cuts, 1, name=name)  # fmt: skip


convolutions(1, True, 2, 2, transposed=False)
convolutions(1, False, 2, 2, transposed=False)
convolutions(N, True, 1, 1, transposed=False)
convolutions(3, False, 1, 1, transposed=False)
convolutions(1, False, 1, 1, transposed=True)

pick = whole_numbers(N, 5)
order = torch.randperm(N, generator=GENERATOR)
example("index.Tensor", (real(N, N, N), [None, pick]), 2, 1)
example("index.Tensor", (real(N, N, N), [whole_numbers(N, N, 7)]), 3, 1, name="two dims of indices")
example("index_put.default", (real(N, N, N), [None, order // 2], real(N, N, N), True), 2, 1)
example("index_put.default", (real(N, N, N), [None, order], real(N, N, N), False), 2, 1,
        name="without adding")  # fmt: skip
example("_to_copy.default", (real(N, 5),), 1, 1, right=torch.Tensor.to, dtype=torch.float32)
example("_to_copy.default", (real(N, 5),), 1, 0, right=torch.Tensor.to, dtype=torch.bool,
        name="to bool")  # fmt: skip
pair = torch.view_as_complex(real(N, 5, 2))
example("view_as_real.default", (pair,), 1, 1)
example("view_as_complex.default", (real(N, 5, 2),), 1, 1)
example("_conj.default", (pair,), 1, 1)

cube, half = real(N, N, N), real(N, 6, N)
example("slice.Tensor", (cube, 1, 0, 6), 2, 1)
example("slice.Tensor", (cube, -1, 0, 2**63 - 1, 2), 2, 1, name="last dim, by steps")
example("slice.Tensor", (cube, 1, -6, 2**63 - 1), 2, 1, name="from the end")
example("slice_backward.default", (half, [N, N, N], 1, 1, 7, 1), 2, 1)
example("select.int", (cube, 1, -1), 2, 1)
example("select_backward.default", (real(N, N), [N, N, N], 1, 2), 2, 1)
example("select_scatter.default", (cube, real(N, N), 1, 2), 2, 1)
example("slice_scatter.default", (cube, half, 1, 1, 7), 2, 1)
example("cat.default", ([cube, half], 1), 2)
example("constant_pad_nd.default", (real(N, N), [6, 6], 0.5), 1)
example("constant_pad_nd.default", (cube, [0, 0, 6, -6]), 1, name="two dims")
for op in ("_softmax.default", "_log_softmax.default"):
    example(op, (real(N, N), 1, False), 1)
    example(op.replace(".", "_backward_data."), (real(N, N), real(N, N), -1, torch.float64), 1, 1)
example("cumsum.default", (cube, 1), 2, 1)
for op in ("amax.default", "amin.default"):
    example(op, (cube, [1]), 2)
    example(op, (cube, [-2], True), 2, name="keep")
    example(op, (cube, [0, 2]), 1, name="two dims")
example("max.dim", (cube, 1), 2)
example("min.dim", (cube, -1, True), 2)
example("argmax.default", (cube, 1), 2)
for op in ("amax.default", "argmax.default"):
    example(op, (cube,), 0, name="all dims")
example("linalg_vector_norm.default", (cube, 2, [1], True), 2)
example("linalg_vector_norm.default", (cube,), 0, name="all dims")
example("logsumexp.default", (cube, [1], True), 2)
example("flip.default", (cube, [1]), 2, 1)
example("tril.default", (cube,), 1, 1)
example("triu.default", (cube, 1), 1, 1)
example("roll.default", (cube, [1], [0]), 2, 1)
example("logcumsumexp.default", (cube, 1), 0, name="unknown to the table")
for op in ("sort.default", "cumprod.default", "prod.dim_int", "any.dim", "all.dim", "median.dim"):
    example(op, (cube, 1), 2)
example("topk.default", (cube, 3, -1), 2)
for op in ("any.default", "all.default", "max.default", "min.default"):
    example(op, (cube,), 0)
spots = whole_numbers(N, N, N, N)
example("gather.default", (cube, 1, spots), 2, 1)
example("gather.default", (cube, 1, whole_numbers(N, N, 5, N)), 2, 1, name="fewer places")
example("gather.default", (cube, 1, whole_numbers(N, 6, 5, N)), 0, name="of some rows only")
example("scatter.src", (cube, -1, torch.sort(real(N, N, N), -1)[1], real(N, N, N)), 2)
example("scatter.value", (cube, 0, spots, 0.5), 2)
example("scatter_add.default", (cube, 1, spots, real(N, N, N)), 2, 1)

grid = real(N, 5, N)
SMOOTH = (grid, real(N, 5, N))
example("add.Tensor", (grid, real(N)), 2, 1, name="broadcast a row")
example("add.Tensor", (grid, real(N, 1, 1)), 2, 1, name="broadcast a column")
example("add.Tensor", (grid, 2.5), 2, 0, name="a number")
example("sub.Tensor", SMOOTH, 2, 1, alpha=2.0)
example("mul.Tensor", (grid, real(1)), 2, 2, name="one element")
example("mul.Tensor", (real(1, 5, N), real(N, 5, 1)), 2, 2, name="outer product")
example("div.Tensor", SMOOTH, 2, 1)
example("where.self", (whole_numbers(2, N).bool(), *SMOOTH), 2, 1)
for op in ("mul.Scalar", "div.Scalar"):
    example(op, (grid, 3.0), 2, 1)
example("neg.default", (grid,), 2, 1)
for op in ("gelu_backward.default", "silu_backward.default", "tanh_backward.default",
           "sigmoid_backward.default"):  # fmt: skip
    example(op, SMOOTH, 2, 1)
example("gelu_backward.default", SMOOTH, 2, 1, approximate="tanh", name="tanh")
example("threshold_backward.default", (*SMOOTH, 0.25), 2, 1)
for op in ("exp.default", "gelu.default", "rsqrt.default", "relu.default", "bitwise_not.default"):
    example(op, (grid > 0 if op.startswith("bit") else grid.abs(),), 2)
for op in ("pow.Tensor_Scalar", "gt.Scalar", "leaky_relu.default", "hardtanh.default"):
    example(op, (grid, 2), 2)
for op in ("maximum.default", "eq.Tensor", "ge.Tensor", "pow.Tensor_Tensor", "atan2.default"):
    example(op, (grid.abs(), real(N)), 2)
example("masked_fill.Scalar", (grid, whole_numbers(2, 5, N).bool(), 0.5), 2)
example("masked_fill.Tensor", (grid, whole_numbers(2, 5, N).bool(), real()), 2)
example("huber_loss.default", (*SMOOTH, 0, 0.5), 2)
example("smooth_l1_loss.default", (*SMOOTH, 0, 0.5), 2)
example("clamp.default", (grid, -0.5, None), 2)



def windows(name: str, forward: tuple, backward: tuple, partials: int) -> None:
    """Pooling and padding: rows and channels may be cut."""
    example(f"{name}.default", forward, 2, partials)
    example(f"{name}_backward.default", backward, 2, 1)


image, volume = real(N, N, 6, 4), real(N, N, 4, 4, 4)
pooled, places = torch.ops.aten.max_pool2d_with_indices.default(image, [2, 2])
windows("max_pool2d_with_indices", (image, [2, 2]),
        (pooled, image, [2, 2], [2, 2], [0, 0], [1, 1], False, places), 0)  # fmt: skip
pooled, places = torch.ops.aten.max_pool3d_with_indices.default(volume, [2, 2, 2])
windows("max_pool3d_with_indices", (volume, [2, 2, 2]),
        (pooled, volume, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, places), 0)  # fmt: skip
for dims, x in (("2d", image), ("3d", volume)):
    count = x.dim() - 2
    half, two = real(N, N, *(size // 2 for size in x.shape[2:])), [2] * count
    windows(f"avg_pool{dims}", (x, two),
            (half, x, two, two, [0] * count, False, True, None), 1)  # fmt: skip
    windows(f"_adaptive_avg_pool{dims}", (x, list(half.shape[2:])), (half, x), 1)
    most, at = getattr(torch.ops.aten, f"adaptive_max_pool{dims}").default(x, [2] * count)
    windows(f"adaptive_max_pool{dims}", (x, [2] * count), (real(*most.shape), x, at), 0)
    strides = ([2] * 3, [0] * 3) if count == 3 else ()
    example(f"max_unpool{dims}.default", (most, at, list(x.shape[2:]), *strides), 2, 1)
for dims, x in (("1d", real(N, N, 6)), ("2d", image), ("3d", volume)):
    for name in ("reflection_pad", "replication_pad"):
        edges = [1, 2] + [1, 0] * (x.dim() - 3)
        padded = functional.pad(x, edges)
        windows(f"{name}{dims}", (x, edges), (torch.randn_like(padded), x, edges), 1)

window = ([2, 2], [1, 1], [0, 0], [2, 2])
columns = functional.unfold(image, 2, stride=2)
example("im2col.default", (image, *window), 1, 1)
example("col2im.default", (columns, [6, 4], *window), 1, 1)
for dims, x, places in (("2d", image, real(N, 5, 3, 2)), ("3d", volume, real(N, 5, 3, 2, 3))):
    seen = functional.grid_sample(x, places.tanh(), align_corners=True)
    example(f"grid_sampler_{dims}.default", (x, places.tanh(), 0, 0, True), 2, 1)
    back = (torch.randn_like(seen), x, places.tanh(), 0, 0, True)
    example(f"grid_sampler_{dims}_backward.default", (*back, [True, True]), 2, 1)
    example(f"grid_sampler_{dims}_backward.default", (*back, [False, True]), 2, 1, name="grid only")

points = real(N, N, 5), real(N, N, 5)
example("_cdist_forward.default", (*points, 2.0, None), 3)
example("_cdist_forward.default", (points[0], real(N, 5), 1.0, None), 3, name="to the same points")
away = torch.cdist(*points)
example("_cdist_backward.default", (torch.randn_like(away), *points, 2.0, away), 3, 1)
