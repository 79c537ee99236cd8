"""Every way a scenario file can be wrong that we could think of: one sentence each, with file, line and key."""

from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.scenario.load import load_scenario

GOOD = """\
name: small
model:
  modules:
    vision: {kind: vision_encoder, layers: 2, hidden: 64, heads: 4, ffn: 128, patch: 8, image_size: 64}
    projector: {kind: projector, dims: [64, 128]}
    audio: {kind: audio_encoder, layers: 2, hidden: 128, heads: 4, ffn: 128, mel_bins: 16}
    llm: {kind: language_model, layers: 4, hidden: 128, heads: 4, kv_heads: 2, ffn: 256, vocabulary: 500}
  edges:
    - [vision, projector]
    - [projector, llm]
    - [audio, llm]
train: {vision: frozen, llm: {lora: {rank: 8, targets: [q, v]}}}
data:
  text_tokens: 100
  images: [0, 1, 2]
  audio_clips: {histogram: {0: 1, 1: 3}}
  audio_seconds: 10
batch: {global: 16}
precision: bf16
cluster: {device: h100-sxm, nodes: 2, devices_per_node: 4}
constraints: {no_split: [vision.0-1], tp: [1, 2]}
"""

# (text of GOOD, what stands there instead, message after the path of the file)
CASES = [
    ("cluster: {", "clutser: {", "20: clutser: unknown key; did you mean 'cluster'?"),
    ("images: [0, 1, 2]", "imags: [0, 1, 2]", "15: data.imags: unknown key; did you mean 'images'?"),
    (
        "heads: 4, kv_heads: 2",
        "heads: 4, kv_head: 2",
        "7: model.modules.llm.kv_head: unknown key; did you mean 'kv_heads'?",
    ),
    (
        "nodes: 2",
        "nodes: 2, price_per_hour: -3",
        "20: cluster.price_per_hour: expected more than 0.0, found -3",
    ),
    ("nodes: 2", "nodes: 0", "20: cluster.nodes: expected at least 1, found 0"),
    ("nodes: 2", "nodes: true", "20: cluster.nodes: expected a whole number, found the boolean true"),
    ("nodes: 2", "nodes: 2.0", "20: cluster.nodes: expected a whole number, found 2.0"),
    ("nodes: 2", "nodes: 1e400", "20: cluster.nodes: expected a whole number, found inf"),
    (
        "text_tokens: 100",
        "text_tokens: 1e9",
        "14: data.text_tokens: expected at most 10,000,000 in a sample, found 1,000,000,000",
    ),
    ("images: [0, 1, 2]", "images: [0, 100000]", "15: data.images: expected at most 10,000 in a sample, found 100,000"),
    (
        "audio_seconds: 10",
        "audio_seconds: 1e6",
        "17: data.audio_seconds: expected clips of at most 100,000 s, found 1,000,000 s",
    ),
    ("nodes: 2", "nodes: 99999999999999999999999", "20: cluster.nodes: expected at most 100000, found a huge number"),
    ("global: 16", "global: 0", "18: batch.global: expected at least 1, found 0"),
    ("global: 16", "global: many", "18: batch.global: expected a whole number, found 'many'"),
    (
        "batch: {global: 16}\n",
        "",
        "1: batch: this key is missing; found 'name', 'model', 'train', 'data', 'precision', 'cluster', 'constraints'",
    ),
    ("batch: {global: 16}", "batch: {}", "18: batch.global: this key is missing; found no keys"),
    ("batch: {global: 16}", "batch: 16", "18: batch: expected a mapping, found 16"),
    ("kv_heads: 2", "kv_heads: 3", "7: model.modules.llm.kv_heads: heads = 4 is not a multiple of kv_heads = 3"),
    (
        "hidden: 64, heads: 4",
        "hidden: 64, heads: 5",
        "4: model.modules.vision.heads: hidden = 64 is not a multiple of heads = 5; give head_dim",
    ),
    (
        "image_size: 64",
        "image_size: 60",
        "4: model.modules.vision.image_size: image_size = 60 is not a multiple of patch = 8",
    ),
    ("layers: 4", "layers: -4", "7: model.modules.llm.layers: expected at least 1, found -4"),
    (
        "kind: projector",
        "kind: projektor",
        "5: model.modules.projector: expected 'vision_encoder', 'audio_encoder', 'text_encoder', 'language_model', "
        "'projector', found 'projektor'; did you mean 'projector'?",
    ),
    ("kind: projector, ", "", "5: model.modules.projector: the key 'kind' is missing; found 'dims'"),
    (
        "dims: [64, 128]",
        "dims: [64]",
        "5: model.modules.projector.dims: expected at least 2 items, found a list of 1 item",
    ),
    ("dims: [64, 128]", "dims: [32, 128]", "9: model.edges[0]: 'vision' gives width 64, 'projector' takes 32"),
    ("dims: [64, 128]", "dims: [64, 256]", "10: model.edges[1]: 'projector' gives width 256, 'llm' has hidden 128"),
    (
        "dims: [64, 128]",
        "dims: [66, 128], merge: 4",
        "5: model.modules.projector.dims: dims[0] = 66 is not a multiple of merge = 4 joined tokens",
    ),
    ("- [audio, llm]", "- [audio, lm]", "11: model.edges[2]: unknown module 'lm'; did you mean 'llm'?"),
    ("- [audio, llm]", "- [audio]", "11: model.edges[2]: expected [producer, consumer], found 1 name"),
    ("- [audio, llm]", "- [projector, llm]", "11: model.edges[2]: the edge projector -> llm stands twice"),
    (
        "- [audio, llm]",
        "- [llm, audio]",
        "11: model.edges[2]: 'audio' reads the data and takes no edge: its kind is audio_encoder",
    ),
    (
        "- [audio, llm]",
        "- [audio, llm, hidden]",
        "11: model.edges[2]: expected 'merge' as kind of this edge, found 'hidden'",
    ),
    ("    - [audio, llm]\n", "", "6: model.modules.audio: nothing reads the tokens of 'audio': no edge starts there"),
    (
        "    - [vision, projector]\n",
        "",
        "4: model.modules.vision: nothing reads the tokens of 'vision': no edge starts there",
    ),
    ("- [audio, llm]", "- [audio, llm]\n    - [llm, llm]", "8: model.edges: the edges form a cycle: llm -> llm"),
    (
        "lora: {rank: 8, targets: [q, v]}",
        "lora: {targets: [q, v]}",
        "12: train.llm.lora.rank: this key is missing; found 'targets'",
    ),
    (
        "targets: [q, v]",
        "targets: [q, w]",
        "12: train.llm.lora.targets[1]: expected 'q', 'k', 'v', 'o', 'gate', 'up' or 'down', found 'w'",
    ),
    ("rank: 8", "rank: 512", "12: train.llm.lora.rank: rank = 512 is more than the width 128 of 'llm'"),
    (
        "{vision: frozen,",
        "{vision: forzen,",
        "12: train.vision: expected 'full' or 'frozen', found 'forzen'; did you mean 'frozen'?",
    ),
    ("{vision: frozen,", "{vison: frozen,", "12: train.vison: unknown module 'vison'; did you mean 'vision'?"),
    (
        "{vision: frozen, llm: {lora: {rank: 8, targets: [q, v]}}}",
        "{vision: frozen, projector: frozen, audio: frozen, llm: frozen}",
        "12: train: every module is frozen: nothing is trained",
    ),
    (
        "{vision: frozen,",
        "{projector: {lora: {rank: 4, targets: [up]}},",
        "12: train.projector.lora: 'projector' is a projector: train it full or frozen",
    ),
    (
        "{vision: frozen, llm: {lora: {rank: 8, targets: [q, v]}}}",
        "{vision: {lora: {rank: 8, targets: [gate]}}}",
        "12: train.vision.lora.targets: 'vision' has no gate: its MLP has up and down only",
    ),
    (
        "text_tokens: 100",
        "text_tokens: .nan",
        "14: data.text_tokens: expected a number from 0 to 1,000,000,000, found nan",
    ),
    ("text_tokens: 100", "text_tokens: 10.5", "14: data.text_tokens: expected whole numbers, found 10.5"),
    (
        "text_tokens: 100",
        "text_tokens: 0",
        "14: data.text_tokens: expected at least 1 text token in every sample, found 0",
    ),
    ("text_tokens: 100", "text_tokens: yes", "14: data.text_tokens: expected a number, found the boolean true"),
    ("  text_tokens: 100\n", "", "13: data.text_tokens: this key is missing: text tokens per sample, or a manifest"),
    (
        "images: [0, 1, 2]",
        "images: 0",
        "15: data.images: module 'vision' has nothing to work on: the data hold no images",
    ),
    ("images: [0, 1, 2]", "images: []", "15: data.images: expected at least one number, found an empty list"),
    (
        "images: [0, 1, 2]",
        "images: {histogramm: {0: 1}}",
        "15: data.images: expected a number, a list of numbers or {histogram: {value: weight}}, found another mapping",
    ),
    (
        "{0: 1, 1: 3}",
        "{0: 0, 1: 0}",
        "16: data.audio_clips: expected histogram weights with a sum above 0, found 2 weights that sum to 0",
    ),
    ("{0: 1, 1: 3}", "{0: 1, 1: -3}", "16: data.audio_clips: expected a number from 0 to 1,000,000,000, found -3"),
    ("{0: 1, 1: 3}", "{0: 1, 0: 3}", "16: data.audio_clips.histogram[0]: the key stands twice, first in line 16"),
    (
        "audio_seconds: 10",
        "audio_seconds: 40",
        "17: data.audio_seconds: a clip of 40 s is longer than the 30 s that 'audio' pads to",
    ),
    ("  audio_seconds: 10\n", "", "13: data.audio_seconds: audio clips need a length above 0, found none"),
    (
        "audio_seconds: 10",
        "speech_tokens: 10\n  audio_seconds: 10",
        "17: data.speech_tokens: the data hold speech tokens, but no module reads them",
    ),
    (
        "images: [0, 1, 2]",
        "images: [0, 1, 2]\n  image_size: 480 x 640 px",
        "16: data.image_size: expected pixels such as 336 or '480x640' (height x width), found '480 x 640 px'",
    ),
    (
        "precision: bf16",
        "precision: bf61",
        "19: precision: expected 'fp32', 'bf16' or 'fp16', found 'bf61'; did you mean 'bf16'?",
    ),
    ("precision: bf16", "precision: fp8", "19: precision: expected 'fp32', 'bf16' or 'fp16', found 'fp8'"),
    ("device: h100-sxm", "device: h100-smx", "20: cluster.device: unknown device 'h100-smx'; did you mean 'h100-sxm'?"),
    (
        "device: h100-sxm",
        "device: v100-sxm2-32",
        "19: precision: v100-sxm2-32 has no bf16 units; it has 'fp32', 'fp16'",
    ),
    (
        "devices_per_node: 4",
        "devices_per_node: 4, network: {bandwidth: 80 gb/s, latency: 5 us}",
        "20: cluster.network.bandwidth: expected a bandwidth such as '900 GB/s' or '400 Gb/s', found '80 gb/s'",
    ),
    (
        "devices_per_node: 4",
        "devices_per_node: 4, network: {bandwidth: 400, latency: 5 us}",
        "20: cluster.network.bandwidth: expected a bandwidth such as '400 Gb/s' with its unit, found 400",
    ),
    (
        "devices_per_node: 4",
        "devices_per_node: 4, network: {bandwidth: 400 Gb/s, latency: 5 parsecs}",
        "20: cluster.network.latency: expected a time such as '10 us', found '5 parsecs'",
    ),
    (
        "devices_per_node: 4",
        "devices_per_node: 4, network: {bandwidth: -400 Gb/s, latency: 5 us}",
        "20: cluster.network.bandwidth: expected a bandwidth such as '400 Gb/s', above zero, found '-400 Gb/s'",
    ),
    (
        "devices_per_node: 4",
        "devices_per_node: 4, network: ndr-300",
        "20: cluster.network: expected a catalogue link or {bandwidth, latency}, found 'ndr-300'; "
        "did you mean 'ndr-400'?",
    ),
    (
        "vision.0-1",
        "vision.0-2",
        "21: constraints.no_split[0]: unknown layer 'vision.0-2'; 'vision' has 2 blocks, the last is 'vision.1'",
    ),
    ("vision.0-1", "vision.1-0", "21: constraints.no_split[0]: the range 'vision.1-0' runs backwards"),
    ("vision.0-1", "llm.haed", "21: constraints.no_split[0]: unknown layer 'llm.haed'; did you mean 'llm.head'?"),
    (
        "vision.0-1",
        "vision.0-999999999",
        "21: constraints.no_split[0]: unknown layer 'vision.0-999999999'; "
        "'vision' has 2 blocks, the last is 'vision.1'",
    ),
    ("tp: [1, 2]", "tp: 8", "21: constraints.tp: tp = 8 does not fit into a node of 4 devices"),
    ("tp: [1, 2]", "tp: [0]", "21: constraints.tp: expected a count of at least 1 or a list of them, found 0"),
    (
        "tp: [1, 2]",
        "dp: []",
        "21: constraints.dp: expected a count of at least 1 or a list of them, found none; "
        "without the key all are tried",
    ),
    (
        "tp: [1, 2]",
        "recompute: []",
        "21: constraints.recompute: expected one of none, selective, full, found none; without the key all may be",
    ),
    ("tp: [1, 2]", "modules: {vision: 2}", "21: constraints.modules.vision: expected a mapping, found 2"),
    ("tp: [1, 2]", "modules: [vision]", "21: constraints.modules: expected 'any', found a list of 1 item"),
    ("tp: [1, 2]", "pp: 4, dp: 4", "21: constraints: tp 1 x pp 4 x dp 4 = 16 devices, the cluster has 8"),
    ("tp: [1, 2]", "memory_headroom: 1.5", "21: constraints.memory_headroom: expected less than 1.0, found 1.5"),
    (
        "tp: [1, 2]",
        "schedule: 1f2b",
        "21: constraints.schedule: expected one of 1f1b, gpipe, eager-1f1b, depth-first, encoders-ahead, "
        "encoders-in-bubbles, interleaved, looped-bfs, zb-h1, zb-h2, zb-1p, zb-2p, zb-v, v-half, v-min, dualpipe-v, "
        "optimized, found '1f2b'; did you mean '1f1b'?",
    ),
    ("name: small", "name: ''", "1: name: expected at least 1 character, found ''"),
    ("name: small", "name: small\nname: large", "2: name: the key stands twice, first in line 1"),
    ("name: small", "name: [small", "2: not valid YAML: expected ',' or ']', but got ':'"),
    (
        "model:\n",
        "model:\n  hf_config: llava-1.5-7b\n",
        "2: model: expected one of 'hf_config', 'modules' (with 'edges') and 'recorded'",
    ),
    (
        "devices_per_node: 4",
        "devices_per_node: 4, network: {bandwidth: 1e30 GB/s, latency: 5 us}",
        "20: cluster.network.bandwidth: expected a bandwidth such as '400 Gb/s', at most 1e+21 in base units, "
        "found '1e30 GB/s'",
    ),
    (
        "devices_per_node: 4",
        "devices_per_node: 4, network: {bandwith: 400 Gb/s, latency: 5 us}",
        "20: cluster.network.bandwith: unknown key; did you mean 'bandwidth'?",
    ),
    (
        "device: h100-sxm",
        "device: {name: mine, memory: 2000 TiB}",
        "20: cluster.device.memory: expected a size such as '80 GiB', at most 1.1259e+15 in base units, "
        "found '2000 TiB'",
    ),
    (
        "device: h100-sxm",
        "device: {name: mine, memory: 80}",
        "20: cluster.device.memory: expected a size such as '80 GiB' with its unit, found 80",
    ),
    (
        "kv_heads: 2",
        "kv_heads: 2, cross_layers: [7]",
        "7: model.modules.llm.cross_layers: layer 7 does not exist: layers run from 0 to 3",
    ),
    (
        "kv_heads: 2",
        "kv_heads: 2, global_layers: [1]",
        "7: model.modules.llm.global_layers: global_layers has a meaning only together with window_tokens",
    ),
    (
        "- [audio, llm]",
        "- [audio, llm]\n    - [llm, vision]",
        "12: model.edges[3]: 'vision' reads the data and takes no edge: its kind is vision_encoder",
    ),
    ("train: {", "train: [] #", "12: train: expected a mapping, found an empty list"),
    (
        "images: [0, 1, 2]",
        "images: [0, 1, 2]\n  manifest: rows.csv",
        "14: data.text_tokens: a manifest gives all sizes; remove this key or the manifest",
    ),
]


def test_the_good_file_is_good(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    assert load_scenario(file).name == "small"


@pytest.mark.parametrize(("old", "new", "message"), CASES)
def test_a_wrong_file_is_refused_with_one_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    file = tmp_path / "bad.yaml"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_scenario(file)
    assert str(caught.value) == f"{file}:{message}"
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


FILES = [
    (b"", ": expected a scenario, found an empty file"),
    (b"# only a comment\n", ": expected a scenario, found an empty file"),
    (b"- a\n- b\n", ":1: expected a mapping with 'name', 'model', ..., found a list of 2 items"),
    (b"name: caf\xe9\n", ": expected UTF-8 text, found byte 0xe9 at 9"),
    (b"name: &a [*a]\n", ":1: name" + "[0]" * 50 + ": nested deeper than 50 levels"),
    (b"name: " + b"[" * 2000, ": nested deeper than 50 levels"),
    (b"a: 1\n---\nb: 2\n", ":2: not valid YAML: but found another document"),
    (
        b"name: !!python/object:os.system x\n",
        ":1: name: the tag 'tag:yaml.org,2002:python/object:os.system' is not allowed",
    ),
    (b"name: *x\n", ":1: not valid YAML: found undefined alias 'x'"),
    (b"? [a, b]\n: 1\n", ":1: expected a word as key, found a list or mapping"),
    (b"seed: " + b"9" * 5000 + b"\n", ":1: seed: expected a number, found one that is too long or malformed"),
    (b"a: " + b"x" * 1_000_001, ": a scenario has at most 1,000,000 bytes, this file has more"),
]


@pytest.mark.parametrize(("content", "message"), FILES)
def test_a_file_that_is_no_scenario_is_refused_with_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_scenario(file)
    assert str(caught.value) == f"{file}{message}"


def test_aliases_that_multiply_are_stopped(tmp_path: Path) -> None:
    file = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    file.write_text("\n".join(lines))
    with pytest.raises(InputError, match="more than 100,000 values"):
        load_scenario(file)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(GOOD)
    with pytest.raises(InputError) as caught:
        load_scenario(tmp_path / "tinny.yaml")
    assert str(caught.value) == f"{tmp_path / 'tinny.yaml'}: no such file; did you mean 'tiny.yaml'?"
    with pytest.raises(InputError, match="expected a scenario file, found a directory"):
        load_scenario(tmp_path)
