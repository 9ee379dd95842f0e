"""What `plan` decides, and what it refuses."""

import json
import re
from itertools import count
from time import monotonic
from typing import Any

import pytest
from small_models import chain, products, whole
from test_bounds import with_usable

from ir.cluster import Cluster, Mesh
from ir.errors import Refused, UsageError
from ir.graph import Graph
from ir.plan import Plan, spmd
from planner import plan
from planner.attempts import Attempt, Attempts
from planner.pins import Candidate

LOCAL = Cluster.local(4, memory_GiB=1)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return chain()


@pytest.fixture(scope="module")
def found(graph: Graph) -> Plan:
    return plan(graph, LOCAL, global_batch=8)


def test_the_same_request_gives_the_same_plan(graph: Graph, found: Plan) -> None:
    again = plan(chain(), LOCAL, global_batch=8)
    assert again == found
    assert str(again) == str(found)


def test_one_device_needs_no_communication(graph: Graph) -> None:
    alone = plan(graph, Cluster.local(1, memory_GiB=1), global_batch=8)
    assert alone.mesh == Mesh(1, 1, 1)
    assert alone.prediction.exposed_comm_s == 0
    assert alone.prediction.bubble_s == 0


@pytest.mark.parametrize("pin", [{"tensor": 4}, {"data": 1}, {"pipeline": 1, "data": 1}], ids=str)
def test_what_communicates_slowly_runs_on_fewer_devices(graph: Graph, pin: dict[str, int]) -> None:
    """A step on one device beats the exchange of gradients; no pin is faster than the bound."""
    far = Cluster.parse("4x1xH100-SXM")
    made, alone = (plan(graph, c, global_batch=8) for c in (far, "1x1xH100-SXM"))
    assert made.mesh.size == 1
    assert made.prediction.step_s == pytest.approx(alone.prediction.step_s)
    assert "3 of 4 devices idle" in str(made)
    pinned = plan(graph, far, global_batch=8, pin=pin)
    assert pinned.prediction.step_s >= made.prediction.bound_s


@pytest.mark.parametrize("rows", [2**31, 10**26])
def test_more_rows_than_a_step_can_have(graph: Graph, rows: int) -> None:
    with pytest.raises(UsageError, match="a step has at most 2147483647 rows"):
        plan(graph, LOCAL, global_batch=rows)


def test_the_parts_of_the_step_add_up(found: Plan) -> None:
    p = found.prediction
    parts = p.compute_s + p.exposed_comm_s + p.bubble_s + p.optimizer_s
    assert p.step_s == pytest.approx(parts)
    assert 0 < p.bound_s <= p.step_s


def test_a_plan_is_the_program_it_describes(graph: Graph, found: Plan) -> None:
    program = spmd(graph, found)
    placed = [call.index for stage in program.stages for call in stage]
    assert placed == list(range(len(graph.calls)))
    assert found.prediction.peak_bytes <= found.prediction.capacity_bytes


@pytest.mark.parametrize(
    "pin",
    [
        {"tensor": 2, "pipeline": 2},
        {"data": 4},
        {"tensor": 4},
        {"pipeline": 4},
        {"pipeline": 2, "data": 2, "micro_batches": 2, "schedule": "gpipe"},
        {"pipeline": 4, "schedule": "zero-bubble"},
        {"pipeline": 2, "schedule": "interleaved"},
        {"pipeline": 2, "virtual_stages": 3},
        {"pipeline": 2, "schedule": "1f1b", "virtual_stages": 1},
        {"tensor": 2, "micro_batches": 4, "recompute": "full"},
        {"recompute": "none"},
        {"recompute": "selective"},
    ],
    ids=str,
)
def test_pins_are_honoured(graph: Graph, pin: dict[str, Any]) -> None:
    made = plan(graph, LOCAL, global_batch=8, pin=pin)
    assert made.mesh.size in (1, 2, 4)  # of a small model, fewer may be as fast
    for key, value in pin.items():
        if key in ("pipeline", "data", "tensor"):
            assert made.mesh.degree(key) == value
        elif key in ("micro_batches", "schedule", "virtual_stages"):
            assert getattr(made, key) == value
    labels = {placed.keep for stage in made.stages for placed in stage}
    if pin.get("recompute") in ("none", "full"):
        assert labels == {pin["recompute"]}
    spmd(graph, made)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"tensr": 2}, r"unknown pin 'tensr'. Pins are pipeline, data, tensor"),
        ({"tensor": 0}, r"tensor=0: it must be a whole number of at least 1"),
        ({"tensor": "2"}, r"tensor='2': it must be a whole number"),
        ({"tensor": 3}, r"4 devices can't be split in 3. Use tensor=2 or 4"),
        ({"schedule": "zb"}, r"it is one of gpipe, 1f1b, interleaved, zero-bubble"),
        ({"recompute": "some"}, r"it is one of none, selective, full"),
        ({"schedule": "1f1b", "virtual_stages": 2}, r"1f1b, which has one stage per pipeline"),
        ({"schedule": "interleaved", "pipeline": 1}, r"it takes at least two of each"),
        (
            {"schedule": "interleaved", "pipeline": 4, "micro_batches": 2},
            r"at least pipeline=4 micro-batches.*Use micro_batches=4",
        ),
        ({"micro_batches": 3}, r"8 rows can't be divided into 3 micro-batches. Use .*=2 or 4"),
        ({"pipeline": 3}, r"Use pipeline=2 or 4, or pin all three degrees to leave devices idle"),
        ({"pipeline": 2, "data": 2, "tensor": 2}, r"1 devices left .* in 2. Use tensor=1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_pins_that_make_no_sense(graph: Graph, pin: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(graph, LOCAL, global_batch=8, pin=pin)


@pytest.mark.parametrize("pin", [{"data": 4}, {"pipeline": 1, "tensor": 1}], ids=str)
def test_a_batch_that_the_data_ranks_cannot_share(graph: Graph, pin: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"batch of 6 can't be divided by data=4. Use data=2, or"):
        plan(graph, LOCAL, global_batch=6, pin=pin)


@pytest.mark.parametrize("rows", [0, -1, 2.0, True])
def test_a_batch_must_be_a_positive_number(graph: Graph, rows: Any) -> None:
    with pytest.raises(UsageError, match="whole number of at least 1"):
        plan(graph, LOCAL, global_batch=rows)


def test_an_unknown_optimizer(graph: Graph) -> None:
    with pytest.raises(UsageError, match="unknown optimizer 'lion'. Known: adamw, sgd"):
        plan(graph, LOCAL, global_batch=8, optimizer="lion")


def test_sgd_holds_no_state(graph: Graph) -> None:
    made = plan(graph, LOCAL, global_batch=8, optimizer="sgd")
    assert all(stage.optimizer_bytes == 0 for stage in made.prediction.stages)


def test_more_stages_than_blocks_are_refused(graph: Graph) -> None:
    calls = len(graph.calls)
    with pytest.raises(Refused, match=f"more devices than work.*Use at most pipeline={calls}"):
        plan(graph, Cluster.local(16, memory_GiB=1), global_batch=8, pin={"pipeline": 16})


def test_a_tensor_degree_that_divides_nothing_is_legal_but_said() -> None:
    made = plan(products(1), Cluster.local(3, memory_GiB=1), global_batch=8, pin={"tensor": 3})
    assert any("divides no factor" in note for note in made.approximations)
    assert any("not divisible by 3" in note for note in made.approximations)


def test_a_model_that_needs_the_whole_batch_gets_one_micro_batch() -> None:
    made = plan(whole(), Cluster.local(2, memory_GiB=1), global_batch=8)
    assert made.micro_batches == 1
    assert any(note.startswith("one micro-batch only") for note in made.approximations)
    with pytest.raises(Refused, match="all rows of the batch at once"):
        plan(whole(), Cluster.local(2), global_batch=8, pin={"micro_batches": 2})
    with pytest.raises(Refused, match="batch can't be cut: .*all rows of the batch at once. So a "):
        plan(whole(), Cluster.local(4), global_batch=8, pin={"schedule": "interleaved"})


def test_what_does_not_fit_is_refused_with_its_largest_part() -> None:
    big = chain(depth=4, width=256, hidden=1024, seq=64)
    with pytest.raises(Refused) as caught:
        plan(big, Cluster.local(2, memory_GiB=0.01), global_batch=8)
    text = str(caught.value)
    assert re.search(r"no plan fits: stage \d", text)
    assert "Largest part:" in text
    assert re.search(r"The state alone \(\d+\.\d MiB\) needs at least \d+ devices", text)


def test_scarce_memory_makes_the_plan_recompute_or_cut(graph: Graph) -> None:
    big = chain(depth=4, width=64, hidden=256, seq=64)
    roomy = plan(big, Cluster.local(1, memory_GiB=1), global_batch=8)
    need = roomy.prediction.peak_bytes / 2**30
    tight = plan(big, Cluster.local(1, memory_GiB=need * 0.8), global_batch=8)
    assert tight.prediction.peak_bytes <= tight.prediction.capacity_bytes
    assert tight.prediction.peak_bytes < roomy.prediction.peak_bytes
    assert tight.prediction.step_s >= roomy.prediction.step_s


# the plan file


def test_json_gives_the_plan_back(found: Plan) -> None:
    assert Plan.from_json(found.to_json()) == found
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_file_gives_the_plan_back(found: Plan, tmp_path) -> None:
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]


def test_a_truncated_file_is_told_apart(found: Plan, tmp_path) -> None:
    path = tmp_path / "plan.json"
    found.save(path)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(UsageError, match="not a whole plan file"):
        Plan.load(path)


def test_another_version_is_told_apart(found: Plan) -> None:
    with pytest.raises(UsageError, match="has format 'shardwright-plan/0'"):
        Plan.from_json(found.to_json() | {"format": "shardwright-plan/0"})


def test_an_altered_plan_is_told_apart(found: Plan) -> None:
    with pytest.raises(UsageError, match="was altered"):
        Plan.from_json(found.to_json() | {"schedule": "gpipe"})


def test_numbers_of_another_type_are_named(found: Plan) -> None:
    with pytest.raises(UsageError, match="micro_batches must be a int, not '2'"):
        Plan.from_json(found.to_json() | {"micro_batches": "2"})


@pytest.mark.parametrize("key", ["blocks", "mesh", "prediction", "hash"])
def test_a_missing_key_is_named(found: Plan, key: str) -> None:
    value = {k: v for k, v in found.to_json().items() if k != key}
    with pytest.raises(UsageError, match=f"missing keys \\['{key}'\\]"):
        Plan.from_json(value)


def test_a_plan_of_another_model_is_refused(found: Plan) -> None:
    with pytest.raises(Refused, match="made for another model"):
        spmd(chain(depth=3), found)


def test_interleaving_that_finds_no_sizes_says_what_it_needs(graph: Graph) -> None:
    with pytest.raises(Refused, match=r"virtual_stages=4 finds no sizes.*6 blocks.*schedule=1f1b"):
        plan(graph, LOCAL, global_batch=8, pin={"virtual_stages": 4})


def test_the_fastest_schedule_is_chosen(graph: Graph) -> None:
    """Among those with the same mesh and micro-batches, by the predicted step."""
    sizes = {"pipeline": 2, "data": 2, "micro_batches": 4}
    steps = {
        name: plan(graph, LOCAL, global_batch=8, pin=sizes | {"schedule": name}).prediction.step_s
        for name in ("gpipe", "1f1b", "zero-bubble", "interleaved")
    }
    free = plan(graph, LOCAL, global_batch=8, pin=sizes)
    assert free.prediction.step_s == min(steps.values()) == steps[free.schedule]
    assert steps["zero-bubble"] < steps["1f1b"]


def test_a_plan_with_several_stages_per_rank_is_read_back(graph: Graph) -> None:
    found = plan(graph, LOCAL, global_batch=8, pin={"pipeline": 2, "virtual_stages": 2})
    assert (len(found.stages), found.virtual_stages) == (4, 2)
    assert Plan.from_json(found.to_json()) == found
    assert len(found.prediction.stages) == 2


def test_a_time_limit_ends_the_search_with_what_it_has(graph: Graph) -> None:
    with pytest.raises(Refused, match=r"1e-09 s: of \d+ candidates none was planned.*more time"):
        plan(graph, LOCAL, global_batch=8, time_limit_s=1e-9)
    whole_search = plan(graph, LOCAL, global_batch=8, time_limit_s=1000)
    assert whole_search == plan(graph, LOCAL, global_batch=8)


def test_a_plan_says_that_the_time_limit_ended_its_search(graph: Graph, monkeypatch: Any) -> None:
    """By a clock that moves by a second whenever the search looks at it."""
    seconds = count(monotonic())
    monkeypatch.setattr("planner.search.monotonic", lambda: next(seconds))
    cut = plan(graph, LOCAL, global_batch=8, time_limit_s=20, processes=1)
    assert cut.certificate and cut.certificate.is_cut_short
    assert "of them planned; the time limit ended it" in cut.text
    assert Plan.from_json(cut.to_json()) == cut
    monkeypatch.undo()
    whole = plan(graph, LOCAL, global_batch=8)
    assert "the time limit" not in whole.text
    assert "is_cut_short" not in whole.to_json()["certificate"]


def test_the_certificate_says_what_was_searched(graph: Graph) -> None:
    free, pinned = (
        plan(graph, LOCAL, global_batch=8, pin=pin) for pin in ({}, {"pipeline": 1, "data": 4})
    )
    assert free.certificate and pinned.certificate
    assert free.certificate.candidates > pinned.certificate.candidates >= 1
    assert free.certificate.plans_log10 > pinned.certificate.plans_log10 > 0
    assert 0 < free.certificate.planned <= free.certificate.candidates
    assert f"search  {free.certificate.candidates} candidates" in free.text
    assert Plan.from_json(free.to_json()).certificate == free.certificate


def test_what_the_certificate_holds_is_checked(graph: Graph) -> None:
    value = plan(graph, LOCAL, global_batch=8).to_json()
    value["certificate"]["planned"] = "many"
    with pytest.raises(UsageError, match="certificate: planned must be a int"):
        Plan.from_json(value)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "interleaved"])
def test_what_just_fits_is_not_refused(graph: Graph, schedule: str) -> None:
    """A plan that recomputes everything is found again where there is memory for nothing else."""
    pin = {"pipeline": 2, "tensor": 2, "micro_batches": 4, "schedule": schedule}
    full = plan(graph, LOCAL, global_batch=8, pin=pin | {"recompute": "full"})
    tight = with_usable(LOCAL, full.prediction.peak_bytes + 1)
    again = plan(graph, tight, global_batch=8, pin=pin | {"recompute": "full"}).prediction
    assert again.step_s == full.prediction.step_s
    free = plan(graph, tight, global_batch=8, pin=pin).prediction
    assert max(again.peak_bytes, free.peak_bytes) <= full.prediction.peak_bytes + 1


def test_what_a_plan_of_no_choice_beats_is_not_bounded_closely(monkeypatch) -> None:
    """What the first plan takes, without a tensor axis, decides which others are looked at."""
    graph, bounds_s, planned = chain(width=512, hidden=2048, seq=64), list[float](), list[Attempt]()
    close_s, attempt = Attempts.close_s, Attempts.plan

    def counted(self: Attempts, candidate: Candidate, level: int) -> float:
        if candidate.mesh.tensor > 1:
            bounds_s.append(self.bounds.quick_s(candidate))
        return close_s(self, candidate, level)

    def noted(self: Attempts, candidate: Candidate, best_s: float) -> Attempt:
        planned.append(attempt(self, candidate, best_s))
        return planned[-1]

    monkeypatch.setattr(Attempts, "close_s", counted)
    monkeypatch.setattr(Attempts, "plan", noted)
    made = plan(graph, "1x8xH100-SXM", global_batch=512, processes=1)
    first_s = planned[0].least_s
    assert bounds_s and max(bounds_s) < first_s < 1.2 * made.prediction.step_s


def test_shapes_that_products_rule_out_are_not_priced(monkeypatch) -> None:
    """Where products alone take longer than the best plan."""
    opened, floors = set[tuple[int, int]](), dict[tuple[int, int], float]()
    quick_s, floors_s = Attempts.quick_s, Attempts.floors_s

    def counted(self: Attempts, candidates: list[Candidate]) -> list[float]:
        opened.update((candidate.mesh.tensor, candidate.rows) for candidate in candidates)
        return quick_s(self, candidates)

    def noted(self: Attempts, candidates: list[Candidate]) -> list[float]:
        found = floors_s(self, candidates)
        floors[candidates[0].mesh.tensor, candidates[0].rows] = min(found)
        return found

    monkeypatch.setattr(Attempts, "quick_s", counted)
    monkeypatch.setattr(Attempts, "floors_s", noted)
    graph = chain(width=8 * 129, hidden=8 * 515, seq=8 * 255)
    step_s = plan(graph, "4x8xH100-SXM", global_batch=64, processes=1).prediction.step_s
    ruled_out = {shape for shape, floor_s in floors.items() if floor_s > step_s}
    assert ruled_out and not ruled_out & opened and len(floors.keys() & opened) > len(ruled_out) / 2
