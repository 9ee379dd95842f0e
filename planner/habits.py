"""Restrictions that make a sharding that of a given program instead of the best one.

Read by the sharding program; `predict` has one for every way in which programs are written by hand.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Habits:
    """`cut_weights`: matrices are cut, and used as they are stored: never gathered.
    `whole_activations`: no factor of what goes from block to block is cut, inside them neither
    (Megatron's tensor parallelism before its sequence parallelism, Korthikanti et al. 2022).
    `cut_activations`: what goes from block to block is cut (that sequence parallelism).
    """

    cut_weights: bool = False
    whole_activations: bool = False
    cut_activations: bool = False
