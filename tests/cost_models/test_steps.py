"""Layers as steps: their products equal what torch counts in the library's own modules, or what is written out here."""

import json
from pathlib import Path
from typing import Any

import pytest

from mmplan.cost_models.build import model_layers
from mmplan.cost_models.counts import forward_flops, parameters, product_flops
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import summed_loads
from mmplan.cost_models.ops import Convolution
from mmplan.cost_models.step_ops import step_ops
from mmplan.cost_models.values import TOKENS, Value
from mmplan.scenario.formats.hf_config import read_config
from mmplan.scenario.scenario import Model, Sample, Training
from mmplan.scenario.steps import Convolve, Dense, Fork, Form, Join, Normed, conv, residual, row_ratio, width_after

QFORMER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
QFORMER |= {"encoder_hidden_size": 24, "vocab_size": 50}
EYE = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 40}
EYE |= {"image_size": 42, "patch_size": 14}
OPT = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "ffn_dim": 40, "vocab_size": 60}
OPT |= {"word_embed_proj_dim": 32}


def read(folder: Path, values: dict[str, Any]) -> Model:
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return read_config(file).model


def ours(model: Model, sample: Sample, *modules: str) -> float:
    loads = summed_loads(model, [sample])
    return sum(forward_flops(layer, loads[layer.module]) for layer in model_layers(model) if layer.module in modules)


def counted(run: Any) -> int:
    """FLOPs of a call as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    total: int = counter.get_total_flops()
    return total


def test_a_convolution_has_the_products_of_its_kernel() -> None:
    x = Value("x", TOKENS, 6)
    ops = step_ops((conv(8, 3, stride=2), Convolve(width=8, taps=25, groups=8)), x, TOKENS, Training())
    first, second = ops
    assert isinstance(first, Convolution) and isinstance(second, Convolution)
    load = Load(tokens=64)
    assert product_flops(first, load) == 2 * (64 / 4) * 9 * 6 * 8
    # its rows carry the name of the module's own tokens
    assert product_flops(second, load) == 2 * 64 * 25 * 8


def test_rows_and_widths_follow_from_the_steps() -> None:
    steps = (conv(8, 3, stride=2), Join(rows=4), Fork(left=(), right=(Dense(width=32),)))
    assert row_ratio(steps) == pytest.approx(1 / 16)
    assert width_after(steps, 3) == 32


def test_blocks_follow_one_another_and_the_last_serve_all_others() -> None:
    first, second = (residual(Normed()),), (residual(Dense(width=4)),)
    form = Form(blocks=((2, first), (1, second)))
    assert [form.block(index) for index in range(4)] == [first, first, second, second]


def test_queries_of_windows_read_their_window_alone() -> None:
    form = Form(queries=3, window=15)
    assert form.read_by_queries(31) == (9, 15)
    assert Form(queries=4, together=True).read_by_queries(10) == (4, 14)


def test_the_query_transformer_has_the_products_of_blip_2(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    values = {"model_type": "blip-2", "num_query_tokens": 5, "vision_config": EYE, "qformer_config": QFORMER}
    model = read(tmp_path, values | {"text_config": OPT})
    config = transformers.Blip2QFormerConfig(**QFORMER, attn_implementation="eager")
    theirs = transformers.Blip2QFormerModel(config).eval()
    queries, tokens = torch.randn(1, 5, 32), torch.randn(1, 10, 24)
    expected = counted(lambda: theirs(query_embeds=queries, encoder_hidden_states=tokens))
    assert ours(model, Sample(text_tokens=4, images=((42, 42),)), "qformer") == expected


def test_a_perceiver_has_the_products_of_idefics_2(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.idefics2.modeling_idefics2 import Idefics2Connector

    text = {"model_type": "mistral", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": 60}
    resampler = {"resampler_n_latents": 6, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 8}
    resampler |= {"num_key_value_heads": 2, "hidden_size": 32}
    values = {"model_type": "idefics2", "vision_config": EYE, "text_config": text, "perceiver_config": resampler}
    model = read(tmp_path, values)
    kind = values.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **values, attn_implementation="eager")
    theirs = Idefics2Connector(config).eval()
    tokens = torch.randn(1, 9, 24)
    expected = counted(lambda: theirs(image_hidden_states=tokens, attention_mask=torch.ones(1, 9, dtype=torch.bool)))
    assert ours(model, Sample(text_tokens=4, images=((42, 42),)), "projector", "resampler") == expected


def test_a_convolutional_tower_has_the_products_of_chameleon(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tower = {"base_channels": 32, "channel_multiplier": [1, 2], "num_res_blocks": 2, "resolution": 16}
    tower |= {"latent_channels": 8, "embed_dim": 8, "num_embeddings": 20}
    text = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 60}
    text |= {"num_key_value_heads": 4, "intermediate_size": 40, "vocabulary_map": {"<image>": 50}}
    model = read(tmp_path, {"model_type": "chameleon", **text, "vq_config": tower})
    config = transformers.ChameleonConfig(**text, vq_config=tower).vq_config
    theirs = transformers.models.chameleon.modeling_chameleon.ChameleonVQVAE(config).eval()
    expected = counted(lambda: theirs.encode(torch.randn(1, 3, 16, 16)))
    modules = [module.name for module in model.modules if module.name.startswith("vision") or module.name == "codes"]
    assert ours(model, Sample(text_tokens=4, images=((16, 16),)), *modules) == expected


def test_per_layer_embeddings_have_the_products_of_gemma_4(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60}
    text |= {"global_head_dim": 16, "num_hidden_layers": 6, "intermediate_size": 40, "sliding_window": 64}
    text |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 60, "num_kv_shared_layers": 3}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": True}
    model = read(tmp_path, {"model_type": "gemma4_text", **text})
    config = transformers.AutoConfig.for_model("gemma4_text", **text, attn_implementation="eager")
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    expected = counted(lambda: theirs(input_ids=torch.ones(1, 12, dtype=torch.long), use_cache=False))
    found = ours(model, Sample(text_tokens=12), "llm")
    turned = 12 * 2 * (8 // 2 + 16 // 2)  # the library makes rotary angles by a product
    assert found == pytest.approx(expected, abs=turned)


def test_a_state_space_counts_its_chunks(tmp_path: Path) -> None:
    values = {"model_type": "nemotron_h", "hybrid_override_pattern": "M", "hidden_size": 32, "vocab_size": 60}
    values |= {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 64}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = read(tmp_path, values)
    block = next(layer for layer in model_layers(model) if layer.id == "llm.0")
    projections = 2 * 64 * 32 * (2 * 32 + 2 * 32 + 4) + 2 * 64 * 32 * 32
    scores, states = 64 * 64 * 2 * 16, 64 * (64 * 8 + 2 * 16 * 8) * 4
    assert forward_flops(block, Load(tokens=64, chunk_tokens=64, sequences=1)) == projections + 2 * (scores + states)
    assert parameters(block) == 32 * 132 + 96 * 5 + 3 * 4 + 32 + 32 * 32 + 2 * 32
