"""Files that look like a profiler's trace and are another tool's: which, and what they can or cannot say."""

from collections.abc import Collection, Iterable

_BY_KEY = (
    ("viztracer_metadata", "a VizTracer trace of Python functions, without device work"),
    ("otherData", "a Chrome trace of a browser or another tool"),
    ("workload_graph", "a Chakra execution trace: import it as chakra"),
    ("nodes", "an execution trace (operators without times): import it as chakra"),
    ("device_traces", "a memory snapshot of torch.cuda.memory, which holds no times"),
    ("segments", "a memory snapshot of torch.cuda.memory, which holds no times"),
)
_BY_CATEGORY = (
    (("COLL", "GROUP", "PROXY", "NET", "P2P"), "a trace of NCCL's profiler plug-in: import it as nccl-profiler"),
    (("devtools.timeline", "blink", "toplevel", "v8"), "a trace of a browser"),
    (("FEE", "python", "builtin"), "a VizTracer trace of Python functions"),
    (("SIMPLE", "ALLREDUCE", "NEGOTIATE_ALLREDUCE"), "a Horovod timeline"),
    (("F", "B", "I", "W", "SEND", "RECV", "STEP", "REDUCE"), "a trace that `mmplan simulate` wrote"),
)


def tool_of(head: Collection[str], others: Collection[tuple[str, bool]], labels: Iterable[str]) -> str:
    """Which other tool wrote a file, in words; empty where that is not known.

    Args:
        head: keys of the outer object.
        others: categories of events, and whether XLA's words stand in their arguments.
        labels: of processes and threads.
    """
    for key, words in _BY_KEY:
        if key in head:
            return words
    categories = {category for category, _ in others}
    for known, words in _BY_CATEGORY:
        if categories & set(known):
            return words
    if any(hlo for _, hlo in others) or any("XLA" in label or label.startswith("/device:") for label in labels):
        return "a trace of JAX or XLA, whose kernels have no categories"
    return ""
