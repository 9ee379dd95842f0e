"""The search's answer on 200 random small instances is that of trying everything.

100 models of at most six nodes on two devices are compared with every sharding, every set of kept
values, every cut and every schedule; 100 chains of at most four layers on two to eight devices with
all of these but the shardings, of which only those are tried that are the cheapest at some price
of memory, without what pipeline ranks send; so the search can find better ones. All devices are
used. What else `exhaustive` leaves out can't be the best. The search promises its gap, not
equality: the tests print how often it is exactly equal (pytest -s). A refusal is compared with all
plans that take up to a quarter longer than the best one with ample memory. So is an answer for few
nodes that is slower than that, which leaves better plans beyond it unseen.
"""

from collections.abc import Callable
from math import inf

import pytest
from every_sharding import every_sharding, offered_shardings
from exhaustive import Exhaustive, ShardingsOf
from random_instances import Instance, few_layers, few_nodes, with_memory, with_rates

from ir.batch import flow
from ir.cluster import Cluster
from ir.errors import Refused
from ir.plan import Plan
from ir.variants import variants
from planner import plan
from planner.candidate import Workload
from planner.search import GAP

EACH, AT_ONCE = 100, 10
ROUNDING = 1e-9
TRIED_UP_TO = 1.25
"""Times the step with ample memory."""
FAMILIES: dict[str, tuple[Callable[[int], Instance], ShardingsOf]] = {
    "nodes": (few_nodes, every_sharding), "layers": (few_layers, offered_shardings),
}  # fmt: skip


def planned(instance: Instance) -> Plan | None:
    """None where it is refused."""
    try:
        return plan(instance.graph, instance.cluster, global_batch=instance.batch)
    except Refused:
        return None


def least_s(instance: Instance, shardings_of: ShardingsOf, beat_s: float) -> float:
    """The step of the best plan, or `beat_s` if none is below it."""
    batch_flow = flow(instance.graph)
    kinds = variants(instance.graph, batch_flow)
    work = Workload(instance.graph, batch_flow, kinds, instance.batch, "adamw")
    return Exhaustive(work, instance.cluster, shardings_of, beat_s).run()


def compared(family: str, seed: int) -> float:
    """The step found over the least one that was tried; 1 if none of those is better."""
    draw, shardings_of = FAMILIES[family]
    instance = draw(seed)
    found = planned(instance)
    step_s = found.prediction.step_s if found else inf
    most_s = TRIED_UP_TO * instance.roomy_s
    if found and (family == "layers" or step_s < most_s):
        most_s = step_s
    best_s = least_s(instance, shardings_of, most_s)
    if found and best_s < most_s:
        bound_s = found.prediction.bound_s
        assert bound_s <= best_s * (1 + ROUNDING), f"bound {bound_s} of {best_s}: {instance.name}"
    return step_s / best_s if best_s < most_s else 1.0


@pytest.mark.parametrize("first", range(0, EACH, AT_ONCE))
@pytest.mark.parametrize("family", FAMILIES)
def test_no_plan_is_better_than_the_one_found(family: str, first: int) -> None:
    ratios = {seed: compared(family, seed) for seed in range(first, first + AT_ONCE)}
    equal = sum(ratio == 1 for ratio in ratios.values())
    print(f"{family} {first}: {equal} of {len(ratios)} equal, worst {max(ratios.values()):.4f}")
    assert not {seed: ratio for seed, ratio in ratios.items() if ratio > 1 + GAP}


# a better request has no worse answer


@pytest.mark.parametrize("seed", range(30))
def test_more_memory_never_makes_the_step_longer(seed: int) -> None:
    instance = (few_layers, few_nodes)[seed % 2](500 + seed)
    usable = instance.cluster.device.usable_bytes
    steps = [
        step_s(instance, with_memory(instance.cluster, usable * factor)) for factor in (1, 1.15, 2)
    ]
    assert steps[1] <= steps[0] * (1 + GAP)
    assert steps[2] <= min(steps[:2]) * (1 + GAP)


@pytest.mark.parametrize("seed", range(30))
def test_twice_the_bandwidth_never_makes_the_step_longer(seed: int) -> None:
    instance = (few_layers, few_nodes)[seed % 2](600 + seed)
    usual, twice = (step_s(instance, with_rates(instance.cluster, factor)) for factor in (1, 2))
    assert twice <= usual * (1 + GAP)


def step_s(instance: Instance, cluster: Cluster) -> float:
    """Of the plan; infinite where it is refused."""
    try:
        return plan(instance.graph, cluster, global_batch=instance.batch).prediction.step_s
    except Refused:
        return float("inf")
