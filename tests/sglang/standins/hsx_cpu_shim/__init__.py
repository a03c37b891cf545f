"""Stand-in, as a plugin of SGLang's: two Triton launches of hybrid models in torch, and one attribute that DP
attention needs of the torch_native backend."""


def register():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def norm_gated(self, x, g=None, *args, **kwargs):
        import torch

        xf = x.float()
        y = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * y * torch.nn.functional.silu(g.float())).to(x.dtype)

    def gate_mul(hidden_states, gate_weight, shared_output, output, *, do_add):
        import torch

        gate = torch.sigmoid((hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True))
        y = (gate * shared_output.float()).to(output.dtype)
        output.add_(y) if do_add else output.copy_(y)

    triton = "sglang.kernels.ops"
    for target, function in (
        (f"{triton}.attention.fla.fused_norm_gate.FusedRMSNormGated.forward", norm_gated),
        (f"{triton}.elementwise.elementwise._launch_fused_gate_sigmoid_mul", gate_mul),
    ):
        HookRegistry.register(target, function, HookType.REPLACE)
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
