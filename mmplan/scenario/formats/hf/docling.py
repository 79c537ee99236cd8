"""Granite Docling: a router sends each page over 4 x 4 or 2 x 2 joined tokens, which pass linears of their own; tokens
of inner blocks of the tower are added behind the first blocks of the language model."""

from dataclasses import replace

from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.vit import fixed, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import edge, projector_module, stepping
from mmplan.scenario.scenario import Model, ModelEdge
from mmplan.scenario.steps import Dense, Join, Kept, Normed, Steps


def granite(config: Fields, name: str) -> Model:
    """Priced over the coarse route; the linears of the fine one are kept."""
    fields, llm = config.part("vision_config"), text_module(config, "text_config")
    config.refuse_unless("density_router_hidden_size", None, why="the router itself is not read")
    vision = vision_module(vit(fields), fixed(fields))
    assert vision.transformer is not None and llm.transformer is not None
    width, out, scale = vision.output_width, fields.count("out_hidden_size"), fields.count("scale_factor", most=100)
    listed = [3, 7, 10] if fields.get("deepstack_visual_indexes") is None else fields.get("deepstack_visual_indexes")
    if not isinstance(listed, list):
        raise fields.error("deepstack_visual_indexes", "expected a list of blocks")
    inner = (
        fields.indices("deepstack_visual_indexes", vision.transformer.layers) if listed != [3, 7, 10] else (3, 7, 10)
    )
    if (
        len(inner) != len(listed)
        or len(inner) > llm.transformer.layers
        or max(inner, default=0) >= vision.transformer.layers
    ):
        message = f"expected blocks of a tower of {vision.transformer.layers} and as many language blocks or more"
        raise fields.error("deepstack_visual_indexes", f"{message}, found {listed!r:.60}")

    def merger(joined: int) -> int:
        return 2 * joined + (joined + 1) * out + (out + 1) * out

    fine = width * (scale // 2) ** 2
    spare = fine * out + len(inner) * merger(fine) if fields.get("use_fine_route") is not False else 0
    last: Steps = (
        *(Normed(), Join(rows=scale**2), Dense(width=out, bias=False)),
        *(Normed(), Dense(width=out, bias=False), Normed(), Kept(size=spare)),
    )
    if config.get("density_router_hidden_size") is None:
        config.log.notes.append("pages are priced over the coarse route of the connector")
    modules = [vision, stepping(last, (width, out), name="projector", merge=scale**2)]
    edges = [edge("vision", "projector", "input"), edge("projector", "llm", "merge")]
    joined = width * scale**2
    for position, block in enumerate(inner):
        deep = projector_module((joined, out, out), name=f"deepstack{position}", merge=scale**2, norm="layer")
        modules.append(replace(deep))
        edges.append(ModelEdge(producer="vision", consumer=deep.name, kind="input", producer_layer=block))
        edges.append(ModelEdge(producer=deep.name, consumer="llm", kind="add", consumer_layer=position))
    return Model(name=name, modules=(*modules, llm), edges=tuple(edges))
