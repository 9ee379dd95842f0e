"""Every schedule gives the numbers of one device, and runs in the order that the plan says."""

from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import pytest

from codegen import emit
from codegen.load import load
from ir.graph import Graph
from planner.timeline import simulate_plan
from runtime.compare import Run, Training, compare, run_plain, run_program, widened, widened_batch
from runtime.layout import parse_layout
from runtime.mail import all_links
from runtime.schedule import Receive, Send, instructions
from runtime.trainer import run_threads
from tests.numbers.schedule_model import ROWS, build, plan_of, traced
from tests.numbers.test_cases import prepared

# schedule, ranks, stages per rank, micro-batches, data
SIZES = [
    ("1f1b", 4, 1, 4, 1), ("gpipe", 3, 1, 2, 1),
    ("interleaved", 2, 2, 2, 1), ("interleaved", 2, 4, 4, 1), ("interleaved", 4, 2, 4, 1),
    ("interleaved", 2, 3, 4, 2), ("interleaved", 3, 2, 4, 1), ("interleaved", 2, 2, 8, 1),
    ("zero-bubble", 1, 1, 2, 1), ("zero-bubble", 2, 1, 4, 1), ("zero-bubble", 4, 1, 8, 1),
    ("zero-bubble", 3, 1, 2, 1), ("zero-bubble", 2, 1, 2, 2), ("zero-bubble", 8, 1, 1, 1),
]  # fmt: skip


@lru_cache
def graph_of(dropout: float) -> Graph:
    return traced(dropout)


@lru_cache
def one_device(dropout: float) -> Run:
    """The plain model; with dropout the program of one device, which draws the same masks."""
    model, args = build(dropout)
    wide, batch = widened(model), widened_batch(args)
    if not dropout:
        return run_plain(wide, batch, {}, lambda loss: loss, Training())
    plan = plan_of(graph_of(dropout), "1f1b", ranks=1, micro=1, rows=ROWS)
    return run_program(*load(emit(graph_of(dropout), plan)), wide, batch, {}, Training())


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_schedule_equals_one_device(
    size: tuple[str, int, int, int, int], dropout: float, recompute: bool
) -> None:
    schedule, ranks, virtual, micro, data = size
    graph = graph_of(dropout)
    plan = plan_of(
        graph, schedule, ranks=ranks, virtual=virtual, micro=micro, data=data, rows=ROWS,
        recompute=recompute,
    )  # fmt: skip
    model, args = build(dropout)
    program, layout = load(emit(graph, plan))
    found = run_program(program, layout, widened(model), widened_batch(args), {}, Training())
    compared = compare(found, one_device(dropout))
    assert compared.status == "ok", compared
    assert found.unequal_replicas == ()


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual", "cuts"),
    [("interleaved", 2, 2, (1, 5, 7)), ("zero-bubble", 3, 1, (1, 7)), ("1f1b", 3, 1, (4, 5))],
)
def test_uneven_stages_equal_one_device(
    schedule: str, ranks: int, virtual: int, cuts: tuple[int, ...]
) -> None:
    graph = graph_of(0.0)
    plan = plan_of(graph, schedule, ranks=ranks, virtual=virtual, micro=4, rows=ROWS, cuts=cuts)
    model, args = build()
    found = run_program(
        *load(emit(graph, plan)), widened(model), widened_batch(args), {}, Training()
    )
    assert compare(found, one_device(0.0)).status == "ok"


@pytest.mark.parametrize(
    ("case", "schedule", "ranks", "virtual", "micro"),
    [
        ("001_tied_embedding_pp", "interleaved", 2, 2, 2),
        ("001_tied_embedding_pp", "zero-bubble", 4, 1, 4),
        ("008_rope_complex_buffer_pp", "interleaved", 2, 2, 2),
        ("008_rope_complex_buffer_pp", "zero-bubble", 3, 1, 2),
        ("013_multi_loss_mid_stage", "interleaved", 2, 2, 4),
        ("013_multi_loss_mid_stage", "zero-bubble", 4, 1, 2),
        ("015_unet_skip_pp", "interleaved", 2, 3, 4),
        ("015_unet_skip_pp", "interleaved", 3, 2, 4),
        ("015_unet_skip_pp", "zero-bubble", 3, 1, 4),
        ("020_lora_frozen_base", "interleaved", 2, 2, 2),
        ("020_lora_frozen_base", "zero-bubble", 3, 1, 4),
        ("027_uneven_stages_heavy_head", "interleaved", 2, 4, 8),
        ("027_uneven_stages_heavy_head", "zero-bubble", 4, 1, 8),
    ],
)
def test_models_that_are_hard_to_pipeline(
    case: str, schedule: str, ranks: int, virtual: int, micro: int
) -> None:
    found = prepared(case)
    plan = plan_of(
        found.graph, schedule, ranks=ranks, virtual=virtual, micro=micro, rows=found.rows
    )
    program, layout = load(emit(found.graph, plan))
    run = run_program(program, layout, found.model, found.args, found.kwargs, Training())
    assert compare(run, found.plain).status == "ok"


@pytest.mark.parametrize("size", [s for s in SIZES if s[4] == 1], ids=str)
def test_ranks_run_what_the_plan_says_in_its_order(size: tuple[str, int, int, int, int]) -> None:
    schedule, ranks, virtual, micro, _ = size
    graph = graph_of(0.0)
    plan = plan_of(graph, schedule, ranks=ranks, virtual=virtual, micro=micro, rows=ROWS)
    program, layout = load(emit(graph, plan))
    log: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    stages = tuple(recorded(stage, number, log) for number, stage in enumerate(program.STAGES))
    model, args = build()
    watched = SimpleNamespace(STAGES=stages)
    run_threads(layout, watched, widened(model), ranks, lambda trainer: trainer.step(*args).item())
    assert log == {rank: list(map(str, actions)) for rank, actions in enumerate(plan.order)}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_runtime_does_what_is_simulated(size: tuple[str, int, int, int, int]) -> None:
    """Also what is taken and sent, value by value, by the instruction list of every rank."""
    schedule, ranks, virtual, micro, data = size
    graph = graph_of(0.0)
    plan = plan_of(graph, schedule, ranks=ranks, virtual=virtual, micro=micro, data=data, rows=ROWS)
    layout = parse_layout(load(emit(graph, plan))[1])
    pipeline, links = simulate_plan(graph, plan).pipeline, all_links(layout)
    for rank, actions in enumerate(layout.order):
        executed: list[tuple[object, ...]] = []
        for step in instructions(actions, links)[:-2]:  # without Reduce and Step
            match step:
                case Receive(message):
                    executed.append(("take", *message))
                case Send(message):
                    if len({message.source % ranks, message.target % ranks}) > 1:
                        executed.append(("send", *message))
                case _:
                    executed.append(("compute", step.stage, step.micro))
        simulated = [
            ("compute", event.action.stage, event.action.micro) if event.kind == "compute"
            else (event.kind, *(event.needs or event.makes[0])) for event in pipeline.events(rank)
        ]  # fmt: skip
        assert executed == simulated


def recorded(stage, number, log):  # type: ignore[no-untyped-def]
    """The stage with functions that note what runs on which rank."""
    letters = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}

    def noting(function, letter):  # type: ignore[no-untyped-def]
        def call(ctx, *rest):  # type: ignore[no-untyped-def]
            log[ctx.mesh.pipeline.index].append(f"{number}{letter}{ctx.micro}")
            return function(ctx, *rest)

        return call

    given = {name: getattr(stage, name) for name in letters}
    return replace(
        stage, **{name: noting(f, letters[name]) for name, f in given.items() if f is not None}
    )
