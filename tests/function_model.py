"""A model of one layer and any function behind it, for tests of single functions."""

from collections.abc import Callable

from torch import Tensor, nn


class OneFunction(nn.Module):
    """Its loss is the mean square of what the function makes of eight features."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).pow(2).mean()
