import weakref
from contextlib import contextmanager
from importlib import import_module

import torch
import torch.distributed as dist

from vllm.platforms import current_platform

_groups = {}


@torch.library.custom_op("vllm::all_reduce", mutates_args=())
def all_reduce(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    return _groups[group_name]()._all_reduce_out_place(tensor)


@all_reduce.register_fake
def _(tensor, group_name):
    return torch.empty_like(tensor)


class GroupCoordinator:
    def __init__(
        self,
        group_ranks,
        local_rank,
        torch_distributed_backend,
        use_device_communicator,
        use_message_queue_broadcaster=False,
        group_name=None,
    ):
        self.unique_name = f"{group_name}:0"
        _groups[self.unique_name] = weakref.ref(self)
        self.cpu_group = self.device_group = dist.new_group(group_ranks[0])
        self.world_size, self.rank_in_group = self.cpu_group.size(), self.cpu_group.rank()
        module, name = current_platform.get_device_communicator_cls().rsplit(".", 1)
        self.device_communicator = getattr(import_module(module), name)(
            cpu_group=self.cpu_group,
            device=torch.device("cpu"),
            device_group=self.device_group,
            unique_name=self.unique_name,
        )

    @contextmanager
    def graph_capture(self, graph_capture_context=None):
        from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

        assert isinstance(self.device_communicator, CudaCommunicator)
        yield

    def all_reduce(self, input_):
        return torch.ops.vllm.all_reduce(input_, group_name=self.unique_name)

    def _all_reduce_out_place(self, input_):
        return self.device_communicator.all_reduce(input_)

    def all_gather(self, input_, dim=-1):
        return self._all_gather_out_place(input_, dim)

    def _all_gather_out_place(self, input_, dim):
        return self.device_communicator.all_gather(input_, dim)

    def all_gatherv(self, input_, dim=0, sizes=None):
        return self.device_communicator.all_gatherv(input_, dim, sizes)

    def reduce_scatter(self, input_, dim=-1):
        return self._reduce_scatter_out_place(input_, dim)

    def _reduce_scatter_out_place(self, input_, dim):
        return self.device_communicator.reduce_scatter(input_, dim)

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        return self.device_communicator.reduce_scatterv(input_, dim, sizes)

    def gather(self, input_, dst=0, dim=-1):
        return self.device_communicator.gather(input_, dst, dim)

    def destroy(self):
        self.device_communicator.destroy()
