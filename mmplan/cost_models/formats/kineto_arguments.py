"""What the arguments of profiler events say: sizes of messages, and what operators were given."""

from collections.abc import Mapping

from mmplan.cost_models.traces.kernel_classes import UNNAMED, collective
from mmplan.cost_models.traces.recording import Call, Message

# Types as c10d ("Float"), ATen ("c10::BFloat16"), TorchScript and NCCL itself ("ncclFloat32") write them.
ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "int64", "uint64", "float64"), 8),
    **dict.fromkeys(("float", "int", "int32", "uint32", "float32"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "short", "float16", "int16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "int8", "uint8", "unsigned char", "signed char"), 1),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "c10::float8_e4m3fn", "c10::float8_e5m2", "fp8e4m3", "fp8e5m2"), 1
    ),
}
NCCL = "nccl"  # the group's name where only the backend is known
MOST_SIZES = 32  # tensors of an operator whose sizes are kept

# Operators whose sizes say how much they compute or move; others' are not kept.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_ATTENTION = (
    "aten::_flash_attention_forward", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "flash_attn::_flash_attn_forward", "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
)  # fmt: skip
_MOVING = (
    "aten::add", "aten::add_", "aten::mul", "aten::mul_", "aten::copy_", "aten::gelu", "aten::silu", "aten::relu",
    "aten::sub", "aten::div", "aten::gelu_backward", "aten::silu_backward",
)  # fmt: skip
SIZED = frozenset((*_PRODUCTS, *_ATTENTION, *_MOVING))


def integer(value: object) -> int:
    """A count or id that is not negative and has at most 62 bits, written as a number or as text; -1 for all else."""
    if isinstance(value, str) and value[:20].isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else -1


def element_bytes(kind: object) -> int | None:
    """Of a type's name, None where it is not known."""
    text = str(kind).strip().lower().removeprefix("nccl").removeprefix("torch.")
    return ELEMENT_BYTES.get(text)


def message_of(name: str, arguments: Mapping[str, object]) -> Message | None:
    """What a kernel, an annotation (`nccl:all_reduce`, `gloo:...`) or `record_param_comms` says of its collective."""
    named = arguments.get("Collective name")
    backend = name.partition(":")[0].lower() if ":" in name[:8] else ""
    if not isinstance(named, str) and backend not in ("nccl", "gloo", "mpi", "ucc", "hccl", "xccl"):
        return None
    what = collective(named if isinstance(named, str) and named else name)
    if what == UNNAMED and backend == "":
        return None
    members = _members(arguments.get("Process Group Ranks"))
    ranks = integer(arguments.get("Group size"))
    counts = [integer(arguments.get(key)) for key in ("In msg nelems", "Out msg nelems")]
    size = element_bytes(arguments.get("dtype"))
    total = max(counts) * size if size is not None and max(counts) >= 0 else _input_bytes(arguments)
    if max(counts) < 0 and what in ("all_gather", "reduce_scatter") and total is not None:
        # only the input is known: that of an all-gather is one rank's share
        total = None if what == "all_gather" and ranks < 1 else total * (ranks if what == "all_gather" else 1)
    group = arguments.get("Process Group Description") or arguments.get("Process Group Name")
    return Message(
        collective=what,
        bytes=total if total is not None and total < 2**62 else None,
        ranks=ranks if ranks > 0 else (len(members) or None),
        group=str(group)[:60] if isinstance(group, str | int) else backend,
        members=members,
    )


def _members(value: object) -> tuple[int, ...]:
    """Ranks of `[0, 1, 2]`, a list or its text; empty where they are cut (`[0, 1, ...]`) or missing."""
    parts = value.strip("[] ").split(",") if isinstance(value, str) and len(value) < 200_000 else value
    if not isinstance(parts, list) or len(parts) > 65_536:
        return ()
    found = tuple(integer(part.strip() if isinstance(part, str) else part) for part in parts)
    return found if all(rank >= 0 for rank in found) else ()


def _input_bytes(arguments: Mapping[str, object]) -> int | None:
    """Bytes of the first tensors in 'Input Dims'; lists of tensors are added up."""
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list) or not dims or not types:
        return None
    size, elements = element_bytes(types[0]), _elements(dims[0], 0)
    return elements * size if size is not None and elements is not None else None


def _elements(dims: object, depth: int) -> int | None:
    if not isinstance(dims, list) or depth > 3 or not dims:
        return None
    if all(isinstance(item, list) for item in dims):
        parts = [_elements(item, depth + 1) for item in dims]
        return None if None in parts else sum(part for part in parts if part is not None)
    product = 1
    for item in dims:
        value = integer(item)
        if value < 0:
            return None
        product = min(product * value, 2**62)
    return product


def call_of(name: str, arguments: Mapping[str, object]) -> Call | None:
    """Sizes, types and scalars of an operator that prices depend on; None for others, or where not recorded."""
    if name not in SIZED:
        return None
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) > MOST_SIZES:
        return None
    sizes = tuple(tuple(map(integer, item)) if isinstance(item, list) else () for item in dims)
    scalars = arguments.get("Concrete Inputs")
    words = (
        tuple(str(item)[:40] for item in scalars) if isinstance(scalars, list) and len(scalars) <= MOST_SIZES else ()
    )
    return Call(sizes, tuple(str(item)[:40] for item in types[:MOST_SIZES]), words)
