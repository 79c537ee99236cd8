"""Nemotron-H's language model: each block is one mixer behind a norm: Mamba 2, attention, an MLP or experts."""

from dataclasses import replace

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.blocks_by_layer import each
from mmplan.scenario.formats.hf.experts import moe_of
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Transformer
from mmplan.scenario.steps import Attend, Experts, Form, Kept, Mlp, Normed, Scan, Steps, residual

LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def mixers(text: Fields) -> list[str]:
    """What each block is: `layers_block_type`, or the letters of `hybrid_override_pattern`."""
    listed = text.get("layers_block_type")
    pattern = text.values.get("hybrid_override_pattern")
    if listed is None and pattern is not None:
        text.log.read.add(text.key("hybrid_override_pattern"))
        if not isinstance(pattern, str) or not 0 < len(pattern) <= 2_000 or not set(pattern) <= set(LETTERS):
            known = ", ".join(f"'{letter}'" for letter in LETTERS)
            raise text.error("hybrid_override_pattern", f"expected letters {known}, found {shown(pattern)}")
        return [LETTERS[letter] for letter in pattern]
    if listed is None:
        return list(LETTERS.values())
    words = (
        [OLDER.get(word, word) if isinstance(word, str) else word for word in listed]
        if isinstance(listed, list)
        else []
    )
    if not 0 < len(words) <= 2_000 or not all(word in LETTERS.values() for word in words):
        known = ", ".join(f"'{word}'" for word in LETTERS.values())
        raise text.error("layers_block_type", f"expected a list of {known}")
    return words


def nemotron_h(text: Fields, shape: Transformer) -> Transformer:
    """MLPs without gate; experts where the list says so."""
    words = mixers(text)
    shape = replace(shape, layers=len(words))
    if "moe" not in words:
        return shape
    width = text.count("moe_intermediate_size")
    moe = replace(moe_of(text, "n_routed_experts", width, scoring="sigmoid"), shared_ffn=0)
    shared = text.optional("moe_shared_expert_intermediate_size", least=0) or 0
    moe = replace(moe, shared_ffn=shared)
    return each(shape, lambda index, block: replace(block, moe=moe if words[index] == "moe" else None))


def form_of_nemotron_h(text: Fields, shape: Transformer) -> Form:
    rms = Normed(kind="rms")
    latent = text.optional("moe_latent_size")
    router: Steps = ()
    if latent is not None:  # the router reads whole rows, what it has beyond the latent ones is kept
        router = (Kept(size=(shape.hidden - latent) * text.count("n_routed_experts", most=100_000)),)
    blocks: dict[str, Steps] = {
        "full_attention": (residual(rms, Attend()),),
        "mlp": (residual(rms, Mlp()),),
        "moe": (residual(rms, Experts(latent=latent)), *router),
    }
    words = mixers(text)
    if "linear_attention" in words:
        scan = Scan(
            heads=text.count("mamba_num_heads"),
            head_dim=text.count("mamba_head_dim"),
            state=text.count("ssm_state_size"),
            groups=text.count("n_groups"),
            kernel=text.count("conv_kernel", most=1_000),
            chunk=text.count("chunk_size"),
            bias=text.flag("use_bias"),
            conv_bias=text.flag("use_conv_bias"),
        )
        if scan.heads % scan.groups:
            raise text.error("mamba_num_heads", f"{scan.heads} heads are not a multiple of n_groups = {scan.groups}")
        blocks["linear_attention"] = (residual(rms, scan),)
    return Form(blocks=tuple((1, blocks[word]) for word in words))
