"""Fixtures for all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("weft", deadline=None)  # no test depends on how fast a busy machine is
settings.load_profile("weft")
