"""What is missing where nothing fits, and what would fit: each remedy plans when it is tried."""

import json
from dataclasses import replace

import pytest
from small_models import chain, whole
from test_explanation import OWN, PAIR, explained, planning_of

from ir.cluster import GIB, Cluster
from ir.cluster_change import changed
from ir.plan import Plan
from planner import plan
from planner.alternatives import alternative, decisions
from planner.explanation import Explanation, explain_request
from planner.explanation_text import explanation_text
from planner.shortage import DoesNotFit
from planner.trials import Refusal, Request, Trials

SCARCE = {"pipeline": 1, "data": 1, "micro_batches": 1, "recompute": "none", "offload": "none"}


def scarce(memory_GiB: float) -> Cluster:
    cluster = Cluster.parse("2xH100-SXM")
    size = int(memory_GiB * GIB)
    return replace(cluster, device=replace(cluster.device, memory_bytes=size, reserve_bytes=0))


@pytest.fixture(scope="module")
def missing() -> Explanation:
    return explained(chain(depth=2, width=256, hidden=1024, seq=64), scarce(0.0105), SCARCE)


def test_what_is_missing_adds_up(missing: Explanation) -> None:
    shortage = missing.shortage
    assert missing.plan is None and shortage is not None
    assert shortage.need_bytes > shortage.capacity_bytes
    chosen = sum(part.size_bytes for part in shortage.violated)
    assert shortage.capacity_bytes < chosen <= shortage.need_bytes
    fewer = sorted((part.size_bytes for part in shortage.parts), reverse=True)
    assert sum(fewer[: len(shortage.violated) - 1]) <= shortage.capacity_bytes  # none is too many
    assert [part.size_bytes for part in shortage.largest] == sorted(
        (part.size_bytes for part in shortage.largest), reverse=True
    )
    assert any(part.name.startswith("layers.*.up.weight") for part in shortage.largest)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_part_is_larger_than_what_it_is_of_and_none_is_nothing(recompute: str) -> None:
    graph = chain(depth=4, width=64, hidden=128, seq=16)
    with pytest.raises(DoesNotFit) as caught:
        plan(graph, scarce(1e-5), global_batch=16, pin={"recompute": recompute, "data": 1})
    shortage = caught.value.shortage
    whole_bytes = {part.name: part.size_bytes for part in shortage.parts}
    assert min(whole_bytes.values()) > 0
    working = [p for p in shortage.largest if p.name.startswith("working memory of")]
    assert working
    assert all(part.size_bytes <= whole_bytes["working memory"] for part in working)


def test_every_remedy_plans_when_it_is_tried(missing: Explanation) -> None:
    big = chain(depth=2, width=256, hidden=1024, seq=64)
    fitting = [item for item in missing.remedies if item.fits]
    assert {"free", "nodes", "memory"} <= {item.kind for item in fitting}
    for item in fitting:
        cluster, pins = scarce(0.0105), dict(SCARCE)
        if item.kind in ("nodes", "memory"):
            cluster = changed(cluster, {item.kind: item.change})
        pins = {key: value for key, value in pins.items() if key not in item.released}
        made = plan(big, cluster, global_batch=8, pin=pins)
        assert made == item.outcome
        assert made.prediction.peak_bytes <= made.prediction.capacity_bytes


def test_a_remedy_frees_only_what_changes(missing: Explanation) -> None:
    freeing = [item for item in missing.remedies if item.fits and item.released]
    assert freeing
    for item in freeing:
        assert isinstance(item.outcome, Plan)
        now = decisions(item.outcome)
        assert all(now[key] != SCARCE[key] for key in item.released)
        assert item.kind != "free" or item.change == ", ".join(item.released)


def test_what_was_tried_in_vain_says_by_how_much(missing: Explanation) -> None:
    text = explanation_text(missing)
    assert text.startswith("no plan fits\n") and "what would fit, each planned" in text
    vain = [item for item in missing.remedies if not item.fits]
    assert not vain or "does not fit: " in text
    found = json.loads(json.dumps(missing.to_json()))
    assert found["status"] == "refused" and found["reason"].startswith("no plan fits: stage 0")
    assert {"kind", "change", "status"} <= found["remedies"][0].keys()


def test_a_batch_that_can_not_be_split_can_be_smaller() -> None:
    graph = whole()
    need = plan(graph, scarce(1), global_batch=64).prediction.peak_bytes / GIB
    trials = Trials(planning_of(graph), 600)
    told = explain_request(Request(scarce(0.5 * need), 64, {}), trials)
    kinds = {item.kind: item for item in told.remedies if item.fits}
    assert "batch" in kinds and int(kinds["batch"].change) < 64
    assert "which trains differently" in str(told)


def test_more_nodes_free_the_degrees_that_filled_the_old_ones(missing: Explanation) -> None:
    (nodes,) = [item for item in missing.remedies if item.kind == "nodes" and item.fits]
    assert isinstance(nodes.outcome, Plan)
    assert nodes.outcome.mesh.size == 2 * int(nodes.change)


@pytest.mark.parametrize("fits", [True, False])
def test_what_does_not_fit_on_the_plans_mesh_is_asked_of_all(
    missing: Explanation, fits: bool
) -> None:
    made = plan(chain(), PAIR, global_batch=8, pin=OWN)
    assert missing.shortage is not None
    smaller = replace(missing.shortage, parts=missing.shortage.parts[:3])

    def planning(request: Request, left_s: float) -> Plan:
        if "data" in request.pins:
            raise DoesNotFit(missing.shortage)
        if fits:
            return made
        raise DoesNotFit(smaller)

    asked = {"schedule": "gpipe"}
    found = alternative(Request(PAIR, 8, {}), asked, Trials(planning, 60), made.mesh)
    if fits:
        assert found.outcome == made
    else:
        assert isinstance(found.outcome, Refusal) and found.outcome.shortage == smaller
    assert not found.released
