"""Fork server of ranks, with all modules imported: `python -m weft.engine.processes.fork_server DIRECTORY PID`.

Importing torch costs seconds of a core. With this process one import serves every rank, at each start and restart, and
its memory is shared. It must stay single-threaded and touch no device: a fork copies neither. When its standard input
closes or PID, the controller, ends, it kills its ranks and removes DIRECTORY. It watches both: forks of the controller
hold a copy of the other end of standard input. The protocol is one JSON object a line:

  in    {"directory": PATH, "rank": N}        fork a rank; its files are there
  out   {"ready": true}                       once, when all is imported
        {"rank": N, "pid": PID}               a rank has been forked
        {"pid": PID, "code": CODE}            a rank has ended; CODE as `subprocess.Popen.returncode`
"""

# Why not multiprocessing's forkserver with set_forkserver_preload? Tried with Python 3.11, it has these faults:
# - A child runs the program's main module again: a script without a __main__ guard fails, and so does `python - <FILE`.
# - A process has only one, with the environment of its first start: a second engine with another CUDA_VISIBLE_DEVICES
#   gets the first one's. If another library has started it, it preloads nothing. No public call ends it, so torch stays
#   in memory after `Engine.close`.
# - If the controller is killed, server and children live on: each rank would have to watch the controller itself.
# - If the server is killed, every rank has exit code 255, even while it runs.
# - Ranks are in the controller's session and get its Ctrl-C. A daemonic process, such as a pool's, may not start any.
# Log files, preloading and the exit code of a killed rank did work: it would save about 120 of 250 lines.

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.engine.config.threads import name_thread


def main(root: Path, controller: int) -> None:
    """Fork ranks until standard input or the controller ends."""
    name_thread("weft-forks")
    gc.disable()  # collections would take an eighth of the imports
    from weft.engine.worker import rank

    gc.freeze()  # a collection in a rank would scan all that is imported, and so copy its memory
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGINT):  # ranks end with the controller, also if a whole unit is to end
        signal.signal(number, signal.SIG_IGN)
    children: dict[int, int] = {}  # pidfd → pid
    pending = b""
    _say({"ready": True})
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    try:
        controllers_end = os.pidfd_open(controller)
        poller.register(controllers_end, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == controllers_end:
                    return
                if fd:
                    poller.unregister(fd)
                    pid = children.pop(fd)
                    os.close(fd)
                    _say({"pid": pid, "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})
                    continue
                data = os.read(0, 65536)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    wanted = json.loads(line)
                    pid = _fork(rank.main, Path(wanted["directory"]), wanted["rank"], [controllers_end, *children])
                    child = os.pidfd_open(pid)
                    children[child] = pid
                    poller.register(child, select.POLLIN)
                    _say({"rank": wanted["rank"], "pid": pid})
    except (BrokenPipeError, ProcessLookupError):  # the controller is gone
        pass
    finally:
        for pid in children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(root, ignore_errors=True)


def _say(what: dict[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _fork(rank_main: Callable[[Path, int, int], int], directory: Path, number: int, descriptors: list[int]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for fd in descriptors:
            os.close(fd)
        log = os.open(directory / f"rank-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)
        code = rank_main(directory, number, parent)
    except BaseException:
        traceback.print_exc()
    finally:
        # No clean-up that could wait for peers: they may wait in a collective for this rank.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
