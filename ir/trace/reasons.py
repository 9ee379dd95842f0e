"""What torch's errors about a model that it can't trace mean to the user, and what to try.

Input: an exception. Output: one or two sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ir.trace.source import in_users_words

READS_VALUES = (
    "data-dependent", "DataDependent", "DynamicOutputShape", "PendingUnbackedSymbol",
)  # fmt: skip
"""What torch says of a program that depends on a tensor's value."""
MEANINGS = (
    (READS_VALUES, "It depends on the value of a tensor (a branch, .item() or a size read from "
     "data), so one captured program would be wrong for other data. Use torch.where or torch.cond "
     "instead of the branch, or compute the value outside the model."),
    (("fake tensor in the exported program constant",), "It keeps a tensor that it made while "
     "being traced for a later use: in a cache of keys and values, which a training step does not "
     "need (use_cache=False), in a list or an attribute, or by writing through .data."),
    (("Expected inputs of BF16 type",), "torch captures a product of grouped matrices in "
     "bfloat16 only: make the model with dtype=torch.bfloat16."),
    (("FakeTensorDeviceMismatch",), "Its tensors lie on different devices: move the model and its "
     "batch to one."),
    (("__obj_flatten__",), "It holds an object of a C++ class, as the modules of a quantized model "
     "do: those can't be trained. Give the model that it was made from."),
    ((".numpy() is not supported",), "It leaves torch with .numpy(), and what is computed there "
     "can't be captured. Use operations of torch."),
    (("SymIntArrayRef expected", "NO overloaded args that actually triggered",
      "is not tracked with proxy"),
     "torch can't trace this operation for any number of rows. Write it with other operations, or "
     "compute it outside the model."),
)  # fmt: skip
"""Words of torch, and what they mean."""
PLACE_IN_TORCH = re.compile(r"^/\S+\.cpp:\d+: ")
ADDRESS = re.compile(r" object at 0x[0-9a-f]+")


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from; at most as many as there are, also in a circle."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def reason_of(error: BaseException) -> str:
    """What failed, and what to try; else torch's own words."""
    return meaning_of(error) or f"torch.export says: {type(error).__name__}: {said_by(error)}"


def meaning_of(error: BaseException) -> str:
    """What an error that torch is known to raise means; of a strange one, what led to it."""
    for cause in chain(error):
        text = f"{type(cause).__name__} {cause}"
        for words, meaning in MEANINGS:
            if any(word in text for word in words):
                return meaning
    return ""


def said_by(error: BaseException) -> str:
    """The first line of an error, without its place in torch's own sources, nor addresses."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return in_users_words(ADDRESS.sub("", PLACE_IN_TORCH.sub("", lines[0])))[:300]
