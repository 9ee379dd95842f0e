"""The op table: one row per operation says how it may be cut, what it costs, how it is written."""

from ir.ops.table import OpDef, op_def

__all__ = ["OpDef", "op_def"]
