"""Agent started by Ray: `python -m weft.serve.cli.ray_agent`.

The first line of its standard input has its configuration and the cluster's secret. It ends once that is closed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from weft.engine.assets import embedded_model_dir
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.models.config_json.fields import ModelError
from weft.planner.spec import LayoutError
from weft.serve.cli.command import stop_on_sigterm
from weft.serve.cli.several_hosts import run_agent


def main() -> int:
    """Run the agent and return the exit code."""
    values = json.loads(sys.stdin.readline())
    stop_on_sigterm()
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
