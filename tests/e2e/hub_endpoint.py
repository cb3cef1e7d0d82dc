"""An endpoint on loopback that serves repositories as the Hugging Face hub does."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by name. gated: those with files that nobody gets. fetched: files that were asked for, with bodies.

    status: of every reply, if not None. stuck: a file that is sent up to its first byte, and `asked` is set.
    """

    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    status: int | None = None
    address: str = ""
    stuck: str | None = None
    asked: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve from entering to leaving."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._reply(body=False)

        def do_GET(self) -> None:
            self._reply(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _reply(self, body: bool) -> None:
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?(?:\?.*)?", self.path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
            found = api or file
            name, revision = (found[1], found[3] if api else found[2]) if found else ("", None)
            if hub.status is not None:
                return self._send(hub.status, b"")
            if name not in hub.repositories:
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            if revision not in (None, "main", COMMIT):
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            folder = hub.repositories[name]
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            if api is not None and api[2] == "tree":
                tree = [
                    {"type": "file", "path": str(p.relative_to(folder)), "size": p.stat().st_size, "oid": _etag(p)}
                    for p in files
                ]
                return self._send(200, json.dumps(tree).encode())
            if api is not None:
                siblings = [{"rfilename": str(path.relative_to(folder))} for path in files]
                return self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
            assert file is not None
            if name in hub.gated:
                return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            path = folder / file[3]
            if not path.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            if body:
                hub.fetched.append(file[3])
            headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT}
            if body and file[3] == hub.stuck:
                self._send(200, b"", headers | {"Content-Length": str(path.stat().st_size)})
                hub.asked.set()
                hub.ended.wait()
                return None
            self._send(200, path.read_bytes(), headers, body)

        def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, body: bool = True) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.ended.set()
            server.shutdown()
            thread.join()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
