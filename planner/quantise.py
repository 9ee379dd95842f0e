"""What it takes to bring the operands of a product to 8 or 4 bits, by how they get their scales.

Input: a scaling and the elements of an operand. Output: bytes through memory. An operand serves
two of a layer's three products (input: result and weight gradient; weight: result and input
gradient; gradient: both gradients), so each product bears half.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scaling:
    """Bytes read and written per 16-bit element for both uses of an operand, and kernels.

    `fused_bytes`: where kernels that make the operand leave it quantised, or find its maximum.
    `pace`: of the product's kernel over that of one scale per tensor.
    """

    bytes_per_element: float
    fused_bytes: float
    kernels: int
    pace: float = 1.0


SCALINGS = {
    "delayed": Scaling(4.0, 2.0, 1),
    "tensorwise": Scaling(6.0, 6.0, 2),
    "rowwise": Scaling(8.0, 8.0, 2, pace=0.95),
    "block": Scaling(4.0, 4.0, 1),
}
"""`delayed`: by the maxima of earlier steps; Transformer Engine's cast-transpose reads 16 bits and
writes the value and its transpose, its norms and activations write both without the read.
`tensorwise`: by the tensor's own maximum: a pass reads it, another reads again and writes both
layouts. `rowwise`: along both dims: read, write, and a 16-bit transpose that is read once more.
`block`: maxima of 32 or 16 neighbours; read, write both layouts. Bytes: torchao's own account
(torchao/testing/float8/roofline_utils.py, of activations; weights take 0 to 2 more). Pace: most
shapes of row-wise kernels reach 90 to 100 % of tensor-wise ones (pytorch/pytorch issue 147971)."""
USES = 2.0


def quantise_bytes(scaling: str, elements: float, *, fused: bool) -> float:
    """What one product bears for operands of so many elements together.

    >>> quantise_bytes("tensorwise", 1e6, fused=True)
    3000000.0
    """
    kind = SCALINGS[scaling]
    return (kind.fused_bytes if fused else kind.bytes_per_element) * elements / USES
