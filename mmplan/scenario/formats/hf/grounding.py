"""Grounding DINO (arXiv 2303.05499) and its copy in MMDetection: Swin at several resolutions, BERT, an encoder over
rows of all resolutions and words, and a decoder with learned rows.

Attention looks at a few places of the image: what says where is kept and not counted, as are words, a few rows. Rows of
the coarser resolutions, a third of those of the finest, are kept too.
"""

from dataclasses import replace

from mmplan.scenario.formats.hf.pairs import bert_tower
from mmplan.scenario.formats.hf.resamplers import encoder_module, querying
from mmplan.scenario.formats.hf.swin import swin
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import apart, edge, projector_module, stepping
from mmplan.scenario.scenario import Model, ModelModule
from mmplan.scenario.steps import Attend, Dense, Form, Kept, Mlp, Normed, Steps, residual


def grounding_dino(config: Fields, name: str) -> Model:
    eye, fields = config.part("backbone_config"), config.part("text_config")
    if eye.kind != "swin" or fields.kind != "bert":
        raise config.error(
            "backbone_config", f"expected 'swin' and 'bert', found '{eye.kind:.40}' and '{fields.kind:.40}'"
        )
    handed = _handed(eye)
    stages, text = swin(eye, norms_of=handed), bert_tower(fields)
    stages = (*stages[:-1], replace(stages[-1], stored=2 * stages[-1].output_width))  # a norm that is not used
    width, levels = config.count("d_model"), config.count("num_feature_levels", most=16)
    widths = [stages[index].output_width for index in handed]
    if levels < len(widths):
        raise config.error("num_feature_levels", f"expected {len(widths)} or more, found {levels}")
    places = [(size + 3) * width for size in widths]
    for extra in range(levels - len(widths)):
        places.append((9 * (widths[-1] if extra == 0 else width) + 3) * width)
    steps: Steps = (Dense(width=width), Normed(), Kept(size=sum(places[1:]) + levels * width))
    rows = stepping(steps, (widths[0], width), name="vision_projector")
    encoder = _encoder(config, width, levels)
    decoder = _decoder(config, width, levels)
    said = projector_module((text.output_width, width), name="text_projector", modality="text")
    model = apart(name, stages, (rows, encoder, decoder), (text, said))
    return replace(model, edges=(*model.edges, edge(stages[handed[0]].name, rows.name, "input")))


def _handed(eye: Fields) -> tuple[int, ...]:
    """Stages whose rows are used: 0-based, from `out_indices` (0 is what enters) or `out_features`."""
    listed, names = eye.get("out_indices"), eye.get("out_features")
    if isinstance(names, list):
        listed = [int(str(one).removeprefix("stage")) for one in names if str(one).removeprefix("stage").isdigit()]
    count = len(eye.stages("depths"))
    if listed is None:  # a file that describes the tower and says nothing means the last stage
        listed = [count] if eye.values else [2, 3, 4]
    good = isinstance(listed, list) and listed and all(isinstance(one, int) and 1 <= one <= count for one in listed)
    if not good or sorted(set(listed)) != listed:
        raise eye.error("out_indices", f"expected stages from 1 to {count}, found {listed!r:.60}")
    return tuple(one - 1 for one in listed)


def _places(config: Fields, width: int, levels: int, side: str) -> int:
    """Numbers that say where to look, and how much of it."""
    heads, points = config.count(f"{side}_attention_heads"), config.count(f"{side}_n_points", most=1_000)
    return (width + 1) * heads * levels * points * 3


def _encoder(config: Fields, width: int, levels: int) -> ModelModule:
    heads, ffn, layers = (
        config.count("encoder_attention_heads"),
        config.count("encoder_ffn_dim"),
        config.layers("encoder_layers"),
    )
    shape = replace(querying(width, heads, ffn, layers, width), cross_layers=(), cross_width=None)
    half = ffn // 2
    own = 4 * width * (width + 1)
    enhanced = own + 2 * width * half + half + 5 * width
    fused = 2 * width + 2 * width + 4 * (width + 1) * half + 2 * (half + 1) * width
    fused -= (width + 1) * half + (half + 1) * width
    look: Steps = (Dense(width=width), Dense(width=width))
    block: Steps = (
        *(residual(Normed(), Dense(width=half), Dense(width=width)), Kept(size=fused + enhanced)),
        *(residual(*look), Kept(size=_places(config, width, levels, "encoder")), Normed(), residual(Mlp()), Normed()),
    )
    return encoder_module(shape, Form(blocks=((layers, block),)), name="encoder")


def _decoder(config: Fields, width: int, levels: int) -> ModelModule:
    heads, ffn, layers = (
        config.count("decoder_attention_heads"),
        config.count("decoder_ffn_dim"),
        config.layers("decoder_layers"),
    )
    one: Steps = (Dense(width=width), Dense(width=width))
    pair = Kept(size=2 * width * (width + 1))
    kept = Kept(size=_places(config, width, levels, "decoder"))
    block: Steps = (
        *(residual(Attend()), Normed(), residual(*one), pair, Normed()),
        *(residual(*one), kept, Normed(), residual(Mlp()), Normed()),
    )
    stored = 2 * width + (config.count("query_dim", most=1_000) // 2 * width + 1) * width + width * (width + 1)
    if config.get("two_stage") is False:
        stored += 4 * config.count("num_queries")  # where each of them looks first
    else:
        config.refuse_unless("embedding_init_target", True, None, why="queries without a table")
        stored += width * (width + 1) + 2 * width + 2 * width * (width + 1) + (width + 1) * 4
    stored += 1 if config.kind == "mm-grounding-dino" else 0
    form = Form(blocks=((layers, block),), queries=config.count("num_queries"))
    shape = replace(querying(width, heads, ffn, layers, width), cross_layers=(), cross_width=None)
    return encoder_module(shape, form, name="decoder", stored=stored)
