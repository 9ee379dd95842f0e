"""What is measured is like a program's: cold where its values are, and warm before it counts."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from runtime import kernel_calls as measured
from runtime.kernel_calls import COLD_BYTES, MOST_TURNS, Sizes, kernel_calls

FEW = Sizes((512, 2**22), queries=(8,), head_dims=(4,))


def test_results_leave_the_caches_before_their_memory_is_used_again() -> None:
    for call in kernel_calls(FEW, torch.device("cpu")):
        if call.name in measured.KERNELS:
            assert call.warm_up <= MOST_TURNS + 1
        if call.name == "elementwise" and call.size == 2**22:
            assert (call.warm_up - 1) * call.size / 3 > 0.8 * COLD_BYTES


def test_results_live_for_as_many_calls_as_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(size_bytes: int, device: torch.device) -> Callable[[], Any]:
        def run() -> torch.Tensor:
            x = torch.ones(size_bytes // 8)
            made.append(x.data_ptr())
            return x

        return run

    monkeypatch.setitem(measured.KERNELS, "elementwise", make)
    call = next(c for c in kernel_calls(FEW, torch.device("cpu")) if c.name == "elementwise")
    made.clear()
    turns = call.warm_up - 1
    for _ in range(turns):
        call.run()
    assert len(set(made)) == turns


@pytest.mark.parametrize("name", ["elementwise", "cat"])
def test_saved_operands_take_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def turns(x: torch.Tensor) -> Iterator[torch.Tensor]:
        while True:
            seen.append(len(seen))
            yield x

    monkeypatch.setattr(measured, "_cold", turns)
    run = measured.KERNELS[name](4096, torch.device("cpu"))
    for _ in range(5):
        run()
    assert len(seen) == 5
