"""Reports of a server's /health, from moment to moment."""

from __future__ import annotations

import http.client
import threading
import time

from chaos.server_process import ServerProcess

POLL_S = 0.05


class Health:
    """Poll a server's /health all the time, on a thread of its own. Moments are of the monotonic clock."""

    def __init__(self, served: ServerProcess):
        self._served, self._stop = served, threading.Event()
        self._changed = threading.Condition()
        self._changes = [(time.monotonic(), True)]  # when it was heard to begin, or to cease, to serve
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def serving(self) -> bool:
        """Return the latest report."""
        return self._changes[-1][1]

    def heard(self, serving: bool, after: float, timeout_s: float = 0.0) -> float | None:
        """Return when it first reported after a moment that it serves, or that it does not; None if it does not in
        time."""
        with self._changed:
            self._changed.wait_for(lambda: self._first(serving, after) is not None, timeout_s)
            return self._first(serving, after)

    def stop(self) -> None:
        """End the polling."""
        self._stop.set()
        self._thread.join()

    def _first(self, serving: bool, after: float) -> float | None:
        return next((at for at, said in self._changes if at > after and said == serving), None)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                serving = self._served.get("/health")[0] == 200
            except (OSError, http.client.HTTPException):  # whether the server lives is for others to find
                continue
            if serving != self.serving:
                with self._changed:
                    self._changes.append((time.monotonic(), serving))
                    self._changed.notify_all()
