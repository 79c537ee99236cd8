"""Tables of measured steps: one row is a model, a configuration, and the seconds (and memory) that somebody published.

Several spellings of a column are read; a blank field is one that the source does not give.
"""

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path

from mmplan.errors import InputError

# Our column -> other spellings. A table needs `gpus`, `layers` and a step time; everything else may be absent.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "id": ("row", "name"),
    "split": (),
    "source": ("source_group",),
    "reference": ("source_ref", "url"),
    "model": ("model_name",),
    "task": (),
    "layers": ("num_layers", "n_layers"),
    "hidden": ("hidden_size",),
    "heads": ("num_heads", "n_heads"),
    "kv_heads": (),
    "head_dim": (),
    "ffn": ("ffn_hidden", "ffn_hidden_size"),
    "gated": ("ffn_gated",),
    "vocabulary": ("vocab", "vocab_size"),
    "sequence": ("seq_len", "sequence_length", "seq"),
    "experts": ("num_experts",),
    "topk": (),
    "expert_ffn": ("moe_ffn_hidden",),
    "encoder": (),
    "gpu": ("device",),
    "gpus_per_node": (),
    "gpus": ("n_gpus", "num_gpus"),
    "network": ("interconnect",),
    "tp": (),
    "pp": (),
    "vp": (),
    "dp": (),
    "derived_dp": (),
    "cp": (),
    "ep": (),
    "etp": (),
    "sequence_parallel": ("sp",),
    "sharding": ("zero_fsdp", "zero"),
    "microbatch": ("micro_batch", "micro_batch_size", "mbs"),
    "global_batch": ("global_batch_size", "gbs"),
    "grad_accum": (),
    "recompute": ("activation_recompute",),
    "precision": ("dtype",),
    "gradient_dtype": (),
    "attention": ("attn_impl",),
    "stack": (),
    "framework": (),
    "schedule": (),
    "step_s": ("step_time_s", "iteration_time_s", "step_time", "derived_step_time_s"),
    "tokens_per_s_per_gpu": (),
    "tokens_per_s_total": (),
    "samples_per_s": (),
    "memory_gib": (),
    "memory_kind": ("memory_note",),
    "year": (),
    "note": ("notes",),
}
_NUMBERS = {
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "sequence", "experts", "topk",
    "expert_ffn", "gpus_per_node", "gpus", "tp", "pp", "dp", "derived_dp", "cp", "ep", "etp", "microbatch",
    "global_batch", "grad_accum", "step_s", "tokens_per_s_per_gpu", "tokens_per_s_total", "samples_per_s", "year",
}  # fmt: skip
_POSITIVE = {
    "layers", "hidden", "heads", "ffn", "sequence", "gpus", "global_batch", "step_s",
    "tokens_per_s_per_gpu", "tokens_per_s_total", "samples_per_s",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One row as written: `texts` and `numbers` by our column names; what is blank is absent. `fault` says which cell
    cannot be read, so that the row is listed and the rest of the table still priced."""

    file: str
    line: int
    texts: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    fault: str = ""

    @property
    def id(self) -> str:
        return self.texts.get("id") or f"line {self.line}"

    @property
    def source(self) -> str:
        return self.texts.get("source") or Path(self.file).stem

    @property
    def split(self) -> str:
        """`fit` or `held-out`; rows of a user's table were never fitted."""
        return self.texts.get("split") or "held-out"

    def text(self, column: str) -> str:
        """Lower-case text of a column, empty when blank."""
        return self.texts.get(column, "").lower()

    def count(self, column: str, default: int | None = None) -> int | None:
        """A whole number of a column, or the default when blank."""
        value = self.numbers.get(column)
        return default if value is None else round(value)

    def step_s(self) -> float | None:
        """Measured seconds of a step: printed, or from the printed throughput and the batch."""
        if "step_s" in self.numbers:
            return self.numbers["step_s"]
        batch, sequence, gpus = (self.numbers.get(name) for name in ("global_batch", "sequence", "gpus"))
        if batch and "samples_per_s" in self.numbers:
            return batch / self.numbers["samples_per_s"]
        if not batch or not sequence:
            return None
        if "tokens_per_s_total" in self.numbers:
            return batch * sequence / self.numbers["tokens_per_s_total"]
        if gpus and "tokens_per_s_per_gpu" in self.numbers:
            return batch * sequence / self.numbers["tokens_per_s_per_gpu"] / gpus
        return None


def read_measured(path: Path) -> tuple[MeasuredRow, ...]:
    """Rows of a CSV file.

    Raises:
        InputError: one sentence with file and line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, strict=True)
            header = next(reader, None)
            if not header:
                raise InputError("the table is empty: no header line", file=path, line=1)
            names = _column_names(header, path)
            return tuple(_row(values, names, path, reader.line_num) for values in reader if values)
    except OSError as error:
        raise InputError(f"cannot read the table: {error.strerror}", file=path) from error
    except UnicodeDecodeError as error:
        raise InputError(f"not a text file in UTF-8: {error.reason} at byte {error.start}", file=path) from error
    except csv.Error as error:
        raise InputError(f"not a CSV table: {error}", file=path) from error


def _column_names(header: list[str], path: Path) -> list[tuple[str, int] | None]:
    """For each column our name and how preferred its spelling is; None when it is not read."""
    spelled = {other: (name, rank) for name, others in _COLUMNS.items() for rank, other in enumerate((name, *others))}
    names = [spelled.get(column.strip().lower()) for column in header]
    found = {name[0] for name in names if name is not None}
    duplicates = sorted({column for column in header if header.count(column) > 1 and column.strip()})
    if duplicates:
        raise InputError(f"the column '{duplicates[0]}' stands twice", file=path, line=1)
    for needed in ("layers", "gpus"):
        if needed not in found:
            listed = ", ".join((needed, *_COLUMNS[needed]))
            raise InputError(f"no column for {needed}; one of {listed} is needed", file=path, line=1)
    return names


MOST_LAYERS = 10_000


def _row(values: list[str], names: list[tuple[str, int] | None], path: Path, line: int) -> MeasuredRow:
    if len(values) != len(names):
        raise InputError(f"expected {len(names)} fields as in the header, found {len(values)}", file=path, line=line)
    texts: dict[str, str] = {}
    numbers: dict[str, float] = {}
    fault = ""
    columns = sorted((name[1], name[0], value.strip()) for name, value in zip(names, values, strict=True) if name)
    for _, name, value in columns:
        if not value or name in texts or name in numbers:
            continue
        if name not in _NUMBERS:
            texts[name] = value
            continue
        try:
            number = float(value.replace(",", ""))
        except ValueError:
            texts[name] = value
            if name in ("layers", "gpus", "step_s", "tp", "pp", "dp"):
                fault = fault or f"{name}: expected a number, found '{value}'"
            continue
        if not math.isfinite(number) or number < 0 or (number == 0 and name in _POSITIVE):
            fault = fault or f"{name}: expected a positive number, found '{value}'"
        elif name == "layers" and number > MOST_LAYERS:  # layers are built one by one
            fault = fault or f"{name}: expected at most {MOST_LAYERS}, found '{value}'"
        else:
            numbers[name] = number
    return MeasuredRow(str(path), line, texts, numbers, fault)
