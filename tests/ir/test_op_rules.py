"""Every row of the op table, cut in each way that it offers over 2, 3 and 4 ranks, stays right."""

import pytest
import torch

from ir.layout import PARTIAL, REPLICATE
from ir.ops.table import LINEAR, SIGNATURES, op_def
from tests.ir.aten_examples import EXAMPLES
from tests.ir.one_node import Example, offered, run_cut

DEGREES = (2, 3, 4)


def names(example: Example) -> str:
    return example.name


@pytest.mark.parametrize("example", EXAMPLES, ids=names)
def test_cut_operations_compute_the_whole(example: Example) -> None:
    for degree in DEGREES:
        for strategy in offered(example, degree)[1]:
            found = run_cut(example, strategy, degree)
            for name, right in example.results.items():
                wide = right.dtype in (torch.float64, torch.complex128)
                torch.testing.assert_close(
                    found[name], right, rtol=1e-9, atol=1e-12 if wide else 1e-6, equal_nan=True,
                    msg=lambda text, s=strategy: f"{example.node} cut as {s}: {text}",
                )  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=names)
def test_rules_offer_what_the_operation_allows(example: Example) -> None:
    for degree in DEGREES:
        first, *others = offered(example, degree)[1]
        assert not first.divides and set(first.operands) <= {REPLICATE}
        cuts = [option for option in others if option.divides]
        partials = [option for option in others if PARTIAL in option.operands]
        assert (len(cuts), len(partials)) == (example.cuts, example.partials)
        assert len(cuts) + len(partials) == len(others)


@pytest.mark.parametrize("example", EXAMPLES, ids=names)
def test_pieces_of_unequal_size_are_not_offered(example: Example) -> None:
    """No dim of any example divides by 11."""
    assert not [option for option in offered(example, 11)[1] if option.divides]


def test_every_row_has_an_example() -> None:
    shown = {example.node.op for example in EXAMPLES}
    assert {*SIGNATURES, *LINEAR} <= shown


def test_an_operation_without_a_row_stays_whole() -> None:
    assert not op_def("logcumsumexp.default").known
    assert op_def("exp.default").known
