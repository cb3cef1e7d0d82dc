import torch
import torch.distributed as dist

_ENABLE_CUSTOM_ALL_REDUCE = True
_names = {}


class GroupCoordinator:
    def __init__(self, group_ranks, local_rank, torch_distributed_backend, group_name=None):
        number = _names[group_name] = _names.get(group_name, -1) + 1
        self.unique_name, self.device, self.calls = f"{group_name}:{number}", torch.device("cpu"), []
        made = [dist.new_group(ranks) for ranks in group_ranks]
        mine = next(place for place, ranks in enumerate(group_ranks) if dist.get_rank() in ranks)
        self.cpu_group = self.device_group = made[mine]
        self.world_size, self.rank_in_group = self.cpu_group.size(), self.cpu_group.rank()

    def destroy(self):
        self.calls.append("destroy")

    def all_reduce(self, input_):
        if self._can_use_flashinfer_allreduce(input_):
            raise AssertionError("FlashInfer's workspace takes multicast objects")
        method = self._resolve_outplace_all_reduce_method(input_)
        return self._all_reduce_out_place(input_, method or "pynccl")

    def _can_use_flashinfer_allreduce(self, input_):
        return getattr(self, "flashinfer", False)

    def _resolve_outplace_all_reduce_method(self, input_, should_use_pymscclpp_allreduce=None):
        return None

    def _all_reduce_out_place(self, input_, outplace_all_reduce_method):
        self.calls.append(outplace_all_reduce_method)
        out = input_.clone()
        dist.all_reduce(out, group=self.device_group)
        return out

    def all_gather_into_tensor(self, output, input):
        self._all_gather_into_tensor(output, input)

    def _all_gather_into_tensor(self, output, input):
        self.calls.append("all_gather")
        every = [torch.empty_like(input) for _ in range(self.world_size)]
        dist.all_gather(every, input, group=self.device_group)
        output.copy_(torch.cat(every).view(output.shape))

    def reduce_scatter_tensor(self, output, input):
        self._reduce_scatter_tensor(output, input)

    def _reduce_scatter_tensor(self, output, input):
        self.calls.append("reduce_scatter")
        total = input.clone()
        dist.all_reduce(total, group=self.device_group)
        output.copy_(total.chunk(self.world_size)[self.rank_in_group])
        return output

    def all_to_all_single(self, output, input):
        self._all_to_all_single(output, input)

    def _all_to_all_single(self, output, input):
        self.calls.append("all_to_all")
        every = [torch.empty_like(input) for _ in range(self.world_size)]
        dist.all_gather(every, input, group=self.device_group)
        output.copy_(torch.cat([x.chunk(self.world_size)[self.rank_in_group] for x in every]))

    def all_gatherv(self, input_, sizes=None, output=None):
        raise NotImplementedError

    def reduce_scatterv(self, input_, output=None, sizes=None):
        raise NotImplementedError
