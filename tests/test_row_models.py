"""Models from the columns of a table: their parameters are those of the published formulas."""

import pytest
import torch

from runtime.row_models import RowShape, build_row_model, row_shape

GPT3 = {
    "family": "gpt", "layers": "96", "hidden": "12288", "heads": "96", "ffn_hidden": "49152",
    "gated_mlp": "0", "vocab": "51200", "seq_len": "2048", "tied_embeddings": "1",
    "precision": "fp16",
}  # fmt: skip


def counted(row):
    model, _, _ = build_row_model(row)
    return sum(p.numel() for p in model.parameters())


def test_gpt_has_the_parameters_of_megatrons_formula():
    layers, h, vocab, seq = 96, 12288, 51200, 2048
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h)) + (vocab + seq) * h + 2 * h
    assert counted(GPT3) == formula


def test_llama_3_8b_and_mpt_7b_have_their_published_sizes():
    llama = RowShape("llama", 32, 4096, 32, 8, 128, 14336, True, 128256, 8192, False)
    mpt = RowShape("mpt", 32, 4096, 32, 32, 128, 16384, False, 50432, 2048, True)
    assert counted(llama) == llama.parameters == 8_030_261_248
    assert counted(mpt) == mpt.parameters == 6_649_286_656


def test_the_row_says_the_dtype_and_the_model_runs():
    shape = RowShape("llama", 1, 32, 4, 2, 8, 48, True, 50, 16, False, "float32")
    model, _, batch = build_row_model(shape)
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.normal_(tensor, std=0.1)
    loss = model(**{key: torch.zeros(2, 16, dtype=torch.int64) for key in batch})
    assert loss.isfinite() and row_shape(GPT3).dtype == "float16"


@pytest.mark.parametrize(("change", "said"), [
    ({"heads": "96.5"}, "not a whole number"), ({"hidden": "x"}, "hidden='x'"),
    ({"layers": ""}, "layers is missing"), ({"heads": "100"}, "can't be divided"),
    ({"family": "mamba"}, "unknown family"), ({"kv_heads": "7"}, "can't share"),
])  # fmt: skip
def test_sizes_that_make_no_model_are_named(change, said):
    with pytest.raises(ValueError, match=said):
        build_row_model(GPT3 | change)
