"""What to tell of an error: its type and text, and the innermost line of the user's own code that it came through."""

import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from itertools import dropwhile
from pathlib import Path
from types import FrameType, TracebackType

import mmplan
from mmplan.errors import MmplanError
from mmplan.units import seconds_of_milliseconds

_OWN = str(Path(mmplan.__file__).parent)
_RUNTIME = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SOURCE_LINE = re.compile(r"^\[\S+\.(cc|cpp|h):\d+\] ")
_LONGEST_TEXT = 2000  # of one error; the whole of it is in the traceback
_LONGEST_LINE = 120

# What gloo, NCCL and the store say when the other end is gone or silent.
_LOST = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|socket (closed|timeout)|timed out|timeout|not connected|"
    r"failed to recv|remote process|nccl .*(abort|error)",
    re.IGNORECASE,
)
_LATE = re.compile(r"timed out (?:waiting|after) (\d+) ?ms", re.IGNORECASE)


def described(error: BaseException) -> str:
    """Type and text, without the source line of a library that some texts begin with."""
    text = _SOURCE_LINE.sub("", " ".join(str(error).split()))[:_LONGEST_TEXT]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def root(error: BaseException) -> BaseException:
    """The error that others were raised from, where these only say in which action."""
    while isinstance(error, MmplanError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def lost_a_rank(error: BaseException) -> bool:
    """Whether this rank's error is that another one is gone or silent."""
    return isinstance(root(error), RuntimeError) and bool(_LOST.search(str(root(error))))


def timed_out(error: BaseException) -> float | None:
    """After how many seconds a wait for another rank was given up; None for other errors."""
    found = _LATE.search(str(root(error))) if lost_a_rank(error) else None
    return None if found is None else seconds_of_milliseconds(float(found[1]))


def error_line(error: BaseException) -> str:
    """`model.py, line 12, in forward: y = f(x)`; empty where no line outside of mmplan took part."""
    return _innermost(_frames_of(root(error).__traceback__))


def calling_line() -> str:
    """As `error_line`, of who called."""
    return _innermost(_place_of(frame, line) for frame, line in reversed([*traceback.walk_stack(sys._getframe(1))]))


def thread_line(thread: int) -> tuple[str, bool]:
    """Where a thread of this process is now, as `error_line`, and whether that is in a transfer or a collective."""
    frame = sys._current_frames().get(thread)
    frames: list[tuple[str, int, str]] = []
    while frame is not None:
        frames.insert(0, _place_of(frame, frame.f_lineno))
        frame = frame.f_back
    collective = any("/torch/distributed/" in file for file, _, _ in frames[-6:])
    return _innermost(frames), collective


def short(error: BaseException) -> str:
    """Type and first sentence of what lies under an error."""
    return described(root(error)).split(". ")[0]


def trace_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _frames_of(trace: TracebackType | None) -> Iterable[tuple[str, int, str]]:
    return [_place_of(frame, line) for frame, line in traceback.walk_tb(trace)]


def _place_of(frame: FrameType, line: int) -> tuple[str, int, str]:
    return frame.f_code.co_filename, line, frame.f_code.co_name


def _innermost(frames: Iterable[tuple[str, int, str]]) -> str:
    """The last line of the user's, else the last one of a library that is neither torch nor Python's own. Both stand
    behind the runtime's, which calls them."""
    own, library = "", ""
    for file, line, name in dropwhile(lambda place: not place[0].startswith(_RUNTIME), frames):
        if file.startswith((_OWN, "<")) or "importlib" in file:
            continue
        text = linecache.getline(file, line).strip()[:_LONGEST_LINE]
        said = f"{Path(file).name}, line {line}, in {name}" + (f": {text}" if text else "")
        installed = re.search("(site|dist)-packages", file)
        if not file.startswith(_LIBRARIES) and not installed:
            own = said
        elif installed and "/torch/" not in file:
            library = said
    return own or library
