"""The same request gives the same plan, byte for byte, in any process and with any threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from random_instances import Instance, few_layers, few_nodes
from small_models import chain

from ir.cluster import Cluster
from ir.errors import Refused
from planner import plan

SEEDS = range(700, 704)
HERE = Path(__file__).parent


def plans() -> str:
    """The plans of some requests, or their refusals, as text."""
    found = [_written(draw(seed)) for draw in (few_nodes, few_layers) for seed in SEEDS]
    return "\n".join([*found, _written(Instance("", chain(), Cluster.local(4), 8, 0.0))])


def _written(instance: Instance) -> str:
    try:
        made = plan(instance.graph, instance.cluster, global_batch=instance.batch)
    except Refused as error:
        return str(error)
    return json.dumps(made.to_json()) + str(made)


@pytest.fixture(scope="module")
def usual() -> str:
    return plans()


def test_planning_again_gives_the_same_plans(usual: str) -> None:
    assert plans() == usual


@pytest.mark.parametrize("threads", [1, 2])
def test_another_process_gives_the_same_plans(usual: str, threads: int) -> None:
    """With another seed of Python's hashes, and so many threads for whatever uses them."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, str(threads))
    environment |= {"PYTHONHASHSEED": str(41 + threads),
                    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}  # fmt: skip
    code = "import sys, test_determinism; sys.stdout.write(test_determinism.plans())"
    made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert made.stdout == usual
