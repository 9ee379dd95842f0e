"""What numbers a command line takes: `count`, `seconds`, `rate`, `norm`, as the types of its flags.

Input: an argument's text. Output: its value, or argparse's error, which ends with exit code 2.
"""

import argparse
import math


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def seconds(text: str) -> float:
    """A time to allow: finite, and above zero."""
    value = _finite(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, such as 30")
    return value


def filled(text: str) -> str:
    """A text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("nothing stands behind it. Give a value, or leave it out")
    return text


def rate(text: str) -> float:
    """A learning rate: finite, and not below zero."""
    value = _finite(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0, such as 1e-3")
    return value


def norm(text: str) -> float:
    """What a norm is clipped to: finite, and above zero."""
    value = _finite(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, such as 1.0")
    return value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
