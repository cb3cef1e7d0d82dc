"""Communicator of vLLM's groups on NVIDIA GPUs."""

from __future__ import annotations

from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from weft_vllm.collectives import WeftCollectives


class WeftCommunicator(WeftCollectives, CudaCommunicator):
    """vLLM's own communicator, which its graph capture asserts, with Weft's collectives before it."""
