"""A copy of a model in which nothing is dropped out, for comparing what else it does.

Input: a model. Output: its copy, in which every module's own dropout probability is 0. A constant
probability in a call stays.
"""

from __future__ import annotations

import copy

from torch import nn

DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip


def without_dropout(model: nn.Module) -> nn.Module:
    """Probabilities are `p` of torch's dropout modules, and of any module numbers whose names speak
    of dropout, such as `attention_dropout`."""
    kept = copy.deepcopy(model)
    for module in kept.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.startswith("drop")):
                setattr(module, name, 0.0)
    return kept
