"""Chakra's protobuf files (.et): messages with their length before each, metadata first, then nodes.

A reader of the few fields that are needed (schema/protobuf/et_def.proto); encoding:
protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator
from pathlib import Path

from mmplan.cost_models.formats.chakra_nodes import COMPUTE, MOST_NODES, NODE_TYPES, Node, duration_us, with_collective
from mmplan.cost_models.formats.json_stream import Cut
from mmplan.cost_models.formats.kineto_arguments import integer
from mmplan.errors import InputError

_MOST_NODE_BYTES = 16_000_000
# Fields of Node and of AttributeProto.
_NAME, _TYPE, _MICROS, _ATTRIBUTE = 2, 3, 7, 10
_ATTRIBUTE_NAME = 1
_INTEGERS, _BOOL = (7, 9, 11, 13), 27

_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5


def protobuf_nodes(path: Path) -> Iterator[Node | Cut]:
    """The nodes of a file.

    Raises:
        InputError: no such file, or no protobuf of Chakra.
    """
    try:
        with path.open("rb") as file:
            count = 0
            while head := file.read(10):
                found = _varint(head, 0)
                if found is None or found[0] > _MOST_NODE_BYTES:
                    raise InputError("no Chakra protobuf: expected the length of a message", file=path)
                length, used = found
                file.seek(used - len(head), 1)
                message = file.read(length)
                if len(message) < length:
                    yield Cut(line=count, reason=f"the file ends in message {count + 1}")
                    return
                count += 1
                if count > MOST_NODES:
                    raise InputError(f"more than {MOST_NODES:,} nodes", file=path)
                if count > 1:
                    yield _node(message, path)
    except FileNotFoundError as error:
        raise InputError("no such file", file=path) from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=path) from error


def _node(message: bytes, path: Path) -> Node:
    name, kind, micros = "", COMPUTE, None
    attributes: dict[str, int] = {}
    for number, value in _fields(message, path):
        if number == _NAME and isinstance(value, bytes):
            name = value.decode("utf-8", errors="replace")[:4_000]
        elif number == _TYPE and isinstance(value, int):
            kind = NODE_TYPES.get(value, COMPUTE)
        elif number == _MICROS:
            micros = duration_us(value)
        elif number == _ATTRIBUTE and isinstance(value, bytes):
            inner = dict(_fields(value, path))
            key = inner.get(_ATTRIBUTE_NAME)
            number_value = next((inner[field] for field in (*_INTEGERS, _BOOL) if field in inner), None)
            if isinstance(key, bytes) and isinstance(number_value, int):
                attributes[key.decode("utf-8", errors="replace")] = number_value
    if not name:
        raise InputError("no Chakra protobuf: a node without a name", file=path)
    size = integer(attributes.get("comm_size"))
    return Node(
        name=with_collective(name, attributes.get("comm_type")),
        kind=kind,
        duration_us=micros,
        on_host=bool(attributes["is_cpu_op"]) if "is_cpu_op" in attributes else None,
        size_bytes=size if size >= 0 else None,
        call=None,
    )


def _fields(message: bytes, path: Path) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message."""
    at = 0
    while at < len(message):
        tag = _varint(message, at)
        found = None if tag is None else _value(message, at + tag[1], tag[0] & 7)
        if tag is None or found is None or tag[0] >> 3 == 0:
            raise InputError("no Chakra protobuf: a damaged field", file=path)
        value, at = found
        yield tag[0] >> 3, value


def _value(message: bytes, at: int, wire: int) -> tuple[int | bytes, int] | None:
    """(value, where the next field begins), None where it is damaged."""
    if wire == _VARINT:
        found = _varint(message, at)
        return None if found is None else (found[0], at + found[1])
    if wire == _LENGTH:
        size = _varint(message, at)
        if size is None:
            return None
        begin, end = at + size[1], at + size[1] + size[0]
    else:
        begin, end = at, at + {_EIGHT: 8, _FOUR: 4}.get(wire, len(message) + 1)
    return (message[begin:end], end) if end <= len(message) else None


def _varint(data: bytes, at: int) -> tuple[int, int] | None:
    """(value, bytes used), None where none ends within ten bytes."""
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, index + 1
    return None
