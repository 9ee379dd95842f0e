"""`shardwright explain` and `sw.explain`: what they print, what they return, what they refuse."""

import json

import pytest
import torch
from test_cli import TINY, command, model  # noqa: F401  # fixtures

import shardwright
from ir.errors import Refused, UsageError
from planner.explanation import Explanation

SCARCE = "device: H100-SXM\ndevices_per_node: 2\nmemory_GiB: 0.0000025\nreserve_GiB: 0.000001\n"


@pytest.fixture
def saved(command, model, tmp_path):  # noqa: F811
    file = tmp_path / "plan.json"
    asked = ("plan", model, "--cluster", "local:2", "--pin", "data=2,tensor=1", "--out", file)
    assert command(*asked)[0] == 0
    return file


def test_a_saved_plan_is_explained(command, model, saved):  # noqa: F811
    code, out, err = command("explain", model, "--plan", saved)
    assert code == 0 and not err
    assert out.startswith(f"plan {shardwright.load_plan(saved).hash} ")
    for words in ("planned again with nothing changed: ", "nearest alternatives", "tensor = 2",
                  "memory ", "link.shared-memory", "of the step"):  # fmt: skip
        assert words in out


def test_a_plan_is_made_from_the_flags(command, model):  # noqa: F811
    asked = ("explain", model, "--cluster", "local:2", "--pin", "data=2")
    code, out, _ = command(*asked, "--why-not", "tensor=2", "--what-if", "link.shared-memory=x2")
    assert code == 0
    assert "why not tensor = 2" in out and "it does not go with data, which you fixed" in out
    assert "what if link.shared-memory=x2" in out and "nearest alternatives" not in out


def test_as_json(command, model, saved):  # noqa: F811
    code, out, _ = command("explain", model, "--plan", saved, "--json")
    found = json.loads(out)
    assert code == 0 and found["status"] == "ok"
    assert {"plan", "again", "alternatives", "constraints"} <= found.keys()
    for item in found["alternatives"]:
        if item["status"] == "fits":
            assert sum(item["parts_s"].values()) == pytest.approx(item["difference_s"], abs=1e-12)


def test_where_nothing_fits_the_explanation_is_the_refusal(command, model, tmp_path):  # noqa: F811
    cluster = tmp_path / "scarce.yaml"
    cluster.write_text(SCARCE)
    code, out, err = command("explain", model, "--cluster", cluster)
    assert code == 3 and not err
    assert out.startswith("no plan fits") and "already too much" in out
    assert "what would fit, each planned" in out
    code, out, err = command("plan", model, "--cluster", cluster)
    assert code == 3 and not out and err.count("\n") == 1
    assert "no plan fits: stage 0 needs" in err and "It would fit with" in err
    code, out, _ = command("explain", model, "--cluster", cluster, "--json")
    assert code == 3 and json.loads(out)["status"] == "refused" and json.loads(out)["remedies"]


def test_a_plan_of_another_model_is_refused(command, saved, tmp_path):  # noqa: F811
    other = tmp_path / "other.py"
    other.write_text(TINY.replace("8, 16", "8, 32").replace("16, 8", "32, 8"))
    code, out, err = command("explain", f"{other}:build", "--plan", saved)
    assert code == 3 and not out and "made for another model" in err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["SAVED"], "a plan file holds no model"),
        (["MODEL"], "--cluster"),
        (["MODEL", "--plan", "SAVED", "--cluster", "local:4"], "--cluster: the plan in"),
        (["MODEL", "--plan", "SAVED", "--global-batch", "4"], "--global-batch: the plan in"),
        (["MODEL", "--plan", "SAVED", "--pin", "data=1"], "Ask for another value with --why-not"),
        (["MODEL", "--plan", "nowhere.json"], "nowhere.json"),
        (["MODEL", "--plan", "SAVED", "--why-not", "tensor"], "--why-not 'tensor': 'tensor' is"),
        (["MODEL", "--plan", "SAVED", "--why-not", ""], "--why-not asks for nothing"),
        (["MODEL", "--plan", "SAVED", "--why-not", "tenser=2"], "unknown pin 'tenser'"),
        (["MODEL", "--plan", "SAVED", "--why-not", "zero=9"], "one of 0, 1, 2, 3"),
        (["MODEL", "--plan", "SAVED", "--what-if", ""], "Changes are memory=+8GiB"),
        (["MODEL", "--plan", "SAVED", "--what-if", "memory=8"], "number with its unit"),
        (["MODEL", "--plan", "SAVED", "--what-if", "nodes=2"], "one machine"),
        (["MODEL", "--plan", "SAVED", "--what-if", "link.node=9"], "link.shared-memory"),
        (["MODEL", "--cluster", "local:2", "--pin", "tensor=3"], "Use tensor=2"),
        (["MODEL", "--plan", "SAVED", "--time-limit", "0"], "not a number of seconds above 0"),
    ],
)
def test_a_wrong_question_is_one_paragraph(command, model, saved, words, reason):  # noqa: F811
    named = {"MODEL": model, "SAVED": saved}
    code, out, err = command("explain", *(named.get(word, word) for word in words))
    assert code == 2 and not out
    assert reason in err and "Traceback" not in err


class Net(torch.nn.Module):
    """One product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def test_from_python():
    net, batch = Net(), torch.randn(4, 8)
    plan = shardwright.plan(net, "local:2", batch, global_batch=4)
    told = shardwright.explain(net, plan)
    assert isinstance(told, Explanation) and str(told).startswith(f"plan {plan.hash} ")
    why = shardwright.explain(net, "local:2", batch, global_batch=4, why_not={"data": 1})
    assert why.why_not is not None and "why not data = 1" in str(why)
    more = shardwright.explain(net, plan, what_if="memory=+1GiB")
    assert more.to_json()["what_if"]["status"] == "fits"


def test_mistakes_in_python():
    net, batch = Net(), torch.randn(4, 8)
    with pytest.raises(UsageError, match="say with global_batch"):
        shardwright.explain(net, "local:2", batch)
    with pytest.raises(UsageError, match="give explain an example batch"):
        shardwright.explain(net, "local:2", global_batch=4)
    plan = shardwright.plan(net, "local:2", batch, global_batch=4)
    with pytest.raises(UsageError, match="unknown pin"):
        shardwright.explain(net, plan, why_not={"tensr": 2})
    other = shardwright.trace(torch.nn.Sequential(Net()), (batch,), {})
    with pytest.raises(Refused, match="made for another model"):
        shardwright.explain(other, plan)
