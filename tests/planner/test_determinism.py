"""The same request gives the same plan, byte for byte, in any process and with any threads."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from random_instances import Instance, few_layers, few_nodes
from small_models import chain

import planner.search
from ir.cluster import Cluster
from ir.errors import Refused
from ir.workers import Workers
from planner import plan

SEEDS = range(700, 704)
HERE = Path(__file__).parent


def plans(processes: int = 1) -> str:
    """The plans of some requests, or their refusals, as text; searched in so many processes."""
    found = [_written(draw(seed), processes) for draw in (few_nodes, few_layers) for seed in SEEDS]
    for cluster in (Cluster.local(4), Cluster.parse("1x2xH100-SXM+1x2xA100-40GB")):
        found.append(_written(Instance("", chain(), cluster, 8, 0.0), processes))
    return "\n".join(found)


def helped_plans(processes: int) -> str:
    """As `plans`, where the other processes help from the first moment on."""
    planner.search.SHORT_S = -1.0
    text = plans(processes)
    assert HELPERS.count(processes - 1) >= len(SEEDS)
    return text


class CountedWorkers(Workers):
    """Note how many copies they have when they are closed."""

    def close(self) -> None:
        HELPERS.append(len(self._copies))
        super().close()


HELPERS: list[int] = []


def _written(instance: Instance, processes: int) -> str:
    try:
        made = plan(
            instance.graph, instance.cluster, global_batch=instance.batch, processes=processes
        )
    except Refused as error:
        return str(error)
    return json.dumps(made.to_json()) + str(made)


@pytest.fixture(scope="module")
def usual() -> str:
    return plans()


def test_planning_again_gives_the_same_plans(usual: str) -> None:
    assert plans() == usual


@pytest.mark.parametrize("processes", [2, 3])
def test_more_processes_give_the_same_plans(usual: str, processes: int) -> None:
    """In a process of its own, which has one thread, so that it can be copied."""
    code = (
        "import sys, planner.search, test_determinism as tests\n"
        "planner.search.Workers = tests.CountedWorkers\n"
        f"sys.stdout.write(tests.helped_plans({processes}))"
    )
    assert _of_process(code) == usual


@pytest.mark.parametrize("threads", [1, 2])
def test_another_process_gives_the_same_plans(usual: str, threads: int) -> None:
    """With another seed of Python's hashes, and so many threads for whatever uses them."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, str(threads))
    code = "import sys, test_determinism; sys.stdout.write(test_determinism.plans())"
    environment |= {"PYTHONHASHSEED": str(41 + threads)}
    assert _of_process(code, environment) == usual


def _of_process(code: str, environment: Mapping[str, str] = os.environ) -> str:
    paths = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    made = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return made.stdout
