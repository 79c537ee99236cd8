"""The form of a recorded model in a scenario file, as `mmplan import job` writes it, and its checks."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mmplan.scenario.document import Document, KeyPath, did_you_mean, listed, shown
from mmplan.scenario.recorded import (
    FusedAttention,
    Kept,
    Product,
    Reads,
    Recorded,
    RecordedKind,
    RecordedLayer,
    RecordedRead,
    Weight,
)
from mmplan.scenario.scenario import Modality, Model, ModelModule
from mmplan.scenario.schema_base import Count, ModuleName, Strict

Number = Annotated[int, Field(ge=0, le=2**62)]
Size = Annotated[int, Field(ge=1, le=2**62)]
LayerName = Annotated[str, Field(min_length=3, max_length=100, pattern=r"^[A-Za-z][A-Za-z0-9_-]*\.[A-Za-z0-9]+$")]


class ProductSpec(Strict):
    """Matrix products [rows, inner] x [inner, outer]."""

    rows: Number = Field(description="rows, of all recorded samples together")
    inner: Size = Field(description="numbers that are summed")
    outer: Size = Field(description="columns of the result")
    groups: Size = Field(default=1, description="how many such products there are")
    operands: Annotated[int, Field(ge=0, le=2)] = Field(
        default=1, description="tensors among the two that have a gradient and are no weight"
    )
    weight: Weight = Field(default="none", description="whether one of the two is a parameter, and is trained")
    reads: Reads = Field(default="both", description="what its gradients reach: inputs of the layer, its weights")


class FusedAttentionSpec(Strict):
    """Calls of fused attention."""

    rows: Number = Field(description="queries of one head")
    pairs: Number = Field(description="query-key pairs of one head")
    heads: Count = Field(description="heads")
    head_dim: Count = Field(description="width of a head's queries and keys")
    value_dim: Count = Field(description="width of a head's values")
    causal: bool = Field(default=False, description="each row attends to the rows before it")


class KeptSpec(Strict):
    """What autograd keeps for a backward."""

    numbers: Number = Field(default=0, description="numbers in the type of the model")
    other_bytes: Number = Field(default=0, description="bytes of other types")


class RecordedKindSpec(Strict):
    """What layers of one kind do."""

    parameters: Number = Field(default=0, description="parameters of the layer")
    trained: Number = Field(default=0, description="parameters that the model trains")
    products: list[ProductSpec] = Field(default=[], max_length=100_000, description="matrix products")
    attentions: list[FusedAttentionSpec] = Field(default=[], max_length=10_000, description="fused attention")
    moved: Number = Field(default=0, description="numbers that all other operators read and write")
    kernels: Number = Field(default=0, description="how many other operators run for one sample")
    output: Number = Field(default=0, description="numbers that the layer hands on")
    kept: KeptSpec = Field(default=KeptSpec(), description="kept where inputs and weights have gradients")
    kept_frozen: KeptSpec = Field(default=KeptSpec(), description="kept where inputs alone have gradients")
    kept_first: KeptSpec = Field(default=KeptSpec(), description="kept where weights alone have gradients")


class RecordedLayerSpec(Strict):
    """A layer."""

    id: LayerName = Field(description="module and index")
    kind: LayerName = Field(description="one of `kinds`")
    pieces: list[str] = Field(default=[], max_length=10_000, description="modules and parameters of the model")
    reads: dict[LayerName, Number] = Field(default={}, description="numbers of other layers' outputs that it reads")
    block: bool = Field(default=False, description="one of a list of modules alike; it may be recomputed")


class RecordedSpec(Strict):
    """A model as `mmplan import job FILE` has recorded it. Sums are those of all recorded samples."""

    samples: Count = Field(description="samples that were recorded")
    modules: dict[ModuleName, Literal["vision", "audio", "text", "speech"]] = Field(
        max_length=1000, description="modules and their modalities"
    )
    kinds: dict[LayerName, RecordedKindSpec] = Field(
        max_length=10_000, description="kinds of layers, named by the first"
    )
    layers: list[RecordedLayerSpec] = Field(
        min_length=1, max_length=10_000, description="layers in the order of their use; the last computes the loss"
    )


def recorded_model(name: str, spec: RecordedSpec, document: Document) -> Model:
    """The model.

    Raises:
        InputError: a layer of an unknown kind or module, or one that reads a layer which does not stand before it.
    """
    at: KeyPath = ("model", "recorded")
    kinds = {key: _kind(kind) for key, kind in spec.kinds.items()}
    layers: dict[str, RecordedLayer] = {}
    for index, one in enumerate(spec.layers):
        layer = RecordedLayer(
            id=one.id,
            kind=one.kind,
            pieces=tuple(one.pieces),
            reads=tuple(RecordedRead(layer=key, numbers=numbers) for key, numbers in one.reads.items()),
            block=one.block,
        )
        here: KeyPath = (*at, "layers", index)
        if layer.kind not in kinds:
            raise document.error((*here, "kind"), f"unknown kind {shown(layer.kind)}{did_you_mean(layer.kind, kinds)}")
        if layer.module not in spec.modules:
            hint = did_you_mean(layer.module, spec.modules) or f"; modules: {listed(spec.modules)}"
            raise document.error((*here, "id"), f"unknown module {shown(layer.module)}{hint}")
        if layer.id in layers:
            raise document.error((*here, "id"), f"{shown(layer.id)} stands twice")
        for read in layer.reads:
            if read.layer not in layers:
                raise document.error((*here, "reads"), f"{shown(read.layer)} does not stand before {shown(layer.id)}")
        layers[layer.id] = layer
    unused = [key for key in spec.modules if all(layer.module != key for layer in layers.values())]
    if unused:
        raise document.error((*at, "modules", unused[0]), f"'{unused[0]}' has no layers")
    recorded = Recorded(samples=spec.samples, kinds=tuple(kinds.items()), layers=tuple(layers.values()))
    return Model(name=name, modules=modules_of(recorded, spec.modules), edges=(), recorded=recorded)


def modules_of(recorded: Recorded, modalities: Mapping[str, Modality]) -> tuple[ModelModule, ...]:
    """The modules of a recorded model, all of them trained as the model itself trains them."""
    return tuple(
        ModelModule(
            name=name,
            kind="recorded",
            modality=modality,
            recorded=tuple(layer.id for layer in recorded.layers if layer.module == name),
        )
        for name, modality in modalities.items()
    )


def recorded_values(model: Model) -> dict[str, Any]:
    """`model.recorded` of a scenario file, without what is as it is by default."""
    assert model.recorded is not None
    spec = RecordedSpec(
        samples=model.recorded.samples,
        modules={module.name: module.modality for module in model.modules},
        kinds={name: _kind_spec(kind) for name, kind in model.recorded.kinds},
        layers=[
            RecordedLayerSpec(
                id=layer.id,
                kind=layer.kind,
                pieces=list(layer.pieces),
                reads={read.layer: read.numbers for read in layer.reads},
                block=layer.block,
            )
            for layer in model.recorded.layers
        ],
    )
    return spec.model_dump(exclude_defaults=True)


def _kind(spec: RecordedKindSpec) -> RecordedKind:
    return RecordedKind(
        parameters=spec.parameters,
        trained=spec.trained,
        products=tuple(Product(**product.model_dump()) for product in spec.products),
        attentions=tuple(FusedAttention(**attention.model_dump()) for attention in spec.attentions),
        moved=spec.moved,
        kernels=spec.kernels,
        output=spec.output,
        kept=Kept(**spec.kept.model_dump()),
        kept_frozen=Kept(**spec.kept_frozen.model_dump()),
        kept_first=Kept(**spec.kept_first.model_dump()),
    )


def _kind_spec(kind: RecordedKind) -> RecordedKindSpec:
    return RecordedKindSpec.model_validate(_plain(kind))


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, tuples as lists."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
