"""`load_scenario`: from a YAML file to a checked `Scenario`, in the order a reader would check it."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.document import Document, KeyPath, did_you_mean, listed, read_document, shown
from mmplan.scenario.formats.hf_config import bundled_configs, config_file, read_hf_config
from mmplan.scenario.machines import cluster_from_spec
from mmplan.scenario.modules import model_from_spec
from mmplan.scenario.precisions import with_precisions
from mmplan.scenario.profile import load_profile, paced
from mmplan.scenario.recipes import recipes_from_spec, spread_modules
from mmplan.scenario.scenario import Constraints, Model, ModelModule, Optimizer, Scenario, Training
from mmplan.scenario.schema import ConstraintsSpec, LoraTraining, ModelSpec, ScenarioSpec
from mmplan.scenario.schema_recorded import recorded_model
from mmplan.scenario.schema_technique import TechniqueSpec
from mmplan.scenario.sizes import data_from_spec
from mmplan.scenario.stacks import technique_of
from mmplan.scenario.technique import Fp8, Technique
from mmplan.scenario.validate import validate_spec
from mmplan.scenario.zones import under_zones, zones_from_spec


def load_scenario(path: Path | str) -> Scenario:
    """Read a scenario file.

    Raises:
        InputError: one sentence with file, line and key path.
    """
    return scenario_of(read_document(Path(path)))


def scenario_of(document: Document) -> Scenario:
    """The scenario that a document describes.

    Raises:
        InputError: one sentence with file, line and key path.
    """
    spec = validate_spec(document)
    model = _with_training(_padded(_model(spec, document), spec.model, spec.constraints.pad_heads), spec, document)
    cluster = cluster_from_spec(spec.cluster, document)
    if spec.cluster.profile is not None:
        model = paced(model, load_profile(document.file.parent / spec.cluster.profile))
    model, precision = with_precisions(model, spec, cluster, document)
    scenario = Scenario(
        name=spec.name,
        model=model,
        data=data_from_spec(spec.data, model, document),
        global_batch=spec.batch.global_,
        precision=precision,
        optimizer=Optimizer(
            name=spec.optimizer.name,
            learning_rate=spec.optimizer.learning_rate,
            gradient_dtype=spec.optimizer.gradient_dtype,
        ),
        cluster=cluster,
        constraints=_constraints(spec.constraints, model, cluster, document),
        seed=spec.seed,
        source=spec.source,
        technique=_technique(spec.technique, spec.constraints.sequence_parallel, document),
        recipes=recipes_from_spec(spec.recipes, model, document),
    )
    return under_zones(scenario, zones_from_spec(spec.constraints, scenario, document))


def _model(spec: ScenarioSpec, document: Document) -> Model:
    at: KeyPath = ("model",)
    named = spec.model.hf_config
    if [named, spec.model.modules, spec.model.recorded].count(None) != 2:
        raise document.error(at, "expected one of 'hf_config', 'modules' (with 'edges') and 'recorded'")
    if spec.model.recorded is not None:
        return recorded_model(spec.name, spec.model.recorded, document)
    if named is None:
        return model_from_spec(spec.name, spec.model, document)
    if spec.model.edges is not None:
        raise document.error((*at, "edges"), "the edges follow from hf_config; remove this key")
    if named in bundled_configs():
        return read_hf_config(bundled_configs()[named])
    path = config_file(document.file.parent / named)
    if not path.is_file():
        hint = did_you_mean(named, bundled_configs()) or f"; bundled: {listed(bundled_configs(), 40)}"
        raise document.error((*at, "hf_config"), f"no bundled config and no file of the name {shown(named)}{hint}")
    return read_hf_config(path)


def _padded(model: Model, spec: ModelSpec, pad_heads: bool) -> Model:
    """The model with `pad_heads` (said of the model or by the constraints) and `pad_vocabulary` of the whole model
    applied to its modules."""
    modules = []
    for module in model.modules:
        shape, vocabulary = module.transformer, module.vocabulary
        if shape is not None and (spec.pad_heads or pad_heads):
            shape = replace(shape, pad_heads=True)
        if vocabulary is not None and vocabulary.pad_to == 1:
            vocabulary = replace(vocabulary, pad_to=spec.pad_vocabulary)
        modules.append(replace(module, transformer=shape, vocabulary=vocabulary))
    return replace(model, modules=tuple(modules))


def _with_training(model: Model, spec: ScenarioSpec, document: Document) -> Model:
    """The model with `train` applied to its modules."""
    names = [module.name for module in model.modules]
    for name in spec.train:
        if name not in names:
            hint = did_you_mean(name, names) or f"; modules: {listed(names)}"
            raise document.error(("train", name), f"unknown module {shown(name)}{hint}")
    modules = tuple(
        replace(module, training=_training(module, spec.train.get(module.name, "full"), document))
        for module in model.modules
    )
    if all(module.training.mode == "frozen" for module in modules):
        raise document.error(("train",), "every module is frozen: nothing is trained")
    return replace(model, modules=modules)


def _training(module: ModelModule, spec: str | LoraTraining, document: Document) -> Training:
    if not isinstance(spec, LoraTraining):
        return Training(mode="frozen" if spec == "frozen" else "full")
    at: KeyPath = ("train", module.name, "lora")
    if module.recorded:
        told = "adapters of a recorded model are part of it: train it full, and what the model does not train stays so"
        raise document.error(at, told)
    if module.transformer is None:
        raise document.error(at, f"'{module.name}' is a projector: train it full or frozen")
    if "gate" in spec.lora.targets and not module.transformer.gated_mlp:
        raise document.error((*at, "targets"), f"'{module.name}' has no gate: its MLP has up and down only")
    if module.transformer.mla is not None and {"q", "k", "v"} & set(spec.lora.targets):
        message = f"'{module.name}' has latent attention: of its projections only o takes an adapter"
        raise document.error((*at, "targets"), message)
    if module.transformer.moe is not None and {"gate", "up", "down"} & set(spec.lora.targets):
        message = f"'{module.name}' has experts: adapters on gate, up and down are not supported there"
        raise document.error((*at, "targets"), message)
    if spec.lora.rank > module.transformer.hidden:
        message = f"rank = {spec.lora.rank} is more than the width {module.transformer.hidden} of '{module.name}'"
        raise document.error((*at, "rank"), message)
    order = ("q", "k", "v", "o", "gate", "up", "down")
    targets = tuple(target for target in order if target in spec.lora.targets)
    return Training(mode="lora", rank=spec.lora.rank, targets=targets)


def _technique(spec: TechniqueSpec, sequence_parallel: Collection[bool], document: Document) -> Technique:
    """The stack's defaults, replaced by what the file says, of sequence parallelism also by the constraints."""
    written = spec.model_dump(exclude_none=True)
    if len(sequence_parallel) == 1:
        (only,) = sequence_parallel
        if written.setdefault("sequence_parallel", only) != only:
            said, allowed = str(not only).lower(), str(only).lower()
            message = f"technique says {said}, and only {allowed} is allowed; remove one of the two"
            raise document.error(("constraints", "sequence_parallel"), message)
    try:
        return technique_of(**written)
    except InputError as error:
        raise document.error(("technique", "stack"), error.message) from None
    except ValueError as error:
        raise document.error(("technique",), str(error)) from None


def _constraints(spec: ConstraintsSpec, model: Model, cluster: Cluster, document: Document) -> Constraints:
    at: KeyPath = ("constraints",)
    per_node, total = min(pool.devices_per_node for pool in cluster.pools), cluster.device_count
    for tp in spec.tp:
        if tp > per_node:
            raise document.error((*at, "tp"), f"tp = {tp} does not fit into a node of {per_node} devices")
    least = {key: min(getattr(spec, key), default=1) for key in ("tp", "pp", "dp")}
    needed = least["tp"] * least["pp"] * least["dp"]
    if needed > total:
        product = " x ".join(f"{key} {value}" for key, value in least.items())
        raise document.error(at, f"{product} = {needed} devices, the cluster has {total}")
    return Constraints(
        memory_headroom=spec.memory_headroom,
        tp=tuple(spec.tp),
        pp=tuple(spec.pp),
        dp=tuple(spec.dp),
        microbatch=tuple(spec.microbatch),
        schedule=tuple(spec.schedule),
        cp=tuple(spec.cp),
        ep=tuple(spec.ep),
        etp=tuple(spec.etp),
        vp=tuple(spec.vp),
        offload=tuple(spec.offload),
        compression=tuple(spec.compression),
        fp8=_fp8(spec, cluster, document),
        sequence_parallel=tuple(spec.sequence_parallel),
        sharding=tuple(spec.sharding),
        recompute=tuple(spec.recompute),
        spread=None if spec.spread == "any" else spread_modules(_names(spec.spread), model, (*at, "spread"), document),
        patches=_patches(spec, model, document),
        modules=_own_ranks(spec, model, document),
        encode_together=_encode_together(spec, model, document),
        prefetch=_prefetch(spec, model, document),
    )


def _names(spread: Collection[str] | None) -> tuple[str, ...] | None:
    return None if spread is None else tuple(spread)


def _patches(spec: ConstraintsSpec, model: Model, document: Document) -> tuple[str, ...] | None:
    """Modules whose rows are to be cut; None: any whose can be."""
    if not isinstance(spec.spread, dict):
        return None if spec.spread == "any" else ()
    raw = [module.name for module in model.modules if module.vision is not None or module.audio is not None]
    wanted = tuple(name for name, way in spec.spread.items() if way == "patches")
    behind = {edge.consumer: edge.producer for edge in model.edges if model.module(edge.consumer).projector is not None}
    for name in wanted:
        why = ""
        if name in behind and behind[name] not in wanted:
            why = f"reads '{behind[name]}', whose rows are not cut: write `{behind[name]}: patches` too"
        elif name not in behind and name not in raw:
            why = f"has no patches to cut; modules that read images or sound: {listed(raw)}"
        if why:
            raise document.error(("constraints", "spread", name), f"'{name}' {why}")
    return wanted


def _fp8(spec: ConstraintsSpec, cluster: Cluster, document: Document) -> tuple[Fp8, ...]:
    """What the devices can do of it; where some cannot, none."""
    without = [pool.device.name for pool in cluster.pools if pool.device.fp8_flops_per_s is None]
    if without and "none" not in spec.fp8:
        raise document.error(
            ("constraints", "fp8"), f"{without[0]} has no FP8 units, and {listed(spec.fp8)} is allowed"
        )
    return ("none",) if without else tuple(spec.fp8)


def _require_encoders(names: Iterable[str], key: str, cannot: str, model: Model, document: Document) -> None:
    """A constraint of modules names no language model and none that is not there."""
    others = [module.name for module in model.modules if module.kind != "language_model"]
    for name in names:
        if name not in others:
            hint = did_you_mean(name, others) or f"; modules that can: {listed(others)}"
            raise document.error(("constraints", key, name), f"'{name}' cannot {cannot}{hint}")


def _own_ranks(spec: ConstraintsSpec, model: Model, document: Document) -> tuple[OwnRanks, ...] | None:
    if spec.modules == "any":
        return None
    _require_encoders(spec.modules, "modules", "have ranks of its own", model, document)
    return tuple(
        OwnRanks(module=name, tp=tuple(one.tp), dp=tuple(one.dp), pp=tuple(one.pp), cp=tuple(one.cp), ep=tuple(one.ep))
        for name, one in spec.modules.items()
    )


def _prefetch(spec: ConstraintsSpec, model: Model, document: Document) -> tuple[str, ...] | None:
    if spec.prefetch == "any":
        return None
    _require_encoders(spec.prefetch, "prefetch", "run a step ahead", model, document)
    for name in spec.prefetch:
        mode = model.module(name).training.mode
        if mode != "frozen":
            message = f"'{name}' is trained ({mode}), so that a step changes what the next one computes"
            raise document.error(
                ("constraints", "prefetch", name), f"{message}; set train.{name}: frozen, or leave it out"
            )
    return tuple(spec.prefetch)


def _encode_together(
    spec: ConstraintsSpec, model: Model, document: Document
) -> tuple[tuple[str, tuple[int, ...]], ...] | None:
    if spec.encode_together == "any":
        return None
    _require_encoders(spec.encode_together, "encode_together", "run for several microbatches at once", model, document)
    return tuple((name, tuple(sorted(set(factors)))) for name, factors in spec.encode_together.items())
