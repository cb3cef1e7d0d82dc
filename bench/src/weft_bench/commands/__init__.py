"""Commands that the distribution weft-bench adds to `weft`: the command NAME is the class Command of cmd_NAME."""

COMMANDS = {
    "bench collectives": "time each collective of Weft, compared with other libraries",
    "bench dcp": "time the merge of attention over sharded keys, per algorithm",
    "bench latency": "time the first and the next tokens of a request, per transport",
    "bench serving": "load an OpenAI-compatible server and measure throughput and latency",
    "profile": "trace decode steps on every rank: collectives, kernels, idle time",
    "reproduce": "repeat the measurements of five SGLang pull requests",
    "eval": "score a model on word problems",
    "demo": "serve the embedded model on 4 ranks and ask it word problems",
}
EXTRAS = {"bench serving": "bench", "profile": "bench", "demo": "demo"}
"""Extra of weft with the additional packages of a command."""
