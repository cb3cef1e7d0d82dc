class Platform:
    @classmethod
    def get_device_communicator_cls(cls):
        return "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"

    @classmethod
    def get_pass_manager_cls(cls):
        return "vllm.compilation.passes.pass_manager.PostGradPassManager"

    def is_cuda(self):
        return True


current_platform = Platform()
