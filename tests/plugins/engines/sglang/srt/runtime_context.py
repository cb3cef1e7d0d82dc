from types import SimpleNamespace

PARALLEL = SimpleNamespace()
SERVER_ARGS = SimpleNamespace(enable_two_batch_overlap=False, enable_pdmux=False, elastic_ep_backend=None)


def get_parallel():
    return PARALLEL


def get_server_args():
    return SERVER_ARGS
