"""Constants of the communication libraries: what a call, a step and a protocol cost.

Those without a remark: NCCL 2.30.7 src/graph/tuning.cc. "Fitted": least mean log error on every
second row of the published all-reduce and all-to-all curves of single nodes of 8 A100, H200 and
B200, of 4 x 8 B200 on EFA and of 2 x 8 H20 (92 rows: median error 4.5 %, 90th percentile 19 %; on
the other 91 rows 4.4 % and 21 %).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Protocol:
    """How data moves: a flag beside each word (LL), each 128 bytes (LL128), or per chunk (Simple).

    Pairs are (in the machine, over the network). `base_s`: once; `hop`, `tree_hop`: a step's part
    of the link's latency; `fraction`, `tree_fraction`: of the ring's bandwidth; `cap`: most part
    of a device's NVLink port that a group gets; `has_ramp`: whether chunks must fill a pipeline.
    """

    name: str
    base_s: float
    hop: tuple[float, float]
    tree_hop: tuple[float, float]
    fraction: float
    tree_fraction: float
    cap: tuple[float, float]
    has_ramp: bool


# LL: half of the bytes are flags (0.26 in a tree); NCCL caps it at 38 % of NVLink in a node,
# 10 % between nodes; 17 % in a node is fitted. LL128: 0.92 in NCCL's table, 0.75 fitted.
LL = Protocol("LL", 6.6e-6, (0.18, 0.19), (0.18, 0.36), 0.5, 0.26, (0.17, 0.10), False)
LL128 = Protocol("LL128", 14e-6, (0.56, 0.29), (0.37, 0.61), 0.75, 0.69, (1.0, 1.0), False)
SIMPLE = Protocol("Simple", 8.4e-6, (1.0, 1.0), (1.18, 1.0), 1.0, 0.92, (1.0, 1.0), True)
PROTOCOLS = {"nccl": (LL, LL128, SIMPLE), "rccl": (LL, SIMPLE), "gloo": (SIMPLE,)}

# Seconds that a call takes before the first step: launch, and the wait of all members for all.
# NCCL: fitted. RCCL: intercept of the all-reduces of 2 to 8 MI200 dies (microsoft/nnscaler
# profiles). Gloo's are in the latency of its links.
LAUNCH_S = {"nccl": 40e-6, "rccl": 90e-6, "gloo": 0.0}

# Large messages move in chunks of up to a buffer. With k steps, a chunk's overhead a and T seconds
# at full rate, the best chunk costs 2 sqrt(k a T) more, until chunks are as large as the buffer.
CHUNK_OVERHEAD_S = 2e-6  # a: fitted
SWITCH_RAMP_S = 4.8e-6  # k a of a switch's reduction: fitted
RAMP_END_S = 2.4e-3  # the largest chunk is reached at this T: fitted

# Parallel aggregated trees (PAT).
PAT_BASE_S, PAT_RANK_S, PAT_HOP, PAT_FRACTION = 8e-6, 2.8e-6, 1 / 3.5, 0.75

# Sends to several peers at once reach less of NVLink than a ring, a single one less still (fewer
# channels): fitted on all-to-alls of 8, 4 and 2 A100. A NIC: 48.5 of 50 GB/s, as in a ring
# (NVIDIA/nccl-tests issue 267). A call costs more, and per peer 1.5 steps: fitted.
PEERS_FRACTION, PAIR_FRACTION = 0.82, 0.66
EXCHANGE_BASE_S, EXCHANGE_HOP = 32e-6, 1.5
