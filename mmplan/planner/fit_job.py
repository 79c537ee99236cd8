"""The job `mmplan fit` is asked about: a scenario file, or a model, a GPU and a sequence length; then the options."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from mmplan.cost_models.loads import sequence_lengths
from mmplan.errors import ImpossibleError, InputError
from mmplan.planner.degrees import SCHEDULE_KINDS, Degrees
from mmplan.scenario.catalogue import catalogue_device, catalogue_link, device_hint, device_names
from mmplan.scenario.cluster import Cluster, Pool
from mmplan.scenario.document import did_you_mean, listed
from mmplan.scenario.formats.hf_config import bundled_configs, config_file, read_hf_config
from mmplan.scenario.load import load_scenario
from mmplan.scenario.recipe import Recipe
from mmplan.scenario.scenario import (
    Constraints,
    Data,
    Distribution,
    Model,
    Optimizer,
    Sample,
    Scenario,
    Training,
)
from mmplan.scenario.stacks import technique_of
from mmplan.scenario.technique import SHARDINGS, Attention, Fp8, LossKernel, Offload, Recompute, Technique

LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
STEPS_PER_STAGE = 4  # microbatches per pipeline stage of a question without a batch: a bubble below 20 %


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Options as a user gives them; None is "as the scenario or the stack says"."""

    scenario: Path | None = None
    model: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    seq: int | None = None
    images: int = 0
    image_size: int = 448
    freeze: tuple[str, ...] = ()
    lora: int | None = None
    gbs: int | None = None
    recipe: str | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    vp: int | None = None
    mbs: int | None = None
    schedule: str | None = None
    stack: str | None = None
    zero: int | None = None
    recompute: str | None = None
    attention: str | None = None
    offload: str | None = None
    sequence_parallel: bool | None = None
    fp8: str | None = None
    cross_entropy: str | None = None
    choices: tuple[tuple[str, Any], ...] = ()


def job_of(question: Question, scenario: Scenario | None = None) -> tuple[Scenario, Degrees]:
    """The scenario (the question's, or `scenario` in its place) with the question's technique, and its degrees.

    What the question leaves open is the named recipe's, or the only one's that the scenario has; of its recipes the
    scenario keeps the one that was used.

    Raises:
        InputError: neither or both of a scenario and a model, or an unknown name.
        ImpossibleError: numbers that do not divide.
    """
    if (question.scenario is None) == (question.model is None):
        raise InputError("give either a scenario file or --model (with --gpu, --gpus and --seq)")
    if question.scenario is not None:
        _refuse_model_options(question)
    if scenario is None:
        scenario = load_scenario(question.scenario) if question.scenario is not None else _quick_scenario(question)
    recipe = _recipe(scenario, question)
    technique, cluster = _technique(scenario.technique, question, recipe), _cluster(scenario.cluster, question)
    recipes = () if recipe is None else (recipe,)
    return _with_degrees(replace(scenario, technique=technique, cluster=cluster, recipes=recipes), question, recipe)


def _recipe(scenario: Scenario, question: Question) -> Recipe | None:
    """The recipe that the question names, or the only one."""
    names = [recipe.name for recipe in scenario.recipes]
    if question.recipe is None:
        return scenario.recipes[0] if len(names) == 1 else None
    if question.recipe not in names:
        hint = did_you_mean(question.recipe, names) or (f"; recipes: {listed(names)}" if names else "; it names none")
        raise InputError(f"{scenario.name} has no recipe '{question.recipe}'{hint}")
    return scenario.recipes[names.index(question.recipe)]


def _degree(question: Question, recipe: Recipe | None, option: str, key: str = "") -> int:
    """What the question says, else the recipe, else 1."""
    for said in (getattr(question, option), getattr(recipe, key or option, None)):
        if said is not None:
            return int(said)
    return 1


def _refuse_model_options(question: Question) -> None:
    silent = Question()
    for name in ("seq", "images", "image_size", "freeze", "lora"):
        if getattr(question, name) != getattr(silent, name):
            raise InputError(f"--{name.replace('_', '-')} belongs to --model; a scenario file says it itself")


def _with_degrees(scenario: Scenario, question: Question, recipe: Recipe | None) -> tuple[Scenario, Degrees]:
    tp, cp, pp, ep, etp, vp = (_degree(question, recipe, name) for name in ("tp", "cp", "pp", "ep", "etp", "vp"))
    mbs = _degree(question, recipe, "mbs", "microbatch")
    have, inner = scenario.cluster.device_count, tp * cp * pp
    product = f"tp {tp} x cp {cp} x pp {pp}"
    given_dp = question.dp if question.dp is not None or recipe is None else recipe.dp
    if given_dp is None and have % inner:
        raise ImpossibleError(
            f"{product} = {inner} devices do not divide the {have} of the cluster: dp = {have / inner:g}"
        )
    dp = given_dp if given_dp is not None else have // inner
    quick = question.scenario is None and question.gbs is None
    batch = question.gbs or scenario.global_batch
    per_replica = dp * mbs
    if quick:
        batch = per_replica * (1 if pp == 1 else STEPS_PER_STAGE * pp)
    if batch % per_replica:
        raise ImpossibleError(
            f"global batch {batch} / (dp {dp} x mbs {mbs}) = {batch / per_replica:g} microbatches: no whole number"
        )
    schedule = question.schedule or ("interleaved" if vp > 1 else "1f1b")
    if schedule not in SCHEDULE_KINDS:
        raise InputError(f"unknown schedule '{schedule}'{did_you_mean(schedule, SCHEDULE_KINDS) or ''}")
    try:
        degrees = Degrees(
            tp=tp,
            cp=cp,
            pp=pp,
            vp=vp,
            dp=dp,
            ep=ep,
            etp=etp,
            microbatch_size=mbs,
            microbatches=batch // per_replica,
            schedule=schedule,
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    return replace(scenario, global_batch=batch), degrees


def _technique(base: Technique, question: Question, recipe: Recipe | None) -> Technique:
    """The scenario's technique (or the named stack's defaults) with the recipe's and the question's choices."""
    choices: dict[str, Any] = dict(() if recipe is None else recipe.technique) | dict(question.choices)
    stack = question.stack or choices.pop("stack", None)
    if recipe is not None and recipe.sharding is not None:
        choices["sharding"] = recipe.sharding
    if recipe is not None and recipe.recompute is not None:
        layers = base.recompute_layers if recipe.recompute == base.recompute and stack is None else None
        choices = {"recompute_layers": layers} | choices | {"recompute": recipe.recompute}
    if question.zero is not None:
        choices["sharding"] = SHARDINGS[question.zero]
    if question.sequence_parallel is not None:
        choices["sequence_parallel"] = question.sequence_parallel
    for option, value, allowed in (
        ("attention", question.attention, get_args(Attention)),
        ("offload", question.offload, get_args(Offload)),
        ("fp8", question.fp8, get_args(Fp8)),
        ("cross_entropy", question.cross_entropy, get_args(LossKernel)),
    ):
        if value is not None:
            choices[option] = _one_of(option, value, allowed)
    if question.recompute is not None and question.recompute.isdigit():
        choices |= {"recompute": "full", "recompute_layers": int(question.recompute)}
    elif question.recompute is not None:
        kinds = (*get_args(Recompute), "a number of layers")
        choices |= {"recompute": _one_of("recompute", question.recompute, kinds), "recompute_layers": None}
    try:
        return replace(base, **choices) if stack is None else technique_of(stack, **choices)
    except ValueError as error:
        raise InputError(str(error)) from None


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InputError(f"--{option.replace('_', '-')} {value}: expected {listed(allowed)}")
    return value


def _cluster(cluster: Cluster, question: Question) -> Cluster:
    """The cluster with another GPU or number of them, where the question names one."""
    if question.scenario is None or (question.gpu is None and question.gpus is None):
        return cluster
    gpu = question.gpu or cluster.pools[0].device.name
    per_node = cluster.pools[0].devices_per_node
    return cluster_of(gpu, question.gpus or cluster.device_count, per_node)


def cluster_of(gpu: str, count: int, per_node: int = 8) -> Cluster:
    """`count` devices of the catalogue in nodes of `per_node`.

    Raises:
        InputError: an unknown device, or devices that do not fill nodes.
    """
    if gpu not in device_names():
        raise InputError(f"unknown GPU '{gpu}'{device_hint(gpu)}")
    per_node = min(per_node, count)
    if count % per_node:
        raise InputError(f"{count} GPUs / {per_node} in a node = {count / per_node:g} nodes: no whole number")
    entry = catalogue_device(gpu)
    pool = Pool(
        device=entry.device,
        nodes=count // per_node,
        devices_per_node=per_node,
        node_link=catalogue_link(entry.node_link),
    )
    return Cluster(name=f"{gpu}-{count}", pools=(pool,), network_link=catalogue_link(entry.network))


def _quick_scenario(question: Question) -> Scenario:
    if question.gpu is None or question.gpus is None or question.seq is None:
        missing = [f"--{name}" for name in ("gpu", "gpus", "seq") if getattr(question, name) is None]
        raise InputError(f"--model needs {' and '.join(missing)} too")
    assert question.model is not None
    model = _trained(_model(question.model), question)
    return Scenario(
        name=question.model,
        model=model,
        data=quick_data(model, question.seq, question.images, question.image_size),
        global_batch=1,
        precision="bf16",
        optimizer=Optimizer(),
        cluster=cluster_of(question.gpu, question.gpus),
        constraints=Constraints(),
        source="command line",
    )


def _model(name: str) -> Model:
    if name in bundled_configs():
        return read_hf_config(bundled_configs()[name])
    path = config_file(Path(name))
    if path.is_file():
        return read_hf_config(path)
    hint = did_you_mean(name, bundled_configs()) or f"; bundled: {listed(bundled_configs(), 40)}"
    raise InputError(f"no bundled config and no file of the name '{name}'{hint}")


def _trained(model: Model, question: Question) -> Model:
    names = [module.name for module in model.modules]
    for name in question.freeze:
        if name not in names:
            raise InputError(f"--freeze {name}: unknown module; modules: {listed(names)}")
    modules = []
    for module in model.modules:
        if module.name in question.freeze:
            module = replace(module, training=Training(mode="frozen"))
        elif question.lora is not None and module.kind == "language_model":
            module = replace(module, training=Training(mode="lora", rank=question.lora, targets=LORA_TARGETS))
        modules.append(module)
    return replace(model, modules=tuple(modules))


def quick_data(model: Model, seq: int, images: int = 0, image_size: int = 448) -> Data:
    """Every sample has `images` square images and as much text as fills the language model's `seq` tokens.

    Raises:
        InputError: the images alone are longer than the sequence.
    """
    language = [module.name for module in model.modules if module.kind == "language_model"]
    alone = Sample(text_tokens=0, images=((image_size, image_size),) * images)
    used = sum(sequence_lengths(model, alone)[language[0]]) if language and images else 0
    if used >= seq:
        raise InputError(f"{images} images make {used} tokens, the sequence has {seq}")

    def fixed(value: float) -> Distribution:
        return Distribution(values=(float(value),), weights=(1.0,))

    return Data(
        text_tokens=fixed(seq - used),
        images=fixed(images),
        image_sizes=((image_size, image_size),) if images else (),
        audio_clips=fixed(0),
        audio_s=fixed(0),
        speech_tokens=fixed(0),
    )
