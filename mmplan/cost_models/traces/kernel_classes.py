"""What a kernel does, by its name: the classes that the analytic cost model prices apart, and collectives.

Names are those of cuBLAS and cuBLASLt (gemm, xmma, nvjet), CUTLASS, Tensile (Cijk), cuDNN and MIOpen, FlashAttention,
composable kernel and AOTriton, ATen, Triton as torch.compile names it (triton_poi: point-wise, triton_red and
triton_per: reductions, triton_tem: templates of products), Apex and Transformer
Engine, NCCL and RCCL since 2.4, DeepEP, NVSHMEM.
"""

import re

COMMUNICATION, MEMCPY, MEMSET = "communication", "memcpy", "memset"
GEMM, ATTENTION, OTHER = "gemm", "attention", "other"

# The first class whose words are found has the kernel: `splitKreduce` is a product although it reduces, a fused
# `multi_tensor_apply` an optimizer although it is element-wise.
_CLASSES = (
    (MEMCPY, r"__amd_rocclr_copy"),  # ROCm runs copies and fills as kernels
    (MEMSET, r"__amd_rocclr_fill"),
    (
        COMMUNICATION,
        r"nccl|rccl|msccl|nvshmem|deep_?ep\b|\bep::(internode|intranode)|one_shot_all_?reduce|two_shot_all_?reduce|"
        r"multimem_|cross_device_reduce|userbuffers|symm_mem|oneccl",
    ),
    (
        ATTENTION,
        r"flash|fmha|attention|attn_(fwd|bwd)|_attn|attn_|sdpa|bwd_kernel_dk|_bwd_preprocess|\bmha_|mla_(fwd|bwd|decode)",
    ),
    ("optimizer", r"multi_tensor|multitensor|adam|adagrad|lamb_|\bsgd|fused_?optimizer|_foreach"),
    (
        "norm",
        r"layer_?norm|RowwiseMoments|GammaBeta|rms_?norm|batch_?norm|group_?norm|\bbn_(fw|bw)|(\b|_)ln_(fwd|bwd)",
    ),
    (
        "convolution",
        r"convolve|conv(1|2|3)?d|\bconv|_conv|cudnn|fprop|wgrad|dgrad|winograd|miopen|igemm_|im2col|col2im",
    ),
    (
        GEMM,
        r"(?<!fb)gemm|gemv|cublas|\bnvjet|Cijk_|xmma|cutlass|splitK|matmul|(?<![a-z])mma(?![a-z])|wmma|triton_tem|triton_mm|"
        r"(?<![a-z])mm_kernel|addmm|bmm|dot_kernel|deep_gemm|epilogue::impl",
    ),
    ("softmax and loss", r"softmax|cross_entropy|nll_loss|log_?sum_?exp"),
    (
        "embedding and index",
        r"embedding|index|gather|scatter|permute_|topk|sort|radix|bincount|fbgemm|dispatch|combine|moe_|histogram",
    ),
    (
        "elementwise",
        r"elementwise|reduce|triton_(poi|red|per|for)|CatArray|copy|fill|where|dropout|gelu|silu|swiglu|relu|sigmoid|"
        r"rope|rotary|transpose|pointwise|vectorized|unrolled|cast|scale|norm|clamp|arange|distribution|cumsum|scan|"
        r"masked|tril|triu|quant|activation|nonzero|bias|pool|scal_",
    ),
)
_COMPILED = tuple((name, re.compile(words, re.IGNORECASE)) for name, words in _CLASSES)
CLASS_NAMES = (*(name for name, _ in _CLASSES), OTHER)
CLASS_INDEX = {name: index for index, name in enumerate(CLASS_NAMES)}

# Words in names of kernels, of profiler annotations (nccl:_all_gather_base) and in "Collective name" -> one spelling.
_COLLECTIVES = (
    ("all_to_all", r"all_?to_?all|a2a|dispatch|combine"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_gather", r"all_?gather|allgather"),
    ("all_reduce", r"all_?reduce|multimem_"),
    ("broadcast", r"broadcast|\bbcast"),
    ("barrier", r"barrier"),
    ("send_recv", r"send_?recv|\bsend|\brecv|coalesced|p2p"),
    ("gather", r"gather"),
    ("scatter", r"scatter"),
    ("reduce", r"reduce"),
)
_COLLECTIVE_WORDS = tuple((name, re.compile(words, re.IGNORECASE)) for name, words in _COLLECTIVES)
UNNAMED = "unnamed collective"

MOST_NAME = 600  # characters of a kernel name that are looked at


def kernel_class(name: str) -> str:
    """One of `CLASS_NAMES`."""
    text = _plain(name)
    return next((found for found, words in _COMPILED if words.search(text)), OTHER)


def collective(name: str) -> str:
    """The collective that a kernel, an annotation or an argument names, `unnamed collective` where none."""
    text = name[:MOST_NAME].split("(", 1)[0]
    return next((found for found, words in _COLLECTIVE_WORDS if words.search(text)), UNNAMED)


def short_name(name: str) -> str:
    """A kernel's name as a table shows it: without parameters and return type, at most 120 characters."""
    text = _plain(name)
    return text if len(text) <= 120 else text[:117] + "..."


def _plain(name: str) -> str:
    """Without return type and parameters: these name classes of the operands (`TensorListMetadata`)."""
    text = " ".join(name[:MOST_NAME].split()).removeprefix("void ")
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and at > 0 and not text.startswith("(anonymous", at):
            return text[:at]
    return text
