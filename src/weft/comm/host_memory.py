"""Host-side connection of the processes of one host, without native code: barriers, short notes, lost processes.

It is for rare calls: a wait sleeps between looks at the other ranks' counters in a shared segment.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from contextlib import suppress
from pathlib import Path

from weft.comm.forks import ProcessBound
from weft.comm.rendezvous import pidfds, rendezvous
from weft.comm.transport import CommError, CommTimeout, PeerLost, Ranks
from weft.planner.spec import Mesh

NOTE_BYTES = 64
"""Bytes of a note."""
SLEEP_S = 0.0002


class HostMemory(ProcessBound):
    """One rank's end. Raises CommError if the ranks of this host do not meet.

    path: of a socket in a folder that only this user can reach; the ranks meet there. timeout_s: limit of each wait.
    """

    fork_error = CommError

    def __init__(self, mesh: Mesh, rank: int, path: Path | str, timeout_s: float):
        self._rank, self._ranks, self._timeout_s = rank, mesh.peers("host", rank), timeout_s
        self._groups = {group: at for at, group in enumerate(dict.fromkeys((*mesh.groups, self._ranks)))}
        world, words = len(self._ranks), mesh.world * (len(self._groups) + 1)
        size = 8 * words + NOTE_BYTES * mesh.world
        meeting = rendezvous(Path(path), world, self._ranks.index(rank), [self._ranks, words], lambda: size, timeout_s)
        self._segment: mmap.mmap | None = None
        try:
            self._pidfds = dict(zip(self._ranks, pidfds(meeting.pids), strict=True))
            self._segment = mmap.mmap(meeting.fd, size)
            meeting.ready()
        finally:
            meeting.close()
        # An aligned word is stored at once. Row g: barriers of group g that each rank has reached; last row:
        # 1 if the rank has left.
        self._counters = memoryview(self._segment)[: 8 * words].cast("q", (len(self._groups) + 1, mesh.world))
        self._notes = memoryview(self._segment)[8 * words :]

    def barrier(self, group: Ranks) -> None:
        """Return once every rank of the group has called it. Raises PeerLost, CommTimeout."""
        at, deadline = self._groups[group], time.monotonic() + self._timeout_s
        count = self._counters[at, self._rank] + 1
        self._counters[at, self._rank] = count
        for rank in group:
            while self._counters[at, rank] < count:
                self.check()
                if self._left(rank) and self._counters[at, rank] < count:  # it will never arrive
                    raise PeerLost(rank, by=self._rank)
                if time.monotonic() > deadline:
                    raise CommTimeout(
                        f"rank {self._rank}: barrier over {group} waited {self._timeout_s:g} s for rank {rank}"
                    )
                time.sleep(SLEEP_S)

    def gather_notes(self, note: bytes) -> list[bytes]:
        """Return every rank's note of NOTE_BYTES, in rank order, once per rank. Raises as `barrier` does."""
        self._notes[NOTE_BYTES * self._rank : NOTE_BYTES * (self._rank + 1)] = note
        self.barrier(self._ranks)
        return [bytes(self._notes[NOTE_BYTES * rank : NOTE_BYTES * (rank + 1)]) for rank in self._ranks]

    def check(self) -> None:
        """Raise PeerLost if a rank's process ended without closing its end."""
        for rank in self._ranks:
            if self._ended(rank) and not self._left(rank):
                raise PeerLost(rank, by=self._rank)

    def close(self) -> None:
        """Leave: the end of this process is no loss to the other ranks from now on. It may be called twice."""
        if self._segment is None:
            return
        self._counters[len(self._groups), self._rank] = 1
        self._counters.release()
        self._notes.release()
        with suppress(BufferError):
            self._segment.close()
        self._segment = None
        for fd in self._pidfds.values():
            if fd >= 0:
                os.close(fd)

    def _left(self, rank: int) -> bool:
        return bool(self._counters[len(self._groups), rank])

    def _ended(self, rank: int) -> bool:
        if (fd := self._pidfds[rank]) < 0:
            return False
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
