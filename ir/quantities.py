"""Seconds and bytes as people read them.

Input: a number. Output: text with a unit that suits it.
"""

GIB, MIB = 2**30, 2**20


def duration(seconds: float) -> str:
    """Three or four digits and a unit.

    >>> duration(0.01234)
    '12.3 ms'
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3f} s" if unit == "s" else f"{seconds / size:.1f} ms"
    return f"{seconds * 1e6:.1f} µs"


def size(size_bytes: float) -> str:
    """One decimal and a unit.

    >>> size(7.1 * 1024), size(96)
    ('7.1 KiB', '96 B')
    """
    if abs(size_bytes) < 1024:
        return f"{size_bytes:.0f} B"
    for unit, scale in (("GiB", GIB), ("MiB", MIB)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes / 1024:.1f} KiB"
