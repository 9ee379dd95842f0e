"""Naming a model: files with a build(), Hugging Face configs, and what is wrong with the others."""

import json
from itertools import islice

import pytest
import torch

from runtime.errors import Refused, RuntimeFailure, UsageError
from runtime.models import load_model
from runtime.named_models import NAMED

GOOD = """
import torch
from torch import nn
def build():
    return nn.Linear(3, 2), (torch.ones(4, 3),), {}
def loss(output):
    return output.sum()
"""


@pytest.fixture
def model_file(tmp_path):
    def write(source: str, name: str = "model.py") -> str:
        path = tmp_path / name
        path.write_text(source)
        return f"{path}:build"

    return write


def test_a_file_gives_its_model_inputs_and_loss(model_file):
    loaded = load_model(model_file(GOOD), device="cpu")
    assert loaded.name == "model"
    assert loaded.loss(loaded.model(*loaded.args, **loaded.kwargs)).shape == ()


def test_a_file_without_loss_returns_the_loss_itself(model_file):
    assert load_model(model_file(GOOD.split("def loss")[0])).loss is None


def test_the_seed_decides_the_weights_and_leaves_the_caller_s_generator_alone(model_file):
    before = torch.random.get_rng_state()
    weights = [load_model(model_file(GOOD), seed=seed).model.weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_file_may_import_its_neighbours(model_file, tmp_path):
    (tmp_path / "neighbour_of_model.py").write_text("WIDTH = 5\n")
    source = GOOD.replace("import torch\n", "from neighbour_of_model import *\nimport torch\n", 1)
    assert load_model(model_file(source.replace("3, 2", "3, WIDTH"))).model.out_features == 5


def test_without_batches_the_one_batch_comes_again(model_file):
    loaded = load_model(model_file(GOOD))
    args, kwargs = next(islice(loaded.batches(), 5, None))
    assert args is loaded.args and kwargs == {}


def test_a_file_s_batches_come_in_the_asked_size(model_file):
    source = GOOD.replace("build()", "build(batch=4)").replace("ones(4", "ones(batch")
    source += "def batches(batch=4):\n    for i in range(2):\n        yield (i, batch), {}\n"
    stream = load_model(model_file(source), batch=6).batches()
    assert [args for args, _ in islice(stream, 2)] == [(0, 6), (1, 6)]


def test_batches_that_raise_are_a_paragraph_with_their_line(model_file):
    source = GOOD + "def batches():\n    yield (1,), {}\n    raise RuntimeError('ended badly')\n"
    stream = load_model(model_file(source)).batches()
    assert next(stream) == ((1,), {})
    with pytest.raises(Refused, match=r":\d+: batches\(\) raised RuntimeError: ended badly"):
        next(stream)


def test_any_file_name_will_do(model_file):
    name = 'it\'s "1"; import os.py'
    assert load_model(model_file(GOOD, name)).model.in_features == 3


def test_build_takes_sizes_by_name(model_file):
    source = GOOD.replace("build()", "build(batch=4)").replace("ones(4", "ones(batch")
    assert load_model(model_file(source), batch=6).args[0].shape == (6, 3)
    with pytest.raises(UsageError, match="takes no --seq"):
        load_model(model_file(source), seq=8)


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("x = 1", UsageError, "no function 'build'"),
        ("build = 3", UsageError, "no function 'build'"),
        ("def build(): return 1", UsageError, "returned int; it has to return"),
        ("def build(): return 1, (), {}", UsageError, r"returned \(int, tuple, dict\)"),
        (GOOD + "loss = 3", UsageError, "`loss` in .* is int, not a function"),
        ("def build():\n    assert 0, 'a\\nb'", Refused, r"py:2: build\(\) raised .*: a b"),
        ("def build():\n    raise SystemExit", Refused, "raised SystemExit"),
        ("import torch\n1/0", Refused, "py:2: importing it raised ZeroDivisionError"),
        ("def build(:", UsageError, "py:1: importing it raised SyntaxError"),
    ],
)
def test_a_wrong_file_is_one_paragraph(model_file, source, kind, words):
    with pytest.raises(kind, match=words) as raised:
        load_model(model_file(source))
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == (2 if kind is UsageError else 3)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere.py:build", "no such file"),
        ("README.md:build", "does not end in .py"),
        ("gpt2", "hf:NAME such as"),
        ("hf:lama-3-8b", "Did you mean llama-3-8b"),
        ("hf:nowhere/config.json", "No such file"),
        ("hf:gpt2", "--seq asks 4096"),
    ],
)
def test_a_wrong_name_says_what_a_name_is(spec, words):
    with pytest.raises(UsageError, match=words):
        load_model(spec, seq=4096)


def test_weights_on_meta_are_refused_where_they_are_needed(model_file):
    source = GOOD.replace("nn.Linear(3, 2)", "nn.Linear(3, 2, device='meta')")
    assert load_model(model_file(source)).model.weight.is_meta
    with pytest.raises(Refused, match="weight is on the meta device"):
        load_model(model_file(source), device="cpu")


PUBLISHED = {  # parameters, counted in the published checkpoints
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-8b": 8_190_735_360,
}
PAPER = {"gpt3-2.7b": 2.7e9, "gpt3-6.7b": 6.7e9, "gpt3-175b": 175e9}  # never published exactly


@pytest.mark.parametrize("name", NAMED)
def test_a_named_model_has_its_published_size_and_no_weights(name):
    loaded = load_model(f"hf:{name}", seq=16)
    assert all(p.is_meta for p in loaded.model.parameters())
    count = sum(p.numel() for p in loaded.model.parameters())
    assert count == PUBLISHED[name] if name in PUBLISHED else abs(count / PAPER[name] - 1) < 0.02
    assert loaded.kwargs["input_ids"].shape == (4, 16)


def test_a_model_larger_than_the_memory_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda _: 2**17)  # 128 KiB pages, as many: 16 GiB
    with pytest.raises(Refused, match="hf:llama-3-405b are 756 GiB and this machine has 16 GiB"):
        load_model("hf:llama-3-405b", seq=16, device="cpu")


def tiny_config(tmp_path, **changes):
    fields = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "torch_dtype": "float32",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | changes))
    return path


def test_a_config_file_runs_on_cpu_with_real_buffers(tmp_path):
    path = tiny_config(tmp_path)
    first, again = (load_model(f"hf:{path}", batch=3, device="cpu", seed=7) for _ in range(2))
    output = first.model(*first.args, **first.kwargs)
    assert first.kwargs["input_ids"].shape == (3, 32)
    assert torch.isfinite(first.loss(output))
    assert not any(b.is_meta for b in first.model.buffers())
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_folder_with_a_config_is_that_config(tmp_path):
    path = tiny_config(tmp_path, torch_dtype="bfloat16")
    loaded = load_model(f"hf:{path.parent}", seq=8)
    assert next(loaded.model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no-such"},
        {"model_type": "vit"},
        {"torch_dtype": "float33"},
        {"num_attention_heads": 3},
        {"hidden_size": "wide"},
        {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "model_type": "evil"},
    ],
)
def test_a_config_that_makes_no_language_model_is_one_paragraph(tmp_path, changes):
    with pytest.raises(RuntimeFailure) as raised:
        load_model(f"hf:{tiny_config(tmp_path, **changes)}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "here LlamaForCausalLM"),
        ({"model_type": "t5"}, "hf:.* is t5, and hf: builds only the causal language model"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "FILE.py with a"),
    ],
)
def test_a_config_of_another_kind_of_model_is_refused_with_what_to_do(tmp_path, changes, words):
    with pytest.raises(Refused, match=words) as raised:
        load_model(f"hf:{tiny_config(tmp_path, **changes)}")
    assert len(str(raised.value)) < 300


def test_a_model_without_fused_attention_gets_its_own(tmp_path):
    changes = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 8}
    loaded = load_model(f"hf:{tiny_config(tmp_path, **changes)}", seq=8)
    assert type(loaded.model).__name__ == "Gemma2ForCausalLM"


@pytest.mark.parametrize("text", ["", "[1]", "3", '{"hidden_size": 3}', '{"model_type": 3'])
def test_a_broken_config_is_one_paragraph(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a Hugging Face config"):
        load_model(f"hf:{path}")


@pytest.mark.filterwarnings("error")
def test_a_build_that_has_to_be_awaited_returns_no_model(model_file):
    with pytest.raises(UsageError, match="returned coroutine; it has to return"):
        load_model(model_file(GOOD.replace("def build", "async def build")))


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(UsageError, match="named FILE.py:build or hf:NAME, and not 5"):
        load_model(5)
