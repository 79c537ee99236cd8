"""What every form of a scenario file is made of: the strict model and the bounded names and numbers."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mmplan.scenario.document import did_you_mean, listed
from mmplan.scenario.schema_values import CountOrList

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Layers = Annotated[int, Field(ge=1, le=2_000)]
Width = Annotated[int, Field(ge=1, le=1_000_000)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Price = Annotated[float, Field(gt=0, le=1_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
ModuleName = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


class Strict(BaseModel):
    """Refuses unknown keys with a did-you-mean; no conversions between types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in values:
            if key not in known:
                hint = did_you_mean(str(key), known) or f"; known keys: {listed(known, 40)}"
                raise PydanticCustomError("unknown_key", "unknown key{hint}", {"hint": hint, "key": key})
        return values


# "a name, or a mapping": which of the two follows from what stands in the file, so that messages speak of that one.
NAME_OR_MAPPING = Discriminator(lambda value: "mapping" if isinstance(value, dict | BaseModel) else "name")
DtypeName = Literal["fp32", "bf16", "fp16"]
PrecisionSpec = Annotated[
    Annotated[DtypeName, Tag("name")] | Annotated[dict[ModuleName, DtypeName], Tag("mapping")], NAME_OR_MAPPING
]
Spread = Annotated[
    Annotated[Literal["any"], Tag("name")]
    | Annotated[list[ModuleName], Tag("list")]
    | Annotated[dict[ModuleName, Literal["images", "patches"]], Field(max_length=50), Tag("mapping")],
    Discriminator(lambda given: {list: "list", dict: "mapping"}.get(type(given), "name")),
]


class OwnRanksSpec(Strict):
    """Degrees that a module's own ranks may have; what is not written is as is best."""

    tp: CountOrList = Field(default=[], description="allowed tensor-parallel degrees")
    cp: CountOrList = Field(
        default=[],
        description="allowed context-parallel degrees, powers of two: whole layers on each rank, rows of all images "
        "where blocks work row by row, else images or clips in turn",
    )
    ep: CountOrList = Field(default=[], description="allowed ranks over which the module's experts lie")
    dp: CountOrList = Field(
        default=[], description="allowed numbers of replicas, which divide the samples of a microbatch"
    )
    pp: CountOrList = Field(default=[], description="allowed numbers of stages")


ModulesApart = Annotated[
    Annotated[Literal["any"], Tag("name")]
    | Annotated[dict[ModuleName, OwnRanksSpec], Field(max_length=50), Tag("mapping")],
    NAME_OR_MAPPING,
]
EncodeTogether = Annotated[
    Annotated[Literal["any"], Tag("name")]
    | Annotated[dict[ModuleName, CountOrList], Field(max_length=50), Tag("mapping")],
    NAME_OR_MAPPING,
]
