"""What every test runs under: one thread per process, Gloo on the loopback, a quiet hypothesis."""

import os

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("shardwright", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shardwright")
