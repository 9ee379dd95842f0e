"""Differences where a model's own training gives NaN or infinity.

Input: what a program gives and what the plain model gives. Output: their difference, in which two
entries that are no finite numbers are equal, and words for where the plain model gives none. A sum
of infinities is NaN or infinite by the order of its terms, so these two are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite

from torch import Tensor

from runtime.errors import Refused

MOST_NAMED = 4
"""Tensors without numbers that a message names."""


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of an entry; infinite where only one is a number."""
    found, wanted = _countable(found), _countable(wanted)
    same = (found == wanted) | ~(found.isfinite() | wanted.isfinite())
    far = (found - wanted).abs()[~same]
    return float(far.nan_to_num(inf, inf).max()) if far.numel() else 0.0


def relative(found: float, wanted: float) -> float:
    """The difference of two losses, relative to the second; as `difference` of what is no number.

    >>> relative(3.0, 2.0), relative(float("nan"), inf), relative(1.0, inf)
    (0.5, 0.0, inf)
    """
    if found == wanted or not (isfinite(found) or isfinite(wanted)):
        return 0.0
    if not (isfinite(found) and isfinite(wanted)):
        return inf
    return abs(found - wanted) / max(abs(wanted), 1e-300)


def largest(tensor: Tensor) -> float:
    """The largest magnitude among the entries that are finite numbers."""
    sizes = _countable(tensor).abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0


def _countable(tensor: Tensor) -> Tensor:
    """Of a dtype that torch computes with, unlike those of one byte."""
    if tensor.element_size() > 1:
        return tensor
    return tensor.double() if tensor.is_floating_point() else tensor.int()


def numberless(gradients: Mapping[str, Tensor]) -> str:
    """Which of a plain model's own gradients are no numbers; empty if all are."""
    bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    if not bad:
        return ""
    first = gradients[bad[0]]
    kind = "NaN" if first.isnan().any() else "infinite"
    entries = int((~first.isfinite()).sum())
    named = f" (as for {', '.join(bad[1:MOST_NAMED])})" if len(bad) > 1 else ""
    return (
        f"the plain model's own gradient of {bad[0]} is {kind} in {entries} of {first.numel()} "
        f"entries{named}, in step 1, without Shardwright. It counts as equal to the program's if "
        "that is no number either, so little is compared: look at the model and its batch."
    )


def check_losses(losses: Sequence[float], gradients: Mapping[str, Tensor]) -> None:
    """Raises `Refused` if a loss is no finite number; of a later step only if the first gradients
    are, which else are the reason."""
    for step, loss in enumerate(losses[:1] if numberless(gradients) else losses, 1):
        if not isfinite(loss):
            raise Refused(
                f"the plain model's own loss is {float(loss)} in step {step}, without Shardwright: "
                "there is nothing to compare with. Look at the model and its batch."
            )
