"""Writes the program that a plan stands for: a folder of readable Python that uses `runtime`."""

from codegen.emit import Program, emit
from codegen.load import compile

__all__ = ["Program", "compile", "emit"]
