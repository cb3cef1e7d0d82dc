"""vLLM's collectives by Weft: the entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import logging
from importlib.metadata import version

VERSIONS = ("0.25.1", "0.26.0", "0.27.1", "0.30.0", "0.33.0")
"""vLLM's versions with the interfaces that this package uses; tests/plugins compares them."""

log = logging.getLogger("vllm.weft")  # below vLLM's own logger, so that its handlers print the lines


def register() -> None:
    """Let vLLM make its communicators and passes by this package's classes. A second call changes nothing."""
    found = version("vllm").split("+")[0]
    if found not in VERSIONS:
        log.warning("weft-vllm is off: it is tested with vLLM %s, and this is %s", ", ".join(VERSIONS), found)
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        log.warning("weft-vllm is off: it is for NVIDIA GPUs, and vLLM runs on %s", type(current_platform).__name__)
        return
    platform = type(current_platform)
    platform.get_device_communicator_cls = classmethod(lambda cls: "weft_vllm.cuda.WeftCommunicator")
    platform.get_pass_manager_cls = classmethod(lambda cls: "weft_vllm.fusion.WeftPassManager")
