"""What is recorded of a model beside what the planner derives from its config: parameters, FLOPs, kept activations.

    python benchmarks/recordings.py             # rewrites benchmarks/recordings.csv

Tiny models of the families that tests have, and real sizes from bundled configs, which have no weights either way. All
is trained, in fp32; FLOPs are those of a forward and a backward. `other_layers` are those whose FLOPs differ: LLaVA's
last block is used by nobody, Gemma 3 masks windows, Llama 3.2 fills up rows, Llama 4 gives all tokens to each expert.
Rows with `tp` 2 are those of a rank, of the layers that two ranks share; `summed_mb` is what these hand to sums.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers as hf
from measured import ROOT, write_rows

sys.path.insert(0, str(ROOT / "tests" / "runtime"))

from expert_families import EXPERT_FAMILIES
from ghost_models import FAMILIES, Case, saved_config
from recorded_families import SAMPLES, Compared, compared_on_ranks

from mmplan.scenario.formats.hf_config import bundled_configs
from mmplan.scenario.scenario import Sample


def _llava() -> tuple[Case, Sequence[Sample], Path]:
    file = bundled_configs()["llava-1.5-7b"]
    config = hf.LlavaConfig.from_pretrained(file)
    ids = torch.randint(3, 1000, (1, 600))
    ids[0, 4:580] = config.image_token_index
    labels = ids.masked_fill(ids == config.image_token_index, -100)
    batch = {"input_ids": ids, "labels": labels, "pixel_values": torch.randn(1, 3, 336, 336), "use_cache": False}
    case = (lambda: hf.LlavaForConditionalGeneration(config), batch)
    return case, [Sample(text_tokens=24, images=((336, 336),))], file


def _qwen2_audio() -> tuple[Case, Sequence[Sample], Path]:
    file = bundled_configs()["qwen2-audio-7b"]
    config = hf.Qwen2AudioConfig.from_pretrained(file)
    ids = torch.randint(3, 1000, (1, 800))
    ids[0, 4:754] = config.audio_token_index
    labels = ids.masked_fill(ids == config.audio_token_index, -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    batch |= {"input_features": torch.randn(1, 128, 3000), "feature_attention_mask": torch.ones(1, 3000).long()}
    case = (lambda: hf.Qwen2AudioForConditionalGeneration(config), batch)
    return case, [Sample(text_tokens=50, audio_s=(30.0,))], file


def _qwen2_vl() -> tuple[Case, Sequence[Sample], Path]:
    file = bundled_configs()["qwen2-vl-72b"]
    config = hf.Qwen2VLConfig.from_pretrained(file)
    ids = torch.randint(3, 1000, (1, 200))
    ids[0, 3], ids[0, 4:148] = config.vision_start_token_id, config.image_token_id
    kinds = (ids == config.image_token_id).int()
    batch = {"input_ids": ids, "labels": ids.masked_fill(kinds > 0, -100), "attention_mask": torch.ones_like(ids)}
    batch |= {"pixel_values": torch.randn(576, 1176), "image_grid_thw": torch.tensor([[1, 24, 24]])}
    batch |= {"mm_token_type_ids": kinds, "use_cache": False}
    case = (lambda: hf.Qwen2VLForConditionalGeneration(config), batch)
    return case, [Sample(text_tokens=56, images=((336, 336),))], file


REAL: dict[str, Callable[[], tuple[Case, Sequence[Sample], Path]]] = {
    "llava-1.5-7b": _llava,
    "qwen2-audio-7b": _qwen2_audio,
    "qwen2-vl-72b": _qwen2_vl,
}


DEGREES = (2,)


def rows_of(name: str, size: str, case: Case, samples: Sequence[Sample], config: Path) -> list[dict[str, object]]:
    """Of whole layers, and of blocks that tensor-parallel ranks share on one of them."""
    start = time.process_time()
    on_ranks = compared_on_ranks(case, samples, config, DEGREES)
    cpu_s = time.process_time() - start
    whole, rows = on_ranks[1], []
    for tp, layers in on_ranks.items():
        shared = {key: pair for key, pair in layers.items() if pair[1].forward_flops < whole[key][1].forward_flops}
        if tp == 1 or shared:
            rows.append(row(name, size, tp, layers if tp == 1 else shared, cpu_s))
    return rows


def row(name: str, size: str, tp: int, layers: Compared, cpu_s: float) -> dict[str, object]:
    derived, recorded = ([pair[side] for pair in layers.values()] for side in (0, 1))
    flops = [sum(one.forward_flops + one.backward_flops for one in side) for side in (derived, recorded)]
    kept = [sum(one.kept_bytes for one in side) for side in (derived, recorded)]
    summed = [sum(one.summed_bytes for one in side) for side in (derived, recorded)]
    others = [key for key, (a, b) in layers.items() if a.forward_flops != b.forward_flops]
    return {
        "model": name,
        "size": size,
        "tp": tp,
        "transformers": hf.__version__,
        "layers": len(layers),
        "parameters": sum(one.parameters for one in derived),
        "recorded_parameters": sum(one.parameters for one in recorded),
        "gflops": f"{flops[0] / 1e9:.6g}",
        "recorded_gflops": f"{flops[1] / 1e9:.6g}",
        "kept_mb": f"{kept[0] / 1e6:.5g}",
        "recorded_kept_mb": f"{kept[1] / 1e6:.5g}",
        "kept_ratio": f"{kept[1] / kept[0]:.3f}",
        "summed_mb": f"{summed[0] / 1e6:.6g}",
        "recorded_summed_mb": f"{summed[1] / 1e6:.6g}",
        "other_layers": " ".join(others),
        "cpu_s": f"{cpu_s:.2f}",
    }


def main() -> None:
    torch.manual_seed(0)
    text = dict.fromkeys(EXPERT_FAMILIES.keys() - SAMPLES.keys(), [Sample(text_tokens=24)] * 2)
    samples = {**SAMPLES, **text}
    rows: list[dict[str, object]] = []
    for name, build in (FAMILIES | EXPERT_FAMILIES).items():
        case = build()
        with TemporaryDirectory() as folder:
            rows += rows_of(name, "tiny", case, samples[name], saved_config(case[0](), Path(folder)))
    for name, made in REAL.items():
        rows += rows_of(name, "real", *made())
    write_rows("recordings.csv", rows)
    for one in rows:
        print(*one.values(), sep="  ")


if __name__ == "__main__":
    main()
