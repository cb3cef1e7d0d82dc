"""The process of one rank: `python -m weft.engine.rank DIRECTORY RANK PARENT`, started by `ProcessExecutor`.

DIRECTORY holds config.json (the EngineConfig), the sockets, and where the transports' ranks meet. PARENT is the
controller's process id: told, not asked for, since it may be gone by the time that this process has imported torch.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import zmq
from transformers.utils import logging as transformers_logging

from weft.comm.transport import CommError
from weft.engine.config import EngineConfig
from weft.engine.messages import Failure, FromRank, ToRank, decode_to_rank, encode
from weft.engine.ranks import bind, cost_model, open_transports
from weft.engine.worker import Worker
from weft.models.config import ModelError
from weft.place.spec import LayoutError


def main(directory: Path, rank: int, parent: int) -> None:
    """Runs a rank until it is told to stop, fails, or its controller is gone."""
    threading.Thread(target=_leave_with_parent, args=(parent, directory), daemon=True).start()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = EngineConfig.from_dict(json.loads((directory / "config.json").read_text()))
    bind(config, rank)
    torch.set_num_threads(config.threads)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind(f"ipc://{directory}/to-{rank}")
    outbox.connect(f"ipc://{directory}/from")

    def send(message: FromRank) -> None:
        outbox.send(encode(message))

    def receive() -> ToRank:
        return decode_to_rank(inbox.recv())

    code = 0
    try:
        transports = open_transports(config, rank, directory)
        Worker(config, transports, cost_model(config), send).serve(receive, send)
        for transport in transports:
            transport.close()
    except (LayoutError, ModelError) as error:
        send(Failure(rank, str(error), user=True))
        code = 2
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        send(Failure(rank, text, user=False, lost_peer=isinstance(error, CommError)))
        code = 1
    context.destroy(linger=1000)
    # Peers that wait in a collective for this rank must not keep it: no clean-up that could wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_with_parent(parent: int, directory: Path) -> None:
    """A rank must not outlive its controller, also one that was killed; nor may the folder that was the controller's.

    Each rank removes it: the others need nothing in it any more, and the last finds what one before could not remove.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
