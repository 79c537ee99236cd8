"""Towers whose tokens become fewer on the way: convolutions or mergers between their blocks."""

from dataclasses import replace

from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, projector_module, stepping
from mmplan.scenario.scenario import Model
from mmplan.scenario.steps import Active, Attend, Average, Dense, Fork, Form, Join, Normed, Steps, Usual, conv, residual


def minicpm(config: Fields, name: str) -> Model:
    """MiniCPM-V 4.6: attention in windows of 2 x 2 and a merger behind block `insert_layer_id`, another at the end."""
    whole, tower = tower_of(config), config.part("vision_config")
    llm, shape = text_module(config, "text_config"), whole.transformer
    assert shape is not None
    window, hidden = _square(tower, "window_kernel_size"), shape.hidden
    first = tower.count("insert_layer_id", least=0, most=shape.layers - 1) + 1
    attending: Steps = (residual(Normed(), Attend()),)
    before = replace(shape, layers=first + 1, final_norm=False, window_tokens=window, global_layers=tuple(range(first)))
    vision = replace(whole, transformer=before, form=Form(blocks=((first, (Usual(),)), (1, attending))))
    joined: Steps = (Join(rows=window), Normed(), Dense(width=shape.ffn * window), Active(), Dense(width=hidden))
    form = Form(front=(Fork(left=(Average(rows=window),), right=joined),))
    rest = encoder_module(replace(shape, layers=max(1, shape.layers - first)), form, name="vision_merged")
    if shape.layers == first:
        raise tower.error("insert_layer_id", f"the merger stands behind the last of {shape.layers} blocks")
    merge, times = _square(config, "merge_kernel_size"), config.count("merger_times", most=10)
    steps: list[Steps] = []
    for index in range(times):
        width = llm.output_width if index + 1 == times else hidden
        steps.append((Join(rows=merge), Normed(), Dense(width=hidden * merge), Active(), Dense(width=width)))
    last = stepping(sum(steps, ()), (hidden, llm.output_width), name="projector", merge=merge**times)
    return chain(name, vision, rest, last, llm)


def _square(fields: Fields, key: str) -> int:
    sides = fields.numbers(key, count=2, most=100)
    return sides[0] * sides[1]


def step3(config: Fields, name: str) -> Model:
    """Step 3.7: two convolutions of stride 2, each with twice the channels, and one linear."""
    vision, llm = tower_of(config), text_module(config, "text_config")
    width = vision.output_width
    steps: Steps = (conv(2 * width, 3, stride=2), conv(4 * width, 3, stride=2))
    joined = stepping(steps, (width, 4 * width), name="vision_neck", merge=16)
    bias = config.get("projector_bias")
    return chain(name, vision, joined, projector_module((4 * width, llm.output_width), bias=bias), llm)
