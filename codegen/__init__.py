"""Writes the program that a plan stands for: a folder of readable Python that uses `runtime`."""

from codegen.emit import Program, check_target, emit
from codegen.load import load

__all__ = ["Program", "check_target", "emit", "load"]
