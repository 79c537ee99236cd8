"""Experts, latent attention, text encoders, DeepStack edges and padding as YAML; wrong combinations are refused."""

from pathlib import Path

import pytest

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import forward_flops, kept_bytes, op_parameters, parameters
from mmplan.cost_models.degrees import divides, tp_degrees
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.shard import Shard
from mmplan.errors import InputError
from mmplan.scenario.attention_forms import Mla
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import ModelEdge, Moe, Scenario

GOOD = """\
name: variants
model:
  modules:
    vision: {kind: vision_encoder, layers: 3, hidden: 50, heads: 5, ffn: 128, patch: 8, position_rows: 9}
    projector: {kind: projector, dims: [200, 128], merge: 4}
    deep: {kind: projector, dims: [200, 128], merge: 4}
    prompt: {kind: text_encoder, layers: 2, hidden: 128, heads: 4, ffn: 256, vocabulary: 300, tokens: 16, causal: true}
    llm:
      kind: language_model
      layers: 4
      hidden: 128
      heads: 4
      ffn: 256
      vocabulary: 500
      moe: {experts: 8, topk: 2, expert_ffn: 64, shared_ffn: 32, first_dense: 1}
      mla: {q_lora: 48, kv_lora: 32, qk_nope: 16, qk_rope: 8, v_dim: 24}
  edges:
    - [vision, projector]
    - [vision.1, deep]
    - [projector, llm]
    - [deep, llm.0]
    - [prompt, llm]
data: {text_tokens: 100, images: 1, image_size: 128}
batch: {global: 16}
precision: bf16
cluster: {device: h100-sxm, nodes: 1, devices_per_node: 8}
"""


def read(folder: Path, text: str) -> Scenario:
    file = folder / "variants.yaml"
    file.write_text(text)
    return load_scenario(file)


def test_experts_latent_attention_and_deepstack_are_read(tmp_path: Path) -> None:
    scenario = read(tmp_path, GOOD)
    shape = scenario.model.module("llm").transformer
    assert shape is not None
    assert shape.moe == Moe(experts=8, topk=2, expert_ffn=64, shared_ffn=32, first_dense=1)
    assert shape.mla == Mla(q_lora=48, kv_lora=32, qk_nope=16, qk_rope=8, v_dim=24)
    assert scenario.model.edges[1] == ModelEdge(producer="vision", consumer="deep", kind="input", producer_layer=1)
    assert scenario.model.edges[3] == ModelEdge(producer="deep", consumer="llm", kind="add", consumer_layer=0)
    graph = build_graph(scenario)
    assert graph.predecessors("deep.0") == ("vision.1",)
    assert graph.predecessors("llm.0") == ("llm.embed", "deep.0")
    assert not any(layer.module == "prompt" and layer.kind in ("head", "loss") for layer in graph.layers())


def test_a_text_encoder_reads_its_fixed_number_of_tokens(tmp_path: Path) -> None:
    scenario = read(tmp_path, GOOD)
    loads = mean_loads(scenario, 1)
    assert loads["prompt"].tokens == loads["prompt"].outputs == 16
    assert loads["llm"].tokens == 16 + 64 + 100
    scenario = read(tmp_path, GOOD.replace("tokens: 16", "positions: none"))
    assert mean_loads(scenario, 1)["prompt"].tokens == 100


def test_padding_frees_tensor_parallelism_and_is_paid_for(tmp_path: Path) -> None:
    """5 vision heads of 10 become 8 at tp 8, one on each rank."""
    plain = read(tmp_path, GOOD)
    assert [divides(plain.model.module("vision"), tp) for tp in (1, 2, 4, 8)] == [True, False, False, False]
    scenario = read(tmp_path, GOOD.replace("model:\n", "model:\n  pad_heads: true\n  pad_vocabulary: 16\n"))
    assert tp_degrees(scenario) == (1, 2, 4, 8)
    block, load = build_graph(scenario).layer("vision.0"), Load(tokens=10, pairs=100)
    qkvo = 4 * 50 * 10 + 3 * 10 + 50  # one head of 10 on each rank, the output's bias whole
    mlp, norms = 2 * 50 * 16 + 16 + 50, 4 * 50
    assert sum(op_parameters(op, 8) for op in block.ops) == qkvo + mlp + norms
    assert forward_flops(block, load, 8) == 2 * 10 * (4 * 50 * 10 + 2 * 50 * 16) + 4 * 100 * 10
    assert 8 * kept_bytes(block, load, "bf16", 8) > kept_bytes(block, load, "bf16")


def test_a_padded_vocabulary_has_whole_multiples_on_every_rank(tmp_path: Path) -> None:
    scenario = read(
        tmp_path, GOOD.replace("vocabulary: 500", "vocabulary: 500, pad_vocabulary: 64".replace(", ", "\n      "))
    )
    head = build_graph(scenario).layer("llm.head")
    assert parameters(head) == 512 * 128
    assert op_parameters(head.ops[0], 2) == 256 * 128
    assert op_parameters(head.ops[0], 8) == 64 * 128
    assert op_parameters(head.ops[0], 4) == 128 * 128


def test_expert_degrees_split_weights_and_not_the_rows_of_a_rank(tmp_path: Path) -> None:
    layer, load = build_graph(read(tmp_path, GOOD)).layer("llm.2"), Load(tokens=12, pairs=144)
    experts = [op for op in layer.ops if type(op).__name__ == "GroupedLinear"]
    whole = sum(op_parameters(op) for op in experts)
    assert whole == 8 * 3 * 128 * 64
    assert sum(op_parameters(op, Shard(ep=4)) for op in experts) == whole / 4
    assert sum(op_parameters(op, Shard(tp=2, ep=4, etp=1)) for op in experts) == whole / 4
    assert sum(op_parameters(op, Shard(tp=2, ep=2)) for op in experts) == whole / 4
    rows = {shard: experts[0].x.local_rows(load, shard) for shard in (Shard(), Shard(ep=4), Shard(tp=2, etp=1))}
    assert list(rows.values()) == [24, 24, 12]
    assert forward_flops(layer, load, Shard(cp=2)) == forward_flops(layer, load) / 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("topk: 2", "topk: 9", "15: model.modules.llm.moe.topk: topk = 9 is more than experts = 8"),
        ("experts: 8", "experts: 0", "15: model.modules.llm.moe.experts: expected at least 1, found 0"),
        (
            "first_dense: 1",
            "first_dense: 4",
            "15: model.modules.llm.moe: first_dense = 4 and every = 1 leave none of the 4 layers with experts",
        ),
        ("qk_rope: 8", "qk_rope: 7", "16: model.modules.llm.mla.qk_rope: rotary positions need an even width, found 7"),
        (
            "heads: 4\n",
            "heads: 4\n      kv_heads: 2\n",
            "13: model.modules.llm.kv_heads: with mla the heads follow from its widths: remove kv_heads",
        ),
        (
            "heads: 4\n",
            "heads: 4\n      qk_norm: true\n",
            "13: model.modules.llm.qk_norm: latent attention has norms of its own: remove qk_norm",
        ),
        (
            "heads: 4\n",
            "heads: 4\n      sliding: true\n",
            "13: model.modules.llm.sliding: sliding has a meaning only together with window_tokens",
        ),
        (
            "tokens: 16, causal",
            "causal",
            "7: model.modules.prompt.positions: learned positions need a fixed number of tokens",
        ),
        ("[vision.1, deep]", "[vision.7, deep]", "19: model.edges[1]: block 7 does not exist: 'vision' has 3"),
        ("[vision.1, deep]", "[visio.1, deep]", "19: model.edges[1]: unknown module 'visio'; did you mean 'vision'?"),
        ("[deep, llm.0]", "[deep.0, llm.0]", "21: model.edges[3]: 'deep' is a projector and has no blocks"),
        (
            "[prompt, llm]",
            "[prompt.0, llm]",
            "22: model.edges[4]: only a projector reads the tokens of an inner block: 'llm' is none",
        ),
        (
            "[prompt, llm]",
            "[llm, prompt]",
            "22: model.edges[4]: 'prompt' reads the data and takes no edge: its kind is text_encoder",
        ),
        (
            "deep: {kind: projector, dims: [200, 128], merge: 4}",
            "deep: {kind: projector, dims: [50, 128]}",
            "21: model.edges[3]: 'deep' joins 1 tokens and 'projector' 4: their rows differ",
        ),
        (
            "    - [projector, llm]\n",
            "    - [projector, llm.0]\n",
            "20: model.edges[2]: 'projector' adds to tokens of 'vision', and no edge merges those into 'llm'",
        ),
        (
            "precision: bf16\n",
            "precision: bf16\ntrain: {llm: {lora: {rank: 4, targets: [q]}}}\n",
            "26: train.llm.lora.targets: 'llm' has latent attention: of its projections only o takes an adapter",
        ),
        (
            "precision: bf16\n",
            "precision: bf16\ntrain: {llm: {lora: {rank: 4, targets: [up]}}}\n",
            "26: train.llm.lora.targets: 'llm' has experts: adapters on gate, up and down are not supported there",
        ),
    ],
)
def test_wrong_combinations_are_refused_with_one_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(InputError) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert str(caught.value) == f"{tmp_path / 'variants.yaml'}:{message}"


def test_imbalance_is_known_to_the_layers_and_changes_no_count(tmp_path: Path) -> None:
    skewed = build_graph(read(tmp_path, GOOD.replace("topk: 2", "topk: 2, imbalance: 1.5")))
    even = build_graph(read(tmp_path, GOOD))
    assert [skewed.layer(f"llm.{index}").imbalance for index in range(4)] == [1.0, 1.5, 1.5, 1.5]
    assert even.layer("llm.2").imbalance == 1.0
    load = Load(tokens=10, pairs=100)
    assert forward_flops(skewed.layer("llm.2"), load) == forward_flops(even.layer("llm.2"), load)
    assert kept_bytes(skewed.layer("llm.2"), load, "bf16") == kept_bytes(even.layer("llm.2"), load, "bf16")
