"""Commands that the distribution weft-bench adds to `weft`: the command NAME is the class Command of cmd_NAME."""

COMMANDS = {
    "bench collectives": "time every edge of Weft's own transport next to others, and the floor",
    "bench dcp": "time the merge of attention over shards of the keys, by each algorithm",
    "bench latency": "time first and next tokens of a request, transport by transport",
    "bench serving": "load an OpenAI-compatible server: throughput and latencies",
    "profile": "watch decode steps on every rank: collectives, kernels, idle",
    "reproduce": "run what the pull requests measured that Weft grew from",
    "eval": "score a model on held-out word problems",
    "demo": "serve the embedded model on 4 ranks and ask it word problems",
}
EXTRAS = {"bench serving": "bench", "profile": "bench", "demo": "demo"}
"""Extra of weft with the additional packages of a command."""
