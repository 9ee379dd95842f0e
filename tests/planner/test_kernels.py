"""Times of single kernels: limits, quantisation, agreement with published measurements, speed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from time import process_time

import pytest

from ir.cluster import Cluster
from ir.device import Device, find_device
from ir.errors import UsageError
from planner.attention_time import KERNELS, attention_s, flash_kernel
from planner.kernels import launch_bound_s, matmul_s, memory_s
from planner.tiles import legal_tiles, waves

DEVICES = [find_device(name) for name in "V100 A100 H100 H200 B200 GB200 MI300X RTX-4090".split()]
A100, H100, B200 = find_device("A100"), find_device("H100"), find_device("B200")
CPU = Cluster.local(1, memory_GiB=4).device

by_device = pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)


def attention(device: Device, **changes: object) -> float:
    """Llama-like: 2 x 32 heads of 128, 8 of them for keys, 4096 tokens, causal."""
    shape: dict[str, object] = {"batch": 2, "heads": 32, "kv_heads": 8, "head_dim": 128}
    shape |= {"queries": 4096, "keys": 4096, "dtype": "bfloat16", "causal": True}
    return attention_s(device, **(shape | changes))  # type: ignore[arg-type]


@by_device
def test_a_device_knows_its_limits(device: Device) -> None:
    assert device.sm_count >= 80
    assert 1e9 < device.clock_hz < 3e9
    assert device.l2_bytes >= 6 * 2**20
    assert device.l2_bandwidth_bytes_per_s > device.memory_bandwidth_bytes_per_s
    assert device.shared_memory_per_block_bytes <= device.shared_memory_per_sm_bytes
    assert device.registers_per_sm >= 65536


@by_device
@pytest.mark.parametrize("size", [64, 1000, 4096, 16384])
def test_no_product_beats_what_the_device_sustains(device: Device, size: int) -> None:
    flops_per_s = 2 * size**3 / matmul_s(device, size, size, size, "float16")
    assert flops_per_s < device.peak_flops_per_s("float16") * device.matmul_fraction


@by_device
def test_a_large_product_comes_near_what_the_device_sustains(device: Device) -> None:
    flops_per_s = 2 * 16384.0**3 / matmul_s(device, 16384, 16384, 16384, "float16")
    assert flops_per_s > 0.9 * device.peak_flops_per_s("float16") * device.matmul_fraction


@by_device
@pytest.mark.parametrize("grow", ["m", "n", "k", "batch"])
def test_more_work_never_takes_less_time(device: Device, grow: str) -> None:
    shape = {"m": 768, "n": 768, "k": 768, "batch": 1}
    sizes = range(1, 40) if grow == "batch" else range(64, 6000, 64)
    seconds = [matmul_s(device, dtype="float16", **{**shape, grow: size}) for size in sizes]
    assert all(a <= b for a, b in pairwise(seconds))


def test_a_second_wave_costs_what_98_and_120_tiles_say() -> None:
    assert waves(98, 108) == waves(1, 108) == waves(108, 108) == 1
    assert 120 / 108 < waves(120, 108) < 2
    assert waves(216, 108) == 2


def test_a_product_just_over_a_wave_is_less_efficient() -> None:
    one_wave, two_waves = (
        2 * n * n * 4096 / matmul_s(A100, n, n, 4096, "bfloat16") for n in (1792, 1800)
    )
    assert two_waves < 0.95 * one_wave


def test_rows_that_are_no_multiple_of_16_bytes_are_slow() -> None:
    padded, odd = (matmul_s(A100, 8192, n, 768, "bfloat16") for n in (50304, 50257))
    assert odd > 1.5 * padded


def test_tiles_spill_neither_registers_nor_shared_memory() -> None:
    largest = {d.name: max(t.rows * t.columns for t in legal_tiles(d, 2, 1e14)) for d in DEVICES}
    assert largest["A100-80GB"] == largest["H100-SXM"] == 256 * 128
    assert largest["B200"] == largest["MI300X"] == 256 * 256


def test_small_tiles_starve_on_hopper_but_not_on_ampere() -> None:
    def efficiency(device: Device, rows: int) -> float:
        rate = device.peak_flops_per_s("bfloat16") * device.matmul_fraction
        tile = next(t for t in legal_tiles(device, 2, rate) if t.rows == t.columns == rows)
        return 2 * rows * rows / (rate / device.sm_count) / tile.step_s

    assert efficiency(A100, 128) == pytest.approx(1)
    assert efficiency(H100, 64) < efficiency(A100, 64)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "tflops"),
    [  # best of the published sweeps in stas00/ml-engineering
        ("A100", "bfloat16", (1024, 10240, 5120), 271.2),
        ("A100-PCIe", "bfloat16", (2048, 5120, 6144), 252.9),
        ("H100", "bfloat16", (2048, 2048, 13312), 794.5),
        ("H200", "float8_e4m3fn", (1280, 4096, 12032), 1453.4),
        ("B200", "bfloat16", (1792, 16128, 3072), 1745.0),
        ("GB200", "bfloat16", (4096, 9728, 2048), 1822.0),
        ("MI300X", "bfloat16", (10240, 15360, 8192), 668.4),
    ],
)
def test_the_best_published_products_are_predicted(
    name: str, dtype: str, shape: tuple[int, int, int], tflops: float
) -> None:
    m, n, k = shape
    predicted = 2 * m * n * k / matmul_s(find_device(name), m, n, k, dtype) / 1e12
    assert predicted == pytest.approx(tflops, rel=0.15)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "measured_us"),
    [  # OpenXLA matmul_interpolator_data: few and many waves, short and long k
        ("H100", "bfloat16", (1, 4096, 4096, 4096), 176.2),
        ("H100", "bfloat16", (1, 1024, 1024, 4096), 18.2),
        ("H100", "bfloat16", (4, 4096, 4096, 256), 68.0),
        ("B200", "bfloat16", (1, 4096, 4096, 1024), 31.9),
        ("B200", "float8_e4m3fn", (4, 4096, 4096, 4096), 167.6),
    ],
)
def test_products_of_all_shapes_are_predicted(
    name: str, dtype: str, shape: tuple[int, int, int, int], measured_us: float
) -> None:
    device = replace(find_device(name), kernel_fixed_s=4.4e-6)  # as measured there
    batch, m, n, k = shape
    predicted_us = matmul_s(device, m, n, k, dtype, batch) * 1e6
    assert predicted_us == pytest.approx(measured_us, rel=0.15)


def test_a_product_that_only_reads_weights_is_bound_by_memory() -> None:
    seconds = matmul_s(H100, 16, 16384, 16384, "bfloat16")
    read_s = 2 * 16384**2 / H100.sustained_bandwidth_bytes_per_s
    assert seconds == pytest.approx(read_s, rel=0.15)


def test_lower_precisions_are_faster_where_they_exist() -> None:
    names = ["float32", "bfloat16", "mxfp8", "nvfp4"]
    seconds = [matmul_s(B200, 8192, 8192, 8192, name) for name in names]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[2] == pytest.approx(seconds[1] / 2, rel=0.1)
    with pytest.raises(UsageError, match=r"A100-80GB has no units for products in float8_e4m3fn"):
        matmul_s(A100, 1024, 1024, 1024, "float8_e4m3fn")


def test_nothing_to_multiply_takes_no_time_and_little_takes_a_kernel() -> None:
    assert matmul_s(H100, 0, 1024, 1024, "bfloat16") == 0.0
    assert H100.kernel_fixed_s < matmul_s(H100, 8, 8, 8, "bfloat16") < 2 * H100.kernel_fixed_s


def test_a_device_without_known_units_has_rates_only() -> None:
    assert matmul_s(CPU, 512, 512, 512, "float32") == pytest.approx(2 * 512**3 / 40e9, rel=0.01)
    assert attention(CPU, dtype="float32") > 0


def test_memory_bound_kernels_ramp_up_to_the_reachable_rate() -> None:
    rates = [size / memory_s(H100, size) for size in (1e5, 1e6, 1e7, 1e8, 1e9)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(3350e9 * 0.90, rel=0.01)
    assert rates[1] < 0.2 * rates[-1]
    assert memory_s(H100, 1e6, kernels=4) > 3 * H100.kernel_fixed_s


def test_the_host_bounds_many_small_kernels() -> None:
    assert launch_bound_s(1000, H100) == pytest.approx(7e-3)
    assert launch_bound_s(1000, H100, 0.0) == pytest.approx(1000 * H100.kernel_fixed_s)


@by_device
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("backward", [False, True])
def test_no_attention_beats_the_peak(device: Device, kernel: str, backward: bool) -> None:
    for queries in (128, 2048, 16384):
        shape = {"queries": queries, "keys": queries, "kernel": kernel, "backward": backward}
        seconds = attention(device, dtype="float16", **shape)
        flops = 2 * 32 * queries**2 / 2 * 128 * (10 if backward else 4)
        assert flops / seconds < device.peak_flops_per_s("float16")


@pytest.mark.parametrize(
    ("name", "kernel", "shape", "tflops"),
    [  # batch, heads, tokens, head_dim, causal, backward; tables in arXiv 2407.08608 and 2307.08691
        ("H100", "flash3", (4, 16, 4096, 128, False, False), 638),
        ("H100", "flash3", (16, 32, 1024, 64, False, True), 363),
        ("H100", "flash3", (8, 16, 2048, 128, True, False), 521),
        ("H100", "flash2", (16, 16, 1024, 128, False, True), 260),
        ("H100", "flash2", (2, 32, 8192, 64, True, False), 295),
        # NVIDIA/cudnn-frontend, benchmark results of 2026
        ("A100-PCIe", "flash2", (2, 64, 4096, 128, True, False), 204),
        ("A100-PCIe", "flash2", (2, 64, 8192, 128, False, True), 178),
        ("H200", "cudnn", (2, 64, 4096, 128, True, True), 495),
        ("GB200", "cudnn", (2, 64, 8192, 128, True, False), 1552),
        ("GB200", "cudnn", (2, 64, 2048, 128, False, True), 1114),
    ],
)
def test_published_attention_is_predicted(
    name: str, kernel: str, shape: tuple[int, int, int, int, bool, bool], tflops: float
) -> None:
    batch, heads, tokens, head_dim, causal, backward = shape
    seconds = attention(
        find_device(name),
        batch=batch,
        heads=heads,
        kv_heads=heads,
        queries=tokens,
        keys=tokens,
        head_dim=head_dim,
        causal=causal,
        backward=backward,
        kernel=kernel,
    )
    flops = batch * heads * tokens**2 * head_dim * (10 if backward else 4) / (1 + causal)
    assert flops / seconds / 1e12 == pytest.approx(tflops, rel=0.12)


@pytest.mark.parametrize("device", DEVICES[1:], ids=lambda device: device.name)
def test_newer_attention_kernels_are_faster(device: Device) -> None:
    for backward in (False, True):
        unfused, compiled, fused_softmax, flash1, *flash = (
            attention(device, kernel=kernel, backward=backward) for kernel in KERNELS
        )
        assert unfused > compiled > fused_softmax > max(flash)
        assert flash1 >= flash[0]
        assert flash == sorted(flash, reverse=True) or device.arch in ("Hopper", "Blackwell")


def test_the_usual_kernel_follows_the_generation() -> None:
    kernels = [flash_kernel(find_device(name)) for name in "V100 A100 H100 B200 MI300X".split()]
    assert kernels == ["fused_softmax", "flash2", "flash3", "cudnn", "flash2"]


def test_causal_attention_saves_almost_half_and_unfused_nothing() -> None:
    def ratio(kernel: str) -> float:
        return attention(H100, kernel=kernel) / attention(H100, kernel=kernel, causal=False)

    assert 0.5 < ratio("flash3") < 0.58
    assert ratio("unfused") == 1


def test_products_of_unfused_attention_go_at_the_pace_of_products() -> None:
    full, half = (attention(A100, kernel="fused_softmax", pace=pace) for pace in (1.0, 0.5))
    assert full < half < 2 * full  # the passes over the scores are no products
    assert attention(A100, kernel="flash2", pace=0.5) == attention(A100, kernel="flash2")


def test_a_window_of_queries_sees_the_keys_before_it() -> None:
    assert attention(H100, queries=128, kernel="flash2") > 0.9 * attention(
        H100, queries=128, kernel="flash2", causal=False
    )


def test_dropout_reads_the_scores_again_unless_fused() -> None:
    assert attention(A100, kernel="unfused", dropout=True) > attention(A100, kernel="unfused")
    assert attention(A100, dropout=True) == attention(A100)


def test_an_unknown_attention_kernel_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="unknown attention kernel 'flash9'; known: unfused"):
        attention(H100, kernel="flash9")


@pytest.mark.parametrize(
    "call",
    [
        lambda size: matmul_s(H100, size, size + 8, 2 * size, "bfloat16"),
        lambda size: attention(H100, queries=size, keys=size, kernel="flash3"),
    ],
    ids=["matmul", "attention"],
)
def test_a_price_takes_microseconds(call: Callable[[int], float]) -> None:
    call(999)
    seconds = []
    for first in range(1000, 2000, 100):  # the quickest of ten runs: others may use the machine
        start = process_time()
        for size in range(first, first + 100):
            call(size)
        seconds.append(process_time() - start)
    assert min(seconds) / 100 < 50e-6
