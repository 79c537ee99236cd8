"""Which numbers of the cost model are fitted, within which bounds, and how far data may move them.

`spread` is the standard deviation of the prior in the logarithm: 0.05 where libraries change little, 0.15 for fractions
of peak that papers bracket, 0.5 and more for what nobody publishes. Starting values stand in `hardware.yaml` and
`stacks.yaml`.
"""

from mmplan.planner.parameter_fit import Parameter

_STACK_BOUNDS = {
    "host_op_s": (1e-6, 2e-4, 0.7),
    "step_s": (1e-3, 0.2, 1.0),
    "microbatch_s": (1e-5, 0.1, 1.5),
    "accumulation_bytes": (1.0, 30.0, 0.2),
    "pointwise_passes": (0.5, 3.0, 0.2),
    "gemm_rate": (0.8, 1.2, 0.05),
}
_FRACTION = (0.02, 1.0, 0.5)
_STACK_FIELDS = {
    "megatron-2021": ("exposed_tp_backward", "exposed_p2p", "gemm_rate", "pointwise_passes"),
    "megatron-deepspeed-2022": (
        "exposed_tp_backward", "exposed_p2p", "accumulation_bytes", "gemm_rate", "microbatch_s", "pointwise_passes",
    ),
    "megatron-deepspeed-2024": (
        "exposed_tp_backward", "exposed_p2p", "accumulation_bytes", "gemm_rate", "microbatch_s", "pointwise_passes",
        "host_op_s",
    ),
    "llm-foundry-2023": ("step_s", "fsdp_serial", "pointwise_passes", "gemm_rate"),
    "jax-2025": ("fsdp_serial", "step_s", "selective_share"),
    "nemo-2024": ("exposed_tp_forward", "exposed_p2p", "exposed_dp", "accumulation_bytes"),
    "nemo-2025": ("exposed_tp_forward", "exposed_p2p", "exposed_dp", "accumulation_bytes"),
}  # fmt: skip


def _all() -> tuple[Parameter, ...]:
    found = []
    for generation, spread in (("ampere", 0.15), ("hopper", 0.15), ("blackwell", 0.1)):
        name = f"generation.{generation}"
        found += [
            Parameter(f"{name}.gemm_fraction", 0.4, 0.97, spread),
            Parameter(f"{name}.memory_fraction", 0.2, 0.92, 0.2),
            Parameter(f"{name}.tile_depth", 8, 800, 0.5),
        ]
        if generation != "ampere":
            found.append(Parameter(f"{name}.fp8_gemm_fraction", 0.4, 0.97, spread))
        found += [Parameter(f"{name}.attention.{kind}", 0.08, 0.9, 0.3) for kind in ("flash1", "flash2", "cudnn")]
    found += [Parameter(f"link.{level}.fraction", 0.4, 0.95, 0.1) for level in ("node", "network")]
    for stack, fields in _STACK_FIELDS.items():
        found += [Parameter(f"stack.{stack}.{name}", *_STACK_BOUNDS.get(name, _FRACTION)) for name in fields]
    return tuple(found)


PARAMETERS = _all()
