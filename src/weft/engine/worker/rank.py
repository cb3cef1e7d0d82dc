"""Main function of a rank's process, forked by `weft.engine.processes.fork_server`.

The directory holds config.json (the EngineConfig), the sockets, and files by which the transports' ranks meet.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
import time
import traceback
from pathlib import Path

from transformers.utils import logging as transformers_logging

from weft.engine.config.config import EngineConfig
from weft.engine.config.device import check_gpu, device_of
from weft.engine.config.threads import name_thread
from weft.engine.messages.rank_messages import Failure, FromRank, Stop, ToRank, decode_to_rank, encode
from weft.engine.messages.rank_sockets import SOCKET, RankSocket
from weft.engine.models.config_json.fields import ModelError
from weft.engine.worker.gpu_probe import unusable
from weft.engine.worker.open_transports import bind, cost_model, open_transports
from weft.engine.worker.worker import Worker, failure
from weft.kernels.build import BuildError
from weft.planner.spec import LayoutError


class GpuLost(RuntimeError):
    """Error of a rank that cannot use its GPU, in one line."""


def main(directory: Path, rank: int, parent: int) -> int:
    """Run a rank until it receives Stop, fails, or loses its parent. Returns its exit code."""
    name_thread(f"weft-rank-{rank}")
    threading.Thread(target=_exit_with_parent, args=(parent, directory.parent), daemon=True).start()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = bind(EngineConfig.from_dict(json.loads((directory / "config.json").read_text())), rank)
    controller, sending = RankSocket(directory / SOCKET, rank), threading.Lock()

    def send(message: FromRank) -> None:
        with sending:  # messages of several packets must not mix
            controller.send(encode(message))

    def receive() -> ToRank:
        try:
            return decode_to_rank(controller.receive())
        except EOFError:  # the controller is gone
            return Stop()

    code = 0
    try:
        _take_gpu(config, rank)
        check_gpu(device_of(config, rank))
        transports = open_transports(config, rank, directory)
        worker = Worker(config, transports, cost_model(config), send)
        gc.collect()
        gc.freeze()  # keep the collector from scanning permanent objects during a step
        worker.serve(receive, send)
        for transport in transports:
            transport.close()
    except (BuildError, LayoutError, ModelError) as error:
        send(Failure(rank, str(error), user=True))
        code = 2
    except GpuLost as error:
        send(Failure(rank, str(error), user=False, lost_device=True))
        code = 1
    except Exception as error:
        traceback.print_exc()
        send(failure(rank, error))
        code = 1
    controller.close()
    return code


def _take_gpu(config: EngineConfig, rank: int) -> None:
    """Try the rank's GPU, with --shrink. Hide GPUs of lost ranks, since a broken one may fail CUDA for all.

    CUDA then numbers the others like the ranks of this host. Call it before CUDA runs here. Raises GpuLost.
    """
    if not config.gpus:
        return
    node, place = config.seat_of(rank)
    if why := unusable(config.gpus[place]):
        raise GpuLost(f"GPU {place} ({config.gpus[place]}) cannot be used: {why}")
    if config.places:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(config.gpus[each] for each in config.places[node])


def _exit_with_parent(parent: int, root: Path) -> None:
    """Exit when the parent is gone, even if it was killed, and remove the controller's folder.

    Every rank removes the folder: no rank needs it any more, and the last one removes remains of earlier attempts.
    """
    name_thread("weft-parent")
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(root, ignore_errors=True)
    os._exit(3)
