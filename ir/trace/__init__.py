"""`trace`: a model and example arguments become a `Graph`.

The model is exported with a symbolic batch and repeated siblings folded, lifted to the small op
set, cut into segments, and each distinct segment is differentiated once.
"""

from ir.trace.build import trace
from ir.trace.fold import marks_of
from ir.trace.step import find_loss

__all__ = ["find_loss", "marks_of", "trace"]
