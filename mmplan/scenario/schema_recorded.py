"""The form of a recorded model in a scenario file, as `mmplan import job` writes it, and its checks."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mmplan.scenario.document import Document, KeyPath, did_you_mean, listed, shown
from mmplan.scenario.recorded import (
    BackwardSum,
    FusedAttention,
    Kept,
    KindOnRank,
    Product,
    ProductOnRank,
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


Degree = Annotated[int, Field(ge=2, le=1024)]


class ProductOnRankSpec(Strict):
    """What each rank computes of matrix products; sizes that are not said are as of the whole."""

    rows: Number | None = Field(default=None, description="rows, of all recorded samples together")
    inner: Size | None = Field(default=None, description="numbers that are summed")
    outer: Size | None = Field(default=None, description="columns of the result")
    groups: Size | None = Field(default=None, description="how many such products there are")


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
    on_ranks: dict[Degree, ProductOnRankSpec] = Field(
        default={}, max_length=100, description="on each of so many tensor-parallel ranks"
    )


class FusedAttentionSpec(Strict):
    """Calls of fused attention."""

    rows: Number = Field(description="queries of one head")
    pairs: Number = Field(description="query-key pairs of one head")
    heads: Count = Field(description="heads")
    head_dim: Count = Field(description="width of a head's queries and keys")
    value_dim: Count = Field(description="width of a head's values")
    causal: bool = Field(default=False, description="each row attends to the rows before it")
    on_ranks: dict[Degree, Count] = Field(
        default={}, max_length=100, description="heads on each of so many tensor-parallel ranks"
    )


class KeptSpec(Strict):
    """What autograd keeps for a backward."""

    numbers: Number = Field(default=0, description="numbers in the type of the model")
    other_bytes: Number = Field(default=0, description="bytes of other types")


class BackwardSumSpec(Strict):
    """A sum over tensor-parallel ranks in a backward."""

    numbers: Number = Field(description="numbers, of all recorded samples together")
    reads: Reads = Field(default="both", description="of which gradients: inputs of the layer, its weights")


class KindOnRankSpec(Strict):
    """What each of some tensor-parallel ranks has of layers of one kind; what is not split it has whole."""

    parameters: Number = Field(default=0, description="parameters on a rank")
    trained: Number = Field(default=0, description="parameters on a rank that the model trains")
    moved: Number = Field(default=0, description="numbers that operators beside products and attention read and write")
    kept: KeptSpec = Field(default=KeptSpec(), description="kept where inputs and weights have gradients")
    kept_frozen: KeptSpec = Field(default=KeptSpec(), description="kept where inputs alone have gradients")
    kept_first: KeptSpec = Field(default=KeptSpec(), description="kept where weights alone have gradients")
    forward_sums: list[Number] = Field(
        default=[], max_length=10_000, description="numbers of each sum over the ranks in a forward"
    )
    backward_sums: list[BackwardSumSpec] = Field(
        default=[], max_length=10_000, description="sums over the ranks in a backward"
    )


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
    on_ranks: dict[Degree, KindOnRankSpec] = Field(
        default={}, max_length=100, description="on each of so many tensor-parallel ranks, where these split some of it"
    )


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
    for key, kind in spec.kinds.items():
        _require_degrees(kind, (*at, "kinds", key), document)
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
            recorded_tp=recorded.tp_degrees,
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


def _require_degrees(spec: RecordedKindSpec, at: KeyPath, document: Document) -> None:
    """Raise where a product is split over ranks of which the layer says nothing else."""
    said = [(("products", index), {*product.on_ranks}) for index, product in enumerate(spec.products)]
    said += [(("attentions", index), {*one.on_ranks}) for index, one in enumerate(spec.attentions)]
    for (name, index), degrees in said:
        if unknown := degrees - spec.on_ranks.keys():
            told = f"{min(unknown)} ranks are none of those of `on_ranks` of its kind"
            raise document.error((*at, name, index, "on_ranks"), told)


def _kind(spec: RecordedKindSpec) -> RecordedKind:
    return RecordedKind(
        parameters=spec.parameters,
        trained=spec.trained,
        products=tuple(_product(product) for product in spec.products),
        attentions=tuple(
            FusedAttention(**one.model_dump() | {"on_ranks": tuple(one.on_ranks.items())}) for one in spec.attentions
        ),
        moved=spec.moved,
        kernels=spec.kernels,
        output=spec.output,
        kept=Kept(**spec.kept.model_dump()),
        kept_frozen=Kept(**spec.kept_frozen.model_dump()),
        kept_first=Kept(**spec.kept_first.model_dump()),
        on_ranks=tuple(_on_rank(tp, one) for tp, one in spec.on_ranks.items()),
    )


def _product(spec: ProductSpec) -> Product:
    whole = {name: getattr(spec, name) for name in ("rows", "inner", "outer", "groups")}
    parts = tuple(
        ProductOnRank(tp=tp, **whole | one.model_dump(exclude_none=True)) for tp, one in spec.on_ranks.items()
    )
    return Product(**spec.model_dump() | {"on_ranks": parts})


def _on_rank(tp: int, spec: KindOnRankSpec) -> KindOnRank:
    return KindOnRank(
        tp=tp,
        parameters=spec.parameters,
        trained=spec.trained,
        moved=spec.moved,
        kept=Kept(**spec.kept.model_dump()),
        kept_frozen=Kept(**spec.kept_frozen.model_dump()),
        kept_first=Kept(**spec.kept_first.model_dump()),
        forward_sums=tuple(spec.forward_sums),
        backward_sums=tuple(BackwardSum(**one.model_dump()) for one in spec.backward_sums),
    )


def _kind_spec(kind: RecordedKind) -> RecordedKindSpec:
    values = _plain(kind)
    values["on_ranks"] = {part.pop("tp"): part for part in values["on_ranks"]}
    for attention in values["attentions"]:
        attention["on_ranks"] = dict(attention["on_ranks"])
    for product in values["products"]:
        product["on_ranks"] = {
            part.pop("tp"): {name: size for name, size in part.items() if size != product[name]}
            for part in product["on_ranks"]
        }
    return RecordedKindSpec.model_validate(values)


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, tuples as lists."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
