import torch

_ir = torch.library.Library("vllm_ir", "FRAGMENT")
_ir.define(
    "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, SymInt? variance_size=None) "
    "-> (Tensor, Tensor)"
)


@torch.library.impl(_ir, "fused_add_rms_norm", "CompositeExplicitAutograd")
def fused_add_rms_norm(x, x_residual, weight, epsilon, variance_size=None):
    total = x.float() + x_residual.float()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    return (normed.to(weight.dtype) * weight).to(x.dtype), total.to(x.dtype)


class RMSNormQuantFusionPass:
    pass


class PostGradPassManager:
    def __init__(self):
        self.passes = []

    def configure(self, config):
        if config.compilation_config.pass_config.fuse_allreduce_rms:
            raise AssertionError("FlashInfer's workspace takes multicast objects")
        self.passes += [RMSNormQuantFusionPass()]
