"""Language models by `model_type`: where the class of each differs from LLaMA's block."""

from collections.abc import Mapping
from dataclasses import replace

from mmplan.scenario.formats.hf import (
    dots_blocks,
    experts,
    gemma,
    indexed,
    inkling_blocks,
    mamba,
    minimax,
    mixers,
    muse_blocks,
    older_names,
    sparse_index,
    stack,
)
from mmplan.scenario.formats.hf.blocks_by_layer import sliding
from mmplan.scenario.formats.hf.stack import Stack

LAYER_NORM = {"norm": "layer"}
LAYER_NORM_PLAIN_MLP = {"norm": "layer", "gated_mlp": False}
POST_ONLY = {"pre_norms": False, "post_norms": True, "qk_norm": True}
PARALLEL = {"norm": "layer", "norm_bias": False, "parallel": True}
DEEPSEEK = Stack(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    shape={"mla": True},
    adapt=(experts.latent_attention, experts.deepseek_experts),
)
DSA = replace(DEEPSEEK, adapt=(indexed.dsa,), form=indexed.form_of_dsa)
LLAMA = Stack(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
QWEN2 = Stack(qkv_bias=True, adapt=(stack.qwen_window,))
QWEN3 = Stack(qkv_bias="attention_bias", out_bias="attention_bias", shape={"qk_norm": True}, adapt=(stack.qwen_window,))
QWEN3_MOE = replace(QWEN3, adapt=(experts.qwen_experts,))
MISTRAL = Stack(adapt=(stack.window,))
GEMMA = {"activation": "gelu"}
OCR = replace(LLAMA, adapt=(experts.ocr_experts,))
BIASED = Stack(qkv_bias="attention_bias", out_bias="attention_bias")
GEMMA4 = replace(BIASED, shape=GEMMA, adapt=(mixers.gemma4,), form=gemma.form_of_gemma4, stored=gemma.per_layer_norm)

KOSMOS = Stack(
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    shape=LAYER_NORM_PLAIN_MLP,
    ffn="ffn_dim",
    adapt=(stack.kosmos,),
    stored=lambda text, shape: 2 * shape.hidden if text.kind == "kosmos_2_5_text_model" else 0,
    turned=False,
)
STEP = Stack(
    as_now=mixers.step_as_now,
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    adapt=(experts.step_experts, mixers.step),
)
# An MLP without gate, whose activation has two numbers (xIELU, arXiv 2411.13010).
APERTUS = replace(BIASED, shape={"qk_norm": True, "gated_mlp": False, "stored": 2})
ADA = 32  # width of the condition on the delay (modeling_voxtral_realtime.py)
STACKS: Mapping[str, Stack] = {
    "apertus": APERTUS,
    "apertus1p5_text": APERTUS,
    "aria_text": replace(LLAMA, adapt=(experts.aria_experts,)),
    "arcee": replace(LLAMA, shape={"gated_mlp": False}),
    "chameleon": replace(
        LLAMA,
        adapt=(
            stack.post_norms_if("swin_norm"),
            lambda text, shape: replace(shape, stored=2 * (shape.heads + shape.kv_heads) * shape.head_dim),
        ),
    ),
    "cohere": replace(BIASED, shape=PARALLEL, adapt=(stack.norms_of_heads,)),
    "cohere2": replace(BIASED, shape=PARALLEL, adapt=(stack.every(4),)),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "cohere_compass_text": replace(BIASED, shape=PARALLEL, adapt=(lambda text, shape: sliding(text, shape, None),)),
    "dbrx": Stack(
        as_now=older_names.dbrx,
        shape={"norm": "layer", "norm_bias": False},
        adapt=(experts.mixtral_experts,),
    ),
    "deepseek_v32": DSA,
    "embedding_gemma2_text": replace(
        BIASED, shape=GEMMA, adapt=(gemma.embedding,), form=gemma.form_of_embedding, stored=gemma.per_layer_norm
    ),
    "ernie4_5": Stack(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    "idefics": Stack(),
    "ernie4_5_moe": Stack(
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        adapt=(experts.ernie_experts,),
        head_bias="use_bias",
    ),
    "deepseek_ocr2_text": OCR,
    "unlimited_ocr_text": OCR,
    "emu3_text_model": replace(BIASED, mlp_bias="mlp_bias"),
    "ernie4_5_vl_moe_text": Stack(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", adapt=(experts.ernie_vl_experts,)
    ),
    "exaone4": Stack(shape=POST_ONLY, adapt=(stack.interval,)),
    "gemma": replace(BIASED, shape=GEMMA),
    "gemma2": replace(BIASED, shape=GEMMA, adapt=(mixers.gemma2,)),
    "gemma3_text": replace(BIASED, shape=GEMMA, adapt=(mixers.gemma3,)),
    "gemma3n_text": replace(
        BIASED, shape=GEMMA, adapt=(gemma.gemma3n,), form=gemma.form_of_gemma3n, stored=gemma.per_layer_norm
    ),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "glm": Stack(qkv_bias="attention_bias"),
    "glm4": Stack(qkv_bias="attention_bias", shape={"post_norms": True}),
    "glm4_moe": Stack(qkv_bias="attention_bias", adapt=(stack.qk_norm_if("use_qk_norm"), experts.deepseek_experts)),
    "glm5_next_text": Stack(
        as_now=lambda text: replace(text, values={**text.values, "head_dim": None}),  # the class makes its own
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        shape={"mla": True},
        adapt=(indexed.glm5,),
        form=indexed.form_of_glm5,
    ),
    "glm_moe_dsa": DSA,
    "glm4v_moe_text": Stack(qkv_bias="attention_bias", adapt=(experts.deepseek_experts,)),
    "glm4v_text": Stack(qkv_bias=True, shape={"post_norms": True}),
    "glm_ocr_text": Stack(shape={"post_norms": True}),
    "gpt2": Stack(
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        shape=LAYER_NORM_PLAIN_MLP,
        ffn="hidden_size",
        adapt=(stack.gpt2,),
        stored=stack.learned_positions("max_position_embeddings"),
        turned=False,
    ),
    "gpt_oss": replace(BIASED, adapt=(stack.every(2), experts.gpt_oss_experts)),
    "granite": LLAMA,
    "granite4_vision_text": LLAMA,
    "granite_docling_text": LLAMA,
    "glm_image_text": Stack(qkv_bias="attention_bias", shape={"post_norms": True}),
    "muse_glimmer_text": replace(BIASED, shape={"post_norms": True}, adapt=(muse_blocks.windows,)),
    "muse_spark_text": replace(BIASED, adapt=(muse_blocks.windows, muse_blocks.experts), form=muse_blocks.form),
    "t5gemma2_text": replace(BIASED, shape=GEMMA, adapt=(mixers.gemma3,)),
    "granitemoe": replace(BIASED, adapt=(experts.granite_experts,)),
    "granitemoeshared": replace(BIASED, adapt=(experts.granite_experts,)),
    "helium": replace(LLAMA, out_bias=False, adapt=(stack.square_heads,)),
    "hunyuan_v1_dense": replace(BIASED, shape={"qk_norm": True}),
    "hy_v4_vl_text": Stack(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        shape={"mla": True},
        adapt=(indexed.hunyuan4,),
        form=indexed.form_of_hunyuan4,
    ),
    "hunyuan_vl_text": replace(BIASED, shape={"qk_norm": True}),
    "hyperclovax": replace(LLAMA, adapt=(stack.post_norms_if("use_post_norm"),)),
    "inkling_text": Stack(
        as_now=inkling_blocks.as_now,
        adapt=(inkling_blocks.first,),
        form=inkling_blocks.form_of_first,
        stored=lambda text, shape: shape.hidden,  # a norm behind the token table
        ties=False,
        turned=False,
    ),
    "inkling2_text": Stack(
        ffn="moe_intermediate_size",
        adapt=(inkling_blocks.second,),
        form=inkling_blocks.form_of_second,
        stored=lambda text, shape: shape.hidden,
        ties=False,
        turned=False,
    ),
    "kimi_k2": DEEPSEEK,
    "dia_text": Stack(),
    "dots3_note_text": Stack(
        as_now=dots_blocks.as_now,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        shape={"mla": True},
        adapt=(dots_blocks.stack,),
        form=dots_blocks.form,
    ),
    "kimi_linear": Stack(
        as_now=lambda text: replace(text, values={**text.values, "head_dim": None}),
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        shape={"mla": True},
        adapt=(older_names.kimi_linear,),
        form=older_names.priced,
    ),
    "kyutai_text": Stack(ffn="ffn_dim", adapt=(stack.window, lambda text, shape: replace(shape, ffn=shape.ffn // 2))),
    "lfm3": Stack(adapt=(mixers.lfm3,)),
    "cosmos3_edge_text": replace(LLAMA, shape={"gated_mlp": False}),
    "modernbert": Stack(
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", adapt=(mixers.modernbert,)
    ),
    "molmo2_text": Stack(qkv_bias="attention_bias", adapt=(stack.molmo,), stored=stack.further_words),
    "step3p5": STEP,
    "ultrabert": replace(LLAMA, adapt=(mixers.ultrabert,)),
    "voxtral_realtime_text": Stack(
        adapt=(stack.window, lambda text, shape: replace(shape, stored=2 * ADA * shape.hidden)),
    ),
    "lfm2": Stack(adapt=(mixers.short_convolutions,)),
    "llama": LLAMA,
    "llama4_text": Stack(
        qkv_bias="attention_bias", out_bias="attention_bias", adapt=(experts.llama4_experts, mixers.llama4)
    ),
    "minimax_m2": Stack(shape={"qk_norm": True, "qk_norm_whole": True}, adapt=(experts.mixtral_experts,)),
    "minimax_m3_vl_text": Stack(adapt=(minimax.stack,), form=minimax.form),
    "ministral3": MISTRAL,
    "mistral": MISTRAL,
    "mistral_large4_text": Stack(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        adapt=(sparse_index.stack,),
        form=sparse_index.form,
        stored=lambda text, shape: text.count("qk_rope_head_dim") // 2,  # scales of the positions' angles
    ),
    "mixtral": replace(MISTRAL, adapt=(stack.window, experts.mixtral_experts)),
    "mpt": Stack(
        as_now=older_names.mpt,
        shape={"norm": "layer", "norm_bias": False, "gated_mlp": False},
        stored=lambda text, shape: 0,
        turned=False,
    ),
    "mllama_text_model": Stack(adapt=(stack.mllama,)),
    "nemotron_h": Stack(
        ties=False,
        mlp_bias="mlp_bias",
        shape={"gated_mlp": False},
        adapt=(mamba.nemotron_h,),
        form=mamba.form_of_nemotron_h,
        layers=lambda text: len(mamba.mixers(text)),
    ),
    "olmo2": replace(BIASED, shape={**POST_ONLY, "qk_norm_whole": True}),
    "olmo3": replace(BIASED, shape={**POST_ONLY, "qk_norm_whole": True}, adapt=(stack.every(4),)),
    "olmoe": replace(
        BIASED,
        shape={"qk_norm": True, "qk_norm_whole": True},
        adapt=(
            lambda text, shape: replace(
                shape, moe=experts.moe_of(text, "num_experts", shape.ffn, scoring=experts.softmax_of(text))
            ),
        ),
    ),
    "opt": Stack(
        shape=LAYER_NORM_PLAIN_MLP,
        ffn="ffn_dim",
        adapt=(stack.opt,),
        stored=stack.learned_positions("max_position_embeddings", 2),
        turned=False,
    ),
    "paddleocr_vl_text": Stack(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    "kosmos_2_5_text_model": KOSMOS,
    "kosmos_2_text_model": KOSMOS,
    "persimmon": Stack(
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        shape={"norm": "layer", "gated_mlp": False},
        adapt=(stack.qk_norm_if("qk_layernorm"),),
    ),
    "phi": Stack(
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        shape={"norm": "layer", "gated_mlp": False, "parallel": True},
        adapt=(lambda text, shape: stack.refusing(text, shape, "qk_layernorm", "norms on queries and keys"),),
        head_bias=True,
    ),
    "phi3": MISTRAL,
    "phi4_multimodal": MISTRAL,
    "phimoe": Stack(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        shape=LAYER_NORM,
        adapt=(experts.mixtral_experts,),
        head_bias="lm_head_bias",
    ),
    "qwen2": QWEN2,
    "qwen2_5_omni_text": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen2_moe": Stack(qkv_bias="qkv_bias", adapt=(experts.qwen_shared,)),
    "qwen2_vl_text": QWEN2,
    "qwen3": QWEN3,
    "qwen3_5_moe_text": replace(BIASED, ffn="moe_intermediate_size", adapt=(mixers.gated_delta, experts.qwen_shared)),
    "qwen3_5_text": replace(BIASED, adapt=(mixers.gated_delta,)),
    "qwen3_moe": QWEN3_MOE,
    "qwen4_exp_text": replace(BIASED, ffn="moe_intermediate_size", adapt=(indexed.qwen4,), form=indexed.form_of_qwen4),
    "qwen3_next": replace(BIASED, adapt=(mixers.gated_delta, experts.qwen_shared)),
    "qwen3_omni_moe_text": QWEN3_MOE,
    "qwen3_vl_moe_text": QWEN3_MOE,
    "qwen3_vl_text": replace(QWEN3, adapt=()),
    "seed_oss": Stack(qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "smollm3": LLAMA,
    "stablelm": Stack(
        qkv_bias="use_qkv_bias",
        shape=LAYER_NORM,
        adapt=(
            lambda text, shape: stack.refusing(text, shape, "qk_layernorm", "a norm for each head"),
            lambda text, shape: replace(shape, parallel=text.flag("use_parallel_residual")),
        ),
    ),
    "starcoder2": Stack(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", shape=LAYER_NORM_PLAIN_MLP, adapt=(stack.window,)
    ),
    "step3p7_text": STEP,
}
