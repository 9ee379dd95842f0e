"""Runs an exported graph through the rules of `ir.trace.lift`.

Input: an exported graph (pre-dispatch ATen). Output, when interpreted under `make_fx`: the same
function in terms of `shardwright::einsum`, `attention`, `cross_entropy`, `normalize`, `dropout`,
elementwise operations, sums and views. Dropout is numbered here, in the order of its calls.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from ir.errors import CaptureError
from ir.trace.adapters import FxNode, is_number
from ir.trace.dropouts import DRAWS, Dropouts
from ir.trace.library import ops
from ir.trace.lift import LIFTS, matmul
from ir.trace.lift_layers import LAYERS
from ir.trace.lift_losses import LOSSES, POINTWISE
from ir.trace.lift_windows import WINDOWS
from ir.trace.reasons import meaning_of, said_by
from ir.trace.source import source_of

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
COPY = aten.copy_.default
RULES = LIFTS | LOSSES | LAYERS | WINDOWS
REWRITTEN = RULES.keys() - {*POINTWISE, aten.embedding.default}
"""What the rules leave none of."""
RECURRENT = {
    aten.lstm.input, aten.lstm.data, aten.gru.input, aten.gru.data, aten.rnn_tanh.input,
    aten.rnn_tanh.data, aten.rnn_relu.input, aten.rnn_relu.data, aten.gru_cell.default,
    aten.lstm_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default,
}  # fmt: skip


class AttentionLift:
    """Lifts scaled_dot_product_attention; needs dropout ids, hence bound to an interpreter."""

    def __init__(self, interpreter: Lift):
        self.interpreter = interpreter

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        learned = attn_mask is not None and attn_mask.is_floating_point()
        whole = q.dim() == k.dim() == v.dim() == 4 and q.shape[1] % k.shape[1] == 0
        if whole and not dropout_p and not learned and _same_rows(q, k, v):
            mask = None if attn_mask is None else attn_mask.reshape(_four(attn_mask))
            out: Tensor = ops.attention(q, k, v, mask, is_causal, float(scale))[0]
            return out
        return self.explicit(q, k, v, attn_mask, dropout_p, is_causal, scale)

    def explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float,
                 causal: bool, scale: float) -> Tensor:  # fmt: skip
        """softmax(q kᵀ · scale + mask) v, step by step."""
        if q.shape[-3:-2] != k.shape[-3:-2] and q.dim() > 2:
            repeat = q.shape[-3] // k.shape[-3]
            k, v = k.repeat_interleave(repeat, -3), v.repeat_interleave(repeat, -3)
        scores = matmul(q, k.transpose(-2, -1)) * scale
        if causal:
            rows = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
            mask = rows >= torch.arange(k.shape[-2], device=q.device)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(mask.logical_not(), -math.inf)
        elif mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, -1)
        if dropout_p:
            weights = self.interpreter.dropouts.plain(weights, dropout_p)
        return matmul(weights, v)


def _same_rows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.shape[0] == k.shape[0] == v.shape[0] and k.shape[:3] == v.shape[:3]


def _four(mask: Tensor) -> list[int]:
    return [1] * (4 - mask.dim()) + list(mask.shape)


class Lift(fx.Interpreter):
    """Runs an exported graph through `RULES`."""

    def __init__(self, module: fx.GraphModule, *, counter: list[int] | None = None,
                 no_grad: bool = False):  # fmt: skip
        super().__init__(module)
        self.dropouts = Dropouts(counter if counter is not None else [0])
        self.no_grad = no_grad
        self.free: list[int | torch.SymInt] = []
        self.extra_traceback = False
        self.attention = AttentionLift(self)

    def run_node(self, n: FxNode) -> Any:
        """Runs one node; a refusal names the module and line that it comes from."""
        try:
            if n.users and _draws(n.target) and n.target not in self.dropouts.rules:
                raise CaptureError(f"{n.target} {DRAWS}")
            out = super().run_node(n)
            if torch.Tag.inplace_view in getattr(n.target, "tags", ()):
                self.env[n.args[0]] = out
            if any(map(is_number, self.free)):
                raise CaptureError(f"{n.target} fixes the number of rows to {int(self.free[0])}")
            return out
        except CaptureError as error:
            raise CaptureError(f"can't capture {_place(n)}: {error}") from error
        except Exception as error:  # whatever torch raises for an operation that it can't trace
            said = meaning_of(error) or f"{type(error).__name__}: {said_by(error)}"
            raise CaptureError(f"can't capture {_place(n)}: {n.target}: {said}") from error

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes sizes that may be any number: an operation that fixes one is refused."""
        value = super().placeholder(target, args, kwargs)
        if isinstance(value, Tensor):
            self.free += [size for size in value.shape[:1] if not is_number(size)]
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.rewrite(target, args, kwargs)
        return _detached(out) if self.no_grad and not _mutates(target) else out

    def rewrite(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (aten._assert_tensor_metadata.default, aten._assert_async.msg,
                      aten._assert_scalar.default, aten.sym_constrain_range_for_size.default):
            return None  # fmt: skip
        if target in self.dropouts.rules:
            return self.dropouts.rules[target](*args, **kwargs)
        if target is ATTENTION:
            return self.attention(*args, **kwargs)
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            return self.region(not args[0], args[1], args[2:])
        if target is torch.ops.higher_order.wrap_with_autocast:
            return self.autocast(*args)
        if target in RECURRENT:
            raise CaptureError(
                f"{target} is a fused recurrent layer: its backward depends on the device's "
                "library, so it can't be cut or moved. Write the recurrence with plain operations."
            )
        if target in RULES:
            return RULES[target](*args, **kwargs)
        plain = _without_writing(target)
        if plain is None or all(map(is_number, args[0].shape)):
            return target(*args, **kwargs)
        out = RULES.get(plain, plain)(*args, **kwargs)
        return out if torch.Tag.inplace_view in target.tags else args[0].copy_(out)

    def region(self, no_grad: bool, module: fx.GraphModule, operands: tuple[Any, ...]) -> Any:
        inner = Lift(module, counter=self.dropouts.counter, no_grad=no_grad or self.no_grad)
        return inner.run(*operands)

    def autocast(self, device_type: str, dtype: Any, enabled: bool, cache: Any,
                 module: fx.GraphModule, *operands: Any) -> Any:  # fmt: skip
        if enabled:
            raise CaptureError(
                "torch.autocast inside the model is not captured: its casts depend on the "
                "device. Give the model in the dtypes that it should run in."
            )
        return self.region(self.no_grad, module, operands)


def _place(node: FxNode) -> str:
    return str(source_of(node)) or "the model"


def unlifted(graph: fx.Graph) -> bool:
    """Whether a call is left that a rule would change, or that writes into what it reads: torch
    makes both when it takes an operation apart that has no rule."""
    calls = (n for n in graph.nodes if n.op == "call_function")
    return any(
        n.target in REWRITTEN or (_mutates(n.target) and n.args[0].op != "placeholder")
        for n in calls
    )


def _draws(target: Any) -> bool:
    seeded = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return seeded and target not in RULES and target not in (ATTENTION, *RECURRENT)


def _detached(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.detach()
    return type(out)(map(_detached, out)) if isinstance(out, (list, tuple)) else out


def _without_writing(target: Any) -> Any:
    """What `add` is to `add_`, or None: torch can't write in place where a size is a symbol."""
    name = target._schema.name.removeprefix("aten::") if _mutates(target) else ""
    if not name.endswith("_") or name.endswith("__") or target is COPY:
        return None
    packet = getattr(aten, name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None)


def _mutates(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
