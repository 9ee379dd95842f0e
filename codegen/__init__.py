"""Writes the program that a plan stands for: a folder of readable Python that uses `runtime`."""

from codegen.emit import Program, emit
from codegen.load import load

__all__ = ["Program", "emit", "load"]
