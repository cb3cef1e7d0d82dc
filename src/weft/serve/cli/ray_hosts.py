"""`--ray`: agents of all other hosts, started on the Ray cluster of this host by `python -m weft.serve.cli.ray_hosts`.

Ray starts one agent per host and forwards its output; agents otherwise run as if started by hand. An agent lives as
long as the actor that has started it, and the actor as long as this process.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.engine.assets import embedded_model_dir
from weft.planner.spec import LayoutError
from weft.serve.cli.several_hosts import run_agent

MISSING = "--ray requires the package ray on every host: pip install 'weft[ray]'"
LEAVE_S, FAILED_S = 10.0, 1.0
"""Seconds for agents to end after node 0 has left, and after it has failed, perhaps before they joined."""
AGAIN_S = 1.0


def node_0(options: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's options for this host as node 0 of its Ray cluster. Raises ValueError in one line."""
    if (options["nnodes"] or 1) < 2:
        raise ValueError("--ray starts the agents of other hosts: add --nnodes, the number of hosts, 2 or more")
    if options["node_rank"]:
        raise ValueError("--ray starts the other hosts from this one, which is node 0: omit --node-rank")
    ray = connect()
    if (nodes := len(_others(ray)) + 1) < options["nnodes"]:
        raise ValueError(f"--nnodes {options['nnodes']}: the Ray cluster has {nodes} host(s)")
    address = ray.util.get_node_ip_address()
    key = options["cluster_key"] or _new_key()
    return options | {"node_rank": 0, "master_addr": options["master_addr"] or address, "cluster_key": key}


def connect() -> Any:
    """Return the package ray, connected to this host's cluster. Raises ValueError in one line."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError(MISSING) from error
    try:
        ray.init(address="auto", ignore_reinit_error=True, logging_level="warning")
    except ConnectionError as error:
        message = "--ray: this host belongs to no Ray cluster; ray start --head here, ray start --address on the others"
        raise ValueError(message) from error
    return ray


def _others(ray: Any) -> list[dict[str, Any]]:
    """Return Ray's descriptions of the cluster's living hosts, except this one."""
    own_node = ray.get_runtime_context().get_node_id()
    others = [host for host in ray.nodes() if host["Alive"] and host["NodeID"] != own_node]
    return sorted(others, key=lambda host: (host["NodeManagerAddress"], host["NodeID"]))


@contextmanager
def agents(config: Any, ray: bool) -> Iterator[threading.Thread | None]:
    """Run the agents of the other hosts, with the options of `node_0`, and yield the thread that watches them; None,
    and no agents, unless Ray starts them."""
    if not ray:
        yield None
        return
    from weft.engine.config.device import on_gpus

    cluster, closing = connect(), threading.Event()
    started, runs = list[Any](), dict[Any, tuple[int, str]]()
    gpus = config.ranks_of_host if on_gpus(config) else 0
    for node, host in zip(range(1, config.nnodes), _others(cluster), strict=False):
        where = cluster.util.scheduling_strategies.NodeAffinitySchedulingStrategy(host["NodeID"], soft=False)
        actor = cluster.remote(Agent).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=where)
        started.append(actor.remote())
        runs[started[-1].run.remote(message(config, node))] = (node, host["NodeManagerAddress"])
    watching = threading.Thread(target=_watch, args=(cluster, runs, closing), name="weft-ray", daemon=True)
    watching.start()
    timeout_s = FAILED_S
    try:
        yield watching
        timeout_s = LEAVE_S
    finally:
        closing.set()
        cluster.wait(list(runs), num_returns=len(runs), timeout=timeout_s)
        for agent in started:
            cluster.kill(agent)
        cluster.shutdown()


def _watch(ray: Any, runs: Mapping[Any, tuple[int, str]], closing: threading.Event) -> None:
    """Print the agents that end before node 0."""
    waiting = list(runs)
    with suppress(Exception):  # Ray is shut down
        while waiting:
            ended, waiting = ray.wait(waiting, num_returns=1)
            node, address = runs[ended[0]]
            try:
                how = f"has ended with exit code {ray.get(ended[0])}"
            except ray.exceptions.RayError as error:
                how = f"is gone: {str(error).splitlines()[0]}"
            if not closing.is_set():
                print(f"weft: the agent of node {node} ({address}) {how}", file=sys.stderr, flush=True)


def message(config: Any, node: int) -> str:
    """Return the first line that an agent reads: its configuration and the cluster's secret."""
    embedded = config.model == embedded_model_dir()
    values = replace(config, model=config.model.resolve(), node_rank=node).to_dict()
    secret = config.cluster_key.read_text().strip()
    return json.dumps(values | {"model": None if embedded else values["model"], "cluster_key": secret})


class Agent:
    """Ray actor of a host."""

    def run(self, first: str) -> int:
        """Run the agent until it exits and return its exit code; restart it if it was killed."""
        while True:
            command = [sys.executable, "-m", "weft.serve.cli.ray_hosts"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.write(f"{first}\n")
                    process.stdin.flush()
                if (code := process.wait()) >= 0:
                    return code
            time.sleep(AGAIN_S)


def _new_key() -> Path:
    """Return a file with a new secret, removed at exit."""
    folder = tempfile.TemporaryDirectory(prefix="weft-ray-")
    atexit.register(folder.cleanup)
    (key := Path(folder.name) / "cluster.key").write_text(secrets.token_hex(32))
    return key


def main() -> int:
    """Run an agent by the first line of the standard input, until that is closed. Return the exit code."""
    from weft.engine.config.config import EngineConfig, EngineError
    from weft.engine.models.config_json.fields import ModelError

    values = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_exit_with_input, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="weft-ray-") as folder:
        (key := Path(folder) / "cluster.key").write_text(values["cluster_key"])
        model = values["model"] or str(embedded_model_dir())
        try:
            return run_agent(EngineConfig.from_dict(values | {"cluster_key": str(key), "model": model}))
        except (EngineError, ModelError, LayoutError) as error:
            print(f"weft: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130


def _exit_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
