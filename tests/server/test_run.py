"""The server's process once it serves."""

from __future__ import annotations

import gc
import gzip
import http.server
import logging
import queue
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from server.conftest import Served, serve
from weft.engine.controller.engine import Engine
from weft.serve.cli import cmd_serve
from weft.serve.http import log, run
from weft.serve.http.loading import bind_unix
from weft.serve.http.options import Options

DEPLOY = Path(__file__).parents[2] / "docs" / "guide" / "deploy.md"


def test_no_collection_looks_through_what_was_there_at_the_start_and_threads_get_their_turns(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A collection would hold the interpreter's lock for tenths of a second, and an event loop that reads a burst of
    requests would have it for as long: no stream would get a token meanwhile."""
    frozen, turns, usual = [], [], sys.getswitchinterval()
    monkeypatch.setattr(cmd_serve, "start_engine", lambda *args: nullcontext(served.engine))
    monkeypatch.setattr(log, "configure", lambda *args: None)

    def serves(server: run.Server, sockets: Any) -> None:
        frozen.append(gc.get_freeze_count())
        turns.append(sys.getswitchinterval())

    monkeypatch.setattr(run.Server, "run", serves)
    gc.unfreeze()
    try:
        assert cmd_serve.Command(port=0).run() == 0
    finally:
        gc.unfreeze()
        sys.setswitchinterval(usual)
    assert frozen and frozen[0] > 10_000
    assert turns and turns[0] < usual / 10
    limits = served.engine.config
    sizes = f"{limits.batch_sequences:,} sequences, {limits.batch_tokens:,} tokens a step"
    said = capsys.readouterr().err
    assert f"a DP group: {sizes}, {limits.cached_tokens:,} tokens in the cache\na rank: 1 thread(s), any core\n" in said


def test_the_event_loop_is_asyncios_also_where_uvloop_is_installed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop makes the sockets of API processes non-blocking; a large message was cut then."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("uvloop runs the server")

    stand_in = SimpleNamespace(new_event_loop=refuse, EventLoopPolicy=refuse, Loop=refuse)
    monkeypatch.setitem(sys.modules, "uvloop", stand_in)
    for served in serve(engine):
        assert httpx.get(f"{served.url}/health").status_code == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Key and certificate by the command that docs/guide/deploy.md names."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    [command] = re.findall(r"^(openssl req .*?[^\\])$", DEPLOY.read_text(), re.MULTILINE | re.DOTALL)
    subprocess.run(shlex.split(command.replace("\\\n", " ")), cwd=folder, check=True, capture_output=True)
    return folder / "key.pem", folder / "cert.pem"


def test_https_by_a_certificate(engine: Engine, certificate: tuple[Path, Path]) -> None:
    key, chain = certificate
    for served in serve(engine, ssl_keyfile=key, ssl_certfile=chain):
        url = served.url.replace("http:", "https:")
        trusting = httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(chain)))
        body = {"prompt": [1, 2], "max_tokens": 2, "stream": True, "ignore_eos": True}
        with trusting as http:
            streamed = http.post("/v1/completions", json=body)
        assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError), served.http() as http:
            http.get("/health")


def test_certificates_that_cannot_be_used(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    key, chain = certificate
    locked = tmp_path / "locked.pem"
    encrypt = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(encrypt, check=True, capture_output=True)
    Options(ssl_keyfile=key, ssl_certfile=chain).check()
    for files in ((key, None), (None, chain), (chain, key), (key, tmp_path / "none.pem"), (locked, chain)):
        with pytest.raises(ValueError, match="ssl_certfile") as error:
            Options(ssl_keyfile=files[0], ssl_certfile=files[1]).check()
        assert "\n" not in str(error.value)


def test_a_unix_socket(engine: Engine, tmp_path: Path) -> None:
    """It takes the place of a dead server's, not of a live one's or of another file, and goes with its server."""
    path = tmp_path / "weft.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    for _ in serve(engine, bind_unix(path)):
        with pytest.raises(OSError, match=r"weft\.sock cannot be listened on .*choose another --uds"):
            bind_unix(path)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://weft") as http:
            assert http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).status_code == 200
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(OSError, match="choose another --uds"):
        bind_unix(path)
    assert path.read_text() == "a file"
    with pytest.raises(OSError, match="choose another --uds"):
        bind_unix(tmp_path / ("x" * 120))


def test_a_prefix_of_a_proxy(engine: Engine) -> None:
    """Requests come with it or without, and the key is asked for on the same paths."""
    for served in serve(engine, root_path="/llm", api_key="secret"):
        with served.http() as http:
            assert http.get("/openapi.json", headers={"x-api-key": "secret"}).json()["servers"] == [{"url": "/llm"}]
            for prefix in ("", "/llm"):
                assert http.get(f"{prefix}/health").status_code == 200
                assert http.get(f"{prefix}/v1/models").status_code == 401
                assert http.get(f"{prefix}/v1/models", headers={"x-api-key": "secret"}).status_code == 200
                refused = http.post(f"{prefix}/v1/messages", json={}, headers={"x-api-key": "secret"})
                assert refused.json()["type"] == "error", "Anthropic's shape"
            for path in ("/llm/llm/health", "/llmx/health", "/x/health"):
                assert http.get(path).status_code == 401
    for wrong in ("llm", "/llm/", "/", "//llm", "/a?b"):
        with pytest.raises(ValueError, match="root_path is"):
            Options(root_path=wrong).check()


def test_a_model_with_several_names(engine: Engine) -> None:
    for served in serve(engine, served_model_name=("first", "org/second")):
        client = served.client()
        assert [card.id for card in client.models.list()] == ["first", "org/second"]
        assert client.models.retrieve("org/second").id == "org/second"
        for name in ("first", "org/second"):
            assert client.completions.create(model=name, prompt=[1], max_tokens=1).model == "first"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="small", prompt=[1], max_tokens=1)
        with served.http() as http:
            assert set(re.findall(r'model_name="(.*?)"', http.get("/metrics").text)) == {"first"}


def test_the_least_level_of_the_log() -> None:
    weft = logging.getLogger("weft")
    log.configure("text", "warning")
    assert not weft.isEnabledFor(logging.INFO) and weft.isEnabledFor(logging.WARNING)
    log.configure("text")
    assert weft.isEnabledFor(logging.INFO)


def test_spans_of_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector gets one for each request, in the client's trace, and none of probes."""
    read = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2").ExportTraceServiceRequest
    pytest.importorskip("opentelemetry.instrumentation.fastapi")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # ms
    received: queue.Queue[Any] = queue.Queue()

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            received.put(read.FromString(gzip.decompress(data) if "Content-Encoding" in self.headers else data))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    collector = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    Options(otlp_traces_endpoint=endpoint).check()
    for served in serve(engine, otlp_traces_endpoint=endpoint):
        with served.http() as client:
            assert client.get("/health").status_code == 200
            parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
            body = {"prompt": [1], "max_tokens": 3, "stream": True, "ignore_eos": True}
            assert client.post("/v1/completions", json=body, headers=parent).status_code == 200
        [resource] = received.get(timeout=240).resource_spans
        [span] = resource.scope_spans[0].spans
    collector.shutdown()
    collector.server_close()
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "weft"
    assert (span.name, span.trace_id.hex()) == ("POST /v1/completions", "ab" * 16)
    for wrong in ("127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://"):
        with pytest.raises(ValueError, match="otlp_traces_endpoint is"):
            Options(otlp_traces_endpoint=wrong).check()
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.fastapi", None)
    with pytest.raises(ValueError, match=r"pip install 'weft\[otel\]'"):
        Options(otlp_traces_endpoint=endpoint).check()
