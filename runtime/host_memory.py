"""Keeps freed memory in a process that computes on the CPU, so that no step pays for it again.

The C library gives large freed blocks back to the system, and the top of its heap; the next step
asks for the same bytes and pays a page fault for each 4 KiB, which on a small model takes nearly
as long as the step itself. Peak memory stays what it was: the next step needs it anyway.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
NEVER = -1
LARGEST_KEPT_BYTES = (2**30, 2**25)
"""Blocks up to this size are kept. glibc 2.36 takes the first; where that is refused, the second is
the most that the C library raises its threshold to by itself."""


def keep_freed_memory() -> bool:
    """Sets it for this process; whether its C library can (glibc only)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS; Windows
        return False
    kept = any(mallopt(M_MMAP_THRESHOLD, size_bytes) for size_bytes in LARGEST_KEPT_BYTES)
    return bool(mallopt(M_TRIM_THRESHOLD, NEVER)) and kept
