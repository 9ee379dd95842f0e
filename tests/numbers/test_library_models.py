"""Models of transformers that are no plain stack of layers, small: several inputs whose rows are
the same, windows, names of many parts, states that hooks collect, losses over all pairs of rows."""

import pytest
import torch
import transformers

from checking import check
from runtime.models import Loaded

ROWS, CLASSES = 4, 5
IDS = torch.arange(ROWS * 12).reshape(ROWS, 12) * 7 % 93 + 3
IMAGES = torch.linspace(-1, 1, ROWS * 3 * 32 * 32).sin().reshape(ROWS, 3, 32, 32)
TEXT = {"input_ids": IDS, "labels": IDS.flip(1)}
PICTURES = {"pixel_values": IMAGES, "labels": torch.arange(ROWS) % CLASSES}
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
MODELS = {
    "BartForConditionalGeneration": (TEXT, {
        "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "max_position_embeddings": 64, "decoder_start_token_id": 2,
        "dropout": 0.0,
    }),
    "T5ForConditionalGeneration": (TEXT, {
        "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "dropout_rate": 0.0,
    }),
    "SwinForImageClassification": (PICTURES, {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
        "window_size": 4, "num_labels": CLASSES, "drop_path_rate": 0.0,
    }),
    "ResNetForImageClassification": (PICTURES, {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": CLASSES,
    }),
    "SegformerForSemanticSegmentation": (
        {"pixel_values": IMAGES, "labels": (IMAGES[:, 0] > 0).long()},
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
         "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
         "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": CLASSES,
         "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0},
    ),
    "MPNetForMaskedLM": (TEXT, {
        **SIZES, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }),
    "FunnelForMaskedLM": (TEXT, {
        "vocab_size": 96, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8,
        "d_inner": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }),
    "CLIPModel": (
        {"input_ids": IDS, "pixel_values": IMAGES, "return_loss": True},
        {"text_config": {**SIZES, "eos_token_id": 2},
         "vision_config": {**SIZES, "image_size": 32, "patch_size": 8}, "projection_dim": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_on_two_devices_as_on_one(name):
    torch.manual_seed(0)
    batch, sizes = MODELS[name]
    kind = getattr(transformers, name)
    loaded = Loaded(kind(kind.config_class(**sizes)), (), batch, None, name)
    for pin in ({"data": 2, "micro_batches": 1}, {"tensor": 2}):
        (found,) = check(loaded, 2, pin=pin, steps=2)
        assert found["status"] == "ok" and found["reason"] is None, found
