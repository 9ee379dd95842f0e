"""The collector's pause: nothing is looked through during it, nor because of it afterwards."""

import gc
import weakref

from ir.collector import paused_collector


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_no_collection_during_a_pause_nor_of_all_that_was_made_at_its_end():
    looked_at: list[int] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            looked_at.append(len(gc.get_objects(generation=0)))

    gc.callbacks.append(note)
    try:
        with paused_collector():
            made = [[number] for number in range(100_000)]
            assert not looked_at
        later = [[number] for number in range(5_000)]
    finally:
        gc.callbacks.remove(note)
    assert len(made) + len(later) == 105_000
    assert looked_at, "5,000 objects more are reason enough for a collection"
    assert max(looked_at) < 50_000


def test_cycles_of_a_pause_are_freed_by_a_full_collection():
    with paused_collector():
        gone = weakref.ref(_Cycle())
    assert gone() is not None
    gc.collect()
    assert gone() is None


def test_a_pause_within_a_pause_does_not_end_it():
    with paused_collector():
        with paused_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
