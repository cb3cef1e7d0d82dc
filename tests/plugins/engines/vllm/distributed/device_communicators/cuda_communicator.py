from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class CudaCommunicator(DeviceCommunicatorBase):
    def all_reduce(self, input_):
        return super().all_reduce(input_)

    def all_gather(self, input_, dim=-1):
        return super().all_gather(input_, dim)

    def all_gatherv(self, input_, dim=0, sizes=None):
        return super().all_gatherv(input_, dim, sizes)

    def reduce_scatter(self, input_, dim=-1):
        return super().reduce_scatter(input_, dim)

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        return super().reduce_scatterv(input_, dim, sizes)

    def destroy(self):
        super().destroy()
