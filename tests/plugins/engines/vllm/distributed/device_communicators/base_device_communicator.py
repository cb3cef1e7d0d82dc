import torch
import torch.distributed as dist


class DeviceCommunicatorBase:
    def __init__(
        self,
        cpu_group,
        device=None,
        device_group=None,
        unique_name="",
        global_ranks=None,
        global_world_size=None,
        use_all2all=False,
    ):
        self.cpu_group, self.device, self.device_group = cpu_group, device, device_group
        self.unique_name, self.world_size = unique_name, dist.get_world_size(cpu_group)
        self.rank_in_group, self.calls = dist.get_rank(cpu_group), []

    def all_reduce(self, input_):
        self.calls.append("all_reduce")
        out = input_.clone()
        dist.all_reduce(out, group=self.device_group)
        return out

    def all_gather(self, input_, dim=-1):
        self.calls.append("all_gather")
        every = [torch.empty_like(input_) for _ in range(self.world_size)]
        dist.all_gather(every, input_, group=self.device_group)
        return torch.cat(every, dim)

    def all_gatherv(self, input_, dim=0, sizes=None):
        raise NotImplementedError

    def reduce_scatter(self, input_, dim=-1):
        raise NotImplementedError

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        raise NotImplementedError

    def reduce_scatterv_into_output(self, input_, output, dim=-1, sizes=None):
        raise NotImplementedError

    def gather(self, input_, dst=0, dim=-1):
        raise NotImplementedError

    def destroy(self):
        self.calls.append("destroy")
