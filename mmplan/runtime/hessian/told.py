"""What a measurement tells while it goes on, and the files in which processes tell it to the one that started them."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pydantic import TypeAdapter

from mmplan.runtime.hessian.result import Measured
from mmplan.runtime.hessian.settings import Question
from mmplan.runtime.hessian.values import Key, Value

ASKED, RESULT, TOLD, FAILURE = "question.json", "result.json", "told.jsonl", "failure.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is left to do.

    Attributes:
        values: of a layer, a modality and a batch; each takes `usual` to `most` products, which are Lanczos steps and
            vectors of the trace.
        forwards: of each process at the usual number, as on the first batch.
        value_s, product_s: seconds once per value and per product, measured at the first layer, whose gradients have
            the longest way.
    """

    values: int
    usual: int
    most: int
    forwards: int
    value_s: float
    product_s: float

    def seconds(self, products: int) -> float:
        return self.values * (self.value_s + products * self.product_s)


class Listener(Protocol):
    """Hears what happens; under torchrun on the first process alone."""

    def note(self, text: str) -> None: ...

    def estimate(self, estimate: Estimate) -> None: ...

    def value(self, key: Key, value: Value, left: int) -> None:
        """Args: left: values still to measure."""


class Told(NamedTuple):
    """One line from the first process to the one that started it; what is None is not told."""

    note: str | None = None
    estimate: Estimate | None = None
    value: tuple[Key, Value, int] | None = None


QUESTION, MEASURED, TOLD_LINE = TypeAdapter(Question), TypeAdapter(Measured), TypeAdapter(Told)
