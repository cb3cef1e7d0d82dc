"""Serve a checkpoint by transformers alone, in static batches, by the part of OpenAI's API that compare.py uses.

A batch is the completions that arrive within 20 ms, with prompts of one length. Later requests wait for its end.

    python bench/scripts/rivals/transformers_server.py MODEL PORT THREADS
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Tokens = queue.Queue[int]
waiting: queue.Queue[tuple[dict[str, Any], Tokens]] = queue.Queue()


class Handler(BaseHTTPRequestHandler):
    """/health, /v1/models and streams of /v1/completions."""

    def do_GET(self) -> None:
        self._reply(json.dumps({"data": [{"id": "model"}]}))

    def do_POST(self) -> None:
        asked, tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), Tokens()
        waiting.put((asked, tokens))
        self._reply("")
        for _ in range(asked["max_tokens"]):
            self.wfile.write(f'data: {{"choices": [{{"text": " {tokens.get()}"}}]}}\n\n'.encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, body: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())


@torch.inference_mode()
def complete(model: Any) -> None:
    """Complete the waiting requests of one batch, greedily and to the full length of the longest."""
    batch = [waiting.get()]
    time.sleep(0.02)
    batch += [waiting.get() for _ in range(waiting.qsize())]
    rows, cache = torch.tensor([asked["prompt"] for asked, _ in batch]), None
    for _ in range(max(asked["max_tokens"] for asked, _ in batch)):
        output = model(rows, past_key_values=cache, use_cache=True, logits_to_keep=1)
        rows, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        for (_, tokens), row in zip(batch, rows.tolist(), strict=True):
            tokens.put(row[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("port", type=int)
    parser.add_argument("threads", type=int)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    loaded = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16).eval()
    server = ThreadingHTTPServer(("127.0.0.1", asked.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        complete(loaded)


if __name__ == "__main__":
    main()
