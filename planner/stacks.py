"""What software stacks do, as named mechanisms: the traits that a row's `framework` stands for.

Input: a row's columns. Output: `Traits`. A stack differs from another only in what it does, never
by a factor; a row that states a mechanism (overlap, compile, graphs, kernels) overrides the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from ir.device import Device
from ir.errors import UsageError
from planner.attention_time import UNFUSED, flash_kernel
from planner.memory_traits import Memory, Update
from planner.quantise import SCALINGS
from planner.traits import Traits

LOW_PRECISIONS = {"fp8": "float8_e4m3fn", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
OWN_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
PRECISIONS = (*OWN_PRECISIONS, *LOW_PRECISIONS)
VOCABULARY_MULTIPLE = 128
MONTH = len("2022-02")
_GRADIENTS = {"": "", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Stack:
    """Mechanisms of one stack.

    Kernels. `fuses`: chains of elementwise ops are one kernel each (hand-written, JIT or a
    compiler); `compiles`: across norms too, which hand-written kernels do not. `graph`: the step is
    launched as a whole, by a compiler or CUDA graphs. `blocking`: the host waits for every kernel
    (BLOOM's jobs hung without CUDA_LAUNCH_BLOCKING=1: bigscience, train/tr11-176B-ml/
    chronicles-prequel.md, "dealing with JZ hanging"). `attention`:
    the kernel; "": the device's own. `dropout`: trains with attention dropout, Megatron's default
    before 2022's large models. `fused_loss`: cross-entropy is one kernel on 16-bit logits;
    `compiles_loss`: it is where the model is compiled. `wide_logits`: the loss is that of fp32
    logits.
    `fuses_accumulation`: products of weight gradients add to the sum (Megatron's
    `gradient_accumulation_fusion`). `scaling`: of 8-bit operands. `pads_vocabulary`: to a multiple
    of 128 on every rank of the tensor axis (Megatron's `make_vocab_size_divisible_by`), so that its
    products stay aligned.

    Recomputation. `selective`: what it keeps: all but core attention, or results of every second
    product ("op"). `recomputes`: layers always recompute something, at least core attention.

    Exchanges. `overlaps`: gradients are reduced under backward. `combines`: in buckets.
    `fp32_gradients`: gradients of bf16 runs are accumulated and reduced in float32; fp16 with its
    scaled loss keeps fp16 (Megatron-LM arguments.py; DeepSpeed's FP16 and BF16 optimizers).
    `hides_tensor`: collectives of the tensor axis run in pieces under the products beside them.
    `scatters_sends`: see `planner.sends`. `whole_tensors`: ZeRO-1 hands out whole tensors, which
    their owners broadcast after the update (InternEvo's hybrid_zero_optim.py, with
    `overlap_sync_param=False` as in its configurations).

    State. `master_weights`, `memory` and `rest` as in `Traits`.
    """

    overlaps: bool = True
    fuses: bool = True
    graph: bool = False
    fp32_gradients: bool = True
    attention: str = ""
    selective: str = "core_attn"
    hides_tensor: bool = False
    dropout: bool = False
    fused_loss: bool = False
    pads_vocabulary: bool = False
    compiles: bool = False
    fuses_accumulation: bool = False
    whole_tensors: bool = False
    scatters_sends: bool = False
    blocking: bool = False
    combines: bool = True
    recomputes: bool = False
    scaling: str = "delayed"
    compiles_loss: bool = True
    wide_logits: bool = True
    master_weights: bool = True
    rest: str = "middle"
    memory: Memory = Memory()


_FOREACH_ADAM = 8
"""Bytes per parameter of torch.optim.AdamW's foreach kernels: roots of the second moments, and
these with epsilon (torch/optim/adamw.py, `_multi_tensor_adamw`)."""
_ZERO1 = Memory(
    keeps_outputs=True, update=Update(shard=2 + 4, largest=8, bucket_bytes=10**9)
)  # fmt: skip
"""DeepSpeed 0.6, runtime/zero/stage_1_and_2.py: `step` flattens the shard's fp16 gradients and
casts them to fp32; before that `get_grad_norm_direct` takes each one's norm in float64. Buckets of
5e8 fp16 elements are reduced. runtime/pipe/engine.py: `pipe_buffers` have the stages' outputs."""
_BF16 = Memory(
    keeps_gradients=True, keeps_outputs=True, update=Update(whole=2, bucket_bytes=10**9)
)  # fmt: skip
"""The same, runtime/bf16_optimizer.py: `update_hp_grads` adds bf16 gradients to one flat fp32
tensor of all; for the reduction engine.py's `allreduce_bucket` casts that to
`communication_data_type`, bfloat16. Updated parameters are gathered in buckets of 5e8."""
_HYBRID_ZERO = Memory(
    update=Update(shard=2 + 4 + _FOREACH_ADAM, early=4, bucket_bytes=2**29)
)  # fmt: skip
"""InternLM v0.2, solver/optimizer/hybrid_zero_optim.py: `_step` flattens the shard's gradients and
casts them; before that `compute_norm` casts all, one by one. Buckets of 512 MiB."""
_INTERN_FSDP = Memory(keeps_shards=True, update=Update(shard=4 + _FOREACH_ADAM))
"""The same, fsdp_optimizer.py: `FSDPadaptOptimizer` has fp32 copies of FSDP's bf16 shards, and
`step` casts all their gradients."""
_KEMPNER = Memory(sums_whole=True, whole_logits=True)
"""KempnerForge of April 2026: scripts/train.py suspends FSDP2's reduction until the last
micro-batch; distributed/tensor_parallel.py gathers the output layer's columns."""

_MEGATRON = Stack(pads_vocabulary=True, fuses_accumulation=True)
_MEGATRON_2021 = replace(
    _MEGATRON, overlaps=False, dropout=True, fuses_accumulation=False, scatters_sends=True
)
_DEEPSPEED = replace(_MEGATRON_2021, rest="filled", memory=_BF16)
"""DeepSpeed 0.6, runtime/utils.py: `partition_balanced` finds the least that the fullest stage can
have, and fills one stage after the other with it."""
_DEEPSPEED_FP16 = replace(_DEEPSPEED, memory=_ZERO1)
_FSDP = Stack(fuses=False, attention="flash2", selective="op")
_TORCHAO = replace(_FSDP, scaling="tensorwise")
_INTERNEVO = Stack(
    fp32_gradients=False, attention="flash2", fused_loss=True, whole_tensors=True, rest="last",
    memory=_HYBRID_ZERO,
)  # fmt: skip
_PAX = Stack(compiles=True, combines=False, recomputes=True)
"""Pax on GPUs: its scripts' XLA_FLAGS turn CUDA graphs off and combine no gradient above 50 kB
(NVIDIA/JAX-Toolbox, rosetta/projects/pax/README.md); layers in a scan have a checkpoint policy."""
STACKS = {
    "megatron-deepspeed": _DEEPSPEED,
    "megatron-deepspeed fp16": _DEEPSPEED_FP16,
    "megatron-deepspeed bf16 of 2022-02": replace(_DEEPSPEED, blocking=True),
    "megatron-deepspeed fp16 of 2022-02": replace(_DEEPSPEED_FP16, blocking=True),
    "megatron-deepspeed 2022-02 bf16": _DEEPSPEED,  # these two tables: before the first hang
    "megatron-deepspeed 2022-02 fp16": _DEEPSPEED_FP16,
    "megatron-lm 2021": _MEGATRON_2021,
    "megatron-core": _MEGATRON,
    "megatron-core CI": replace(_MEGATRON, dropout=True),
    "megatron-bridge": replace(_MEGATRON, graph=True, hides_tensor=True),
    "nemo-megatron": replace(_MEGATRON, hides_tensor=True),
    "nemo-megatron (MLPerf)": replace(_MEGATRON, fp32_gradients=False, hides_tensor=True),
    "llm-foundry (FSDP1)": replace(
        _FSDP, attention="flash1", fp32_gradients=False, fused_loss=True
    ),
    "fms-fsdp (FSDP1)": replace(
        _FSDP, fuses=True, fp32_gradients=False, selective="every-2nd-layer"
    ),
    "torchtitan (FSDP2)": _TORCHAO,
    **{
        f"torchtitan (FSDP2) Table {n}": replace(_TORCHAO, compiles_loss=False)
        for n in range(1, 5)
    },
    "kempnerforge (FSDP2)": replace(
        _TORCHAO, wide_logits=False, compiles_loss=False, master_weights=False, memory=_KEMPNER
    ),
    "internevo": _INTERNEVO,
    "internevo zero 3": replace(_INTERNEVO, memory=_INTERN_FSDP),
    "oneflow": Stack(graph=True, dropout=True, memory=Memory(is_planned=True)),
    "jax-pax": replace(_PAX, attention="compiled_softmax"),
    "jax-pax +TE": _PAX,
}
"""From the stacks' own documentation and code at the release of the rows. A name may be followed by
what else it depends on: the release, the precision and the release's month, the precision alone, or
"zero" and the stage."""


def stack_of(row: Mapping[str, str]) -> Stack | None:
    """The most special entry for a row; None for unknown stacks."""
    name = row.get("framework", "")
    release, precision = row.get("release", ""), row.get("precision", "")
    of_month = f"{precision} of {release[:MONTH]}"
    details = (release, of_month, precision, f"zero {row.get('zero_stage', '')}")
    for key in (*(f"{name} {detail}" for detail in details), name):
        if key in STACKS:
            return STACKS[key]
    return None


def traits_of(row: Mapping[str, str], device: Device) -> Traits:
    """The traits of a row's stack and configuration; unknown stacks do as plain torch."""
    stack = stack_of(row) or Stack(fuses=False)
    precision = row.get("precision") or "bf16"
    if precision not in PRECISIONS:
        raise UsageError(f"precision={precision!r}: it is one of {', '.join(PRECISIONS)}")
    wide = stack.fp32_gradients and precision != "fp16"
    gradients = row.get("grads_dtype") or ("fp32" if wide else "")
    if gradients not in _GRADIENTS:
        raise UsageError(f"grads_dtype={gradients!r}: it is one of fp32, bf16, fp16")
    return Traits(
        attention=_attention(row, device, stack),
        fused_elementwise=_states(row, "compile", stack.fuses),
        matmul_precision=LOW_PRECISIONS.get(precision, ""),
        overlap_gradients=_states(row, "overlap_grad", stack.overlaps),
        overlap_tensor=_states(row, "tp_overlap", stack.hides_tensor),
        dropout=stack.dropout,
        fused_loss=stack.fused_loss,
        eager_loss=row.get("compile") == "1" and not stack.compiles_loss,
        rest=stack.rest,
        memory=stack.memory,
        library_kernels=True,
        fuses_norms=stack.compiles or _states(row, "compile", False),
        fused_accumulation=stack.fuses_accumulation,
        whole_tensors=stack.whole_tensors,
        scatters_sends=stack.scatters_sends,
        blocking=stack.blocking,
        combines_gradients=stack.combines,
        scaling=_scaling(row, precision, stack),
        clips=True,
        scales_loss=precision == "fp16",
        gradient_dtype=_GRADIENTS[gradients],
        master_weights=stack.master_weights,
        eager=not (_states(row, "cuda_graph", stack.graph) or _states(row, "compile", False)),
    )


def selective_of(row: Mapping[str, str]) -> str:
    """What "selective" means in a row's stack."""
    return (stack_of(row) or Stack()).selective


def least_recompute(row: Mapping[str, str]) -> str:
    """What a row's stack recomputes at least where the row does not say."""
    return "selective" if (stack_of(row) or Stack()).recomputes else "none"


def has_wide_logits(row: Mapping[str, str]) -> bool:
    """Whether a row's stack makes fp32 logits for the loss."""
    stack = stack_of(row) or Stack()
    is_fused = stack.fused_loss or (stack.compiles_loss and row.get("compile") == "1")
    return stack.wide_logits and not is_fused


def padded_vocabulary(row: Mapping[str, str], vocabulary: int) -> int:
    """The vocabulary as a row's stack lays it out.

    >>> padded_vocabulary({"framework": "megatron-deepspeed", "tp": "8"}, 250000)
    250880
    """
    if not (stack_of(row) or Stack()).pads_vocabulary:
        return vocabulary
    multiple = VOCABULARY_MULTIPLE * int(float(row.get("tp") or 1))
    return ceil(vocabulary / multiple) * multiple


def _attention(row: Mapping[str, str], device: Device, stack: Stack) -> str:
    """Unfused where the row says so; a fused kernel no newer than the stack."""
    if row.get("attention_flash") == "0":
        return "fused_softmax" if stack.fuses else "unfused"
    usual = flash_kernel(device)
    if stack.attention in UNFUSED:
        return stack.attention
    return stack.attention if stack.attention and usual.startswith("flash") else usual


def _scaling(row: Mapping[str, str], precision: str, stack: Stack) -> str:
    """Block scales come with their precisions; a row may name its recipe."""
    if precision in ("mxfp8", "nvfp4"):
        return "block"
    named = [name for name in SCALINGS if name in (row.get("release") or "")]
    return named[0] if named else stack.scaling


def _states(row: Mapping[str, str], column: str, default: bool) -> bool:
    text = row.get(column) or ""
    if text not in ("", "0", "1"):
        raise UsageError(f"{column}={text!r}: it is 0, 1 or empty")
    return text == "1" if text else default
