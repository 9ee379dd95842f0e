"""Facts about a software stack and a configuration that neither graph nor mesh says.

Input: nothing but names. Output: `Traits`, which cost models and the memory count read. The
defaults are what our own runtime does: exchanges after backward, its own precision, one stage per
pipeline rank, kernels launched one by one.
"""

from dataclasses import dataclass, replace

from ir.device import Device
from ir.errors import UsageError
from planner.attention_time import KERNELS, flash_kernel
from planner.memory_traits import Memory
from planner.quantise import SCALINGS

ATTENTIONS = ("auto", *KERNELS)
PRECISIONS = ("", "tf32", "float8_e4m3fn", "mxfp8", "nvfp4")
RESTS = ("middle", "last", "filled")
"""One layer more for stages in the middle, or for the last ones; or every stage is filled with as
many as the largest has, before the next one gets any."""


@dataclass(frozen=True, slots=True)
class Traits:
    """How a step is executed; `UsageError` for values that no stack has.

    Kernels. `attention`: one of `attention_time`; "auto": the device's usual fused one.
    `fused_elementwise`: chains of elementwise ops, norms and cross-entropy are one kernel each.
    `fuses_norms`: norms join the chains before them, as under a compiler. `library_kernels`:
    without either, norms with their weights and the backward of splits are one kernel each.
    `fused_accumulation`: products of weight gradients add to the sum themselves. `fused_loss`:
    cross-entropy is one kernel that keeps no copies of the logits. `dropout`: attention drops out
    scores, whatever was traced. `eager`: the host launches every kernel, so it can be what is
    waited for. `blocking`: and waits for each (CUDA_LAUNCH_BLOCKING=1). `matmul_precision`: of
    matrix products; "" as traced. `scaling`: how operands in 8 and 4 bits get their scales
    (`planner.quantise`).

    Exchanges. `overlap_gradients`: the data axis reduces gradients of one layer under the backward
    of the next. `combines_gradients`: in buckets; without it every tensor has a collective of its
    own. `overlap_tensor`: collectives of the tensor axis run under products. `scatters_sends`: its
    ranks share the sending of what all hold. `zero_stage`: 1 cuts optimizer state over `zero_group`
    data ranks (0: all), 2 also gradients, 3 also parameters. `whole_tensors`: stage 1 hands out
    tensors whole: gradients are all-reduced, and every owner broadcasts what it updated.
    `virtual_stages`: pieces of the model per pipeline rank.

    State. `gradient_dtype`: of accumulated and reduced gradients; "" as the parameter.
    `master_weights`: fp32 copies of parameters and fp32 optimizer state. `fused_optimizer`: one
    pass over all state. `clips`: gradients are cut to a norm. `scales_loss`: they are brought to
    float32 and divided by the loss scale first. `eager_loss`: cross-entropy is not fused, however
    fused the rest. `rest`: the stages that layers which do not divide evenly go to, `RESTS`.
    `memory`: what is held beside a step's own values.
    """

    attention: str = "auto"
    fused_elementwise: bool = False
    fuses_norms: bool = True
    library_kernels: bool = False
    fused_accumulation: bool = False
    matmul_precision: str = ""
    scaling: str = "delayed"
    overlap_gradients: bool = False
    combines_gradients: bool = True
    overlap_tensor: bool = False
    zero_stage: int = 0
    zero_group: int = 0
    whole_tensors: bool = False
    virtual_stages: int = 1
    scatters_sends: bool = False
    gradient_dtype: str = ""
    master_weights: bool = False
    fused_optimizer: bool = True
    clips: bool = False
    scales_loss: bool = False
    dropout: bool = False
    fused_loss: bool = False
    eager_loss: bool = False
    eager: bool = False
    rest: str = "middle"
    memory: Memory = Memory()
    blocking: bool = False

    def __post_init__(self) -> None:
        _known("attention", self.attention, ATTENTIONS)
        _known("scaling", self.scaling, tuple(SCALINGS))
        _known("matmul_precision", self.matmul_precision, PRECISIONS)
        _known("gradient_dtype", self.gradient_dtype, ("", "bfloat16", "float16", "float32"))
        _known("zero_stage", self.zero_stage, (0, 1, 2, 3))
        _known("rest", self.rest, RESTS)
        for name in ("zero_group", "virtual_stages"):
            least = int(name == "virtual_stages")
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}: it must be at least {least}.")

    def on(self, device: Device) -> "Traits":
        """The same with "auto" replaced by what current libraries choose on that device."""
        if self.attention != "auto":
            return self
        return replace(self, attention=flash_kernel(device))


def _known(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        options = ", ".join(repr(option) for option in known)
        raise UsageError(f"unknown {name} {value!r}. Known: {options}.")
