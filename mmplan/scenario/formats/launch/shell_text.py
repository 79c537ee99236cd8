"""Words of a shell script, read letter by letter: quotes, comments, redirections, arrays, variables that are put in.

Nothing is executed. All work is counted, so that no script keeps the reader busy.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.formats.launch.arithmetic import evaluated

MAX_TEXT = 1_000_000
MAX_WORDS = 100_000
MAX_COMMAND = 10_000
MAX_WORK = 5_000_000  # characters copied or looked at
MAX_DEFAULTS = 10  # ${A:-${B:-...}}
SEPARATORS = "\n;&|"
ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?(\+?)=")
REDIRECTS = re.compile(r"\d?[<>]|&>")
_REDIRECT = re.compile(r"\d?(?:(<<-?)\s*([\"']?)([A-Za-z_]+)\2|<<<|[<>]{1,2}&?)|&>{1,2}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BLANK_BEHIND_BACKSLASH = re.compile(r"\\[ \t]+\r?\n")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word on one line; `split` where the shell would cut it at blanks, `array` the words of `NAME=( )`."""

    text: str
    line: int
    split: bool = False
    array: "tuple[tuple[Piece, ...], ...] | None" = None


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, variables put in, and the line where it stands."""

    text: str
    line: int


Pieces = tuple[Piece, ...]
Variables = dict[str, tuple[Pieces, ...]]


def joined(words: tuple[Pieces, ...]) -> Iterator[Piece]:
    """The pieces of all words of an array, blanks between them."""
    for index, word in enumerate(words):
        if index:
            yield Piece(" ", word[0].line if word else 1)
        yield from word


def plain(word: Pieces) -> str:
    """A word as it stands, without being split."""
    return "".join(piece.text for piece in word)


def text_of(words: tuple[Pieces, ...]) -> str:
    """The value of a variable as one text."""
    return "".join(piece.text for piece in joined(words))


class ShellText:
    """A place in a script, and the variables that are known there."""

    def __init__(self, text: str, file: Path) -> None:
        self.text, self.file = text, file
        self.at, self.line = 0, 1
        self.variables: Variables = {}
        self.directives: list[Word] = []
        self.comments: list[Word] = []
        self.warnings: list[str] = []
        self.heredocs: list[str] = []
        self.words_read = 0
        self.work = 0
        self.in_array = False

    def at_end(self) -> bool:
        return self.at >= len(self.text)

    @property
    def char(self) -> str:
        return self.text[self.at]

    def spend(self, amount: int) -> None:
        """Count work; InputError where a script takes more than any that people write."""
        self.work += amount
        if self.work > MAX_WORK:
            raise InputError("its variables and brackets take too long to put in", file=self.file, line=self.line)

    def split(self, word: Pieces) -> Iterator[Word]:
        """A word as the shell would split it where an unquoted variable stands in it."""
        current, line, quoted = "", word[0].line if word else self.line, False
        self.count_word()
        for piece in word:
            self.spend(len(piece.text) + 1)
            if not piece.split:
                current, line, quoted = current + piece.text, line if current or quoted else piece.line, True
                continue
            for index, part in enumerate(re.split(r"\s+", piece.text)):
                if index and (current or quoted):
                    self.count_word()
                    yield Word(current, line)
                    current, quoted = "", False
                if part:
                    line = line if current else piece.line
                    current += part
        if current or quoted:
            yield Word(current, line)

    def count_word(self) -> None:
        """One word more; InputError where there are more than people write."""
        self.words_read += 1
        if self.words_read > MAX_WORDS:
            raise InputError(f"more than {MAX_WORDS:,} words", file=self.file, line=self.line)

    def advance(self, count: int = 1) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def blanks(self) -> None:
        while not self.at_end():
            if self.text[self.at] in " \t\r":
                self.advance()
            elif self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
                self.advance(2 if self.text[self.at + 1] == "\n" else 3)
            else:
                trailing = _BLANK_BEHIND_BACKSLASH.match(self.text, self.at)
                if trailing is None:
                    return
                self.warnings.append(f"line {self.line} ends with a blank behind its backslash: a shell stops there")
                self.advance(trailing.end() - self.at)

    def comment(self) -> None:
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        text = self.text[self.at : end]
        if text.startswith("#SBATCH"):
            self.directives += [Word(word, self.line) for word in text[7:].split("#")[0].split()]
        else:
            self.comments.append(Word(text[:400], self.line))
        self.at = end

    def redirect(self) -> bool:
        """Skip `> file`, `2>&1`, `<<EOF`; false for `<image>` and other words that only look like one."""
        match = _REDIRECT.match(self.text, self.at)
        if match is None:
            return False
        if match[1]:
            self.heredocs.append(match[3])
        self.advance(match.end() - self.at)
        if not match[1]:
            self.blanks()
            if not self.at_end() and self.text[self.at] not in SEPARATORS + "()<>":
                self.word()
        return True

    def skip_heredocs(self) -> None:
        for mark in self.heredocs:
            found = re.compile(rf"^[\t ]*{mark}[ \t\r]*$", re.MULTILINE).search(self.text, self.at)
            self.advance((found.end() if found else len(self.text)) - self.at)
        self.heredocs = []

    def word(self) -> Pieces:
        """One word from here on, at least one character."""
        pieces: list[Piece] = []
        start, line = self.at, self.line
        literal = ""
        while not self.at_end():
            char = self.text[self.at]
            if char in " \t\r\n;&|<>" or (char in "()" and self.at > start):
                opened = ASSIGNED.fullmatch(literal) if char == "(" and not pieces and not self.in_array else None
                if opened is None:
                    break
                return (Piece(literal, line, array=self.array()),)
            if char == "\\":
                if self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
                    break
                literal += self.text[self.at + 1 : self.at + 2]
                self.advance(2)
            elif char == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                literal += self.text[self.at + 1 : end]
                self.advance(end + 1 - self.at)
                pieces.append(Piece(literal, line))
                literal = ""
            elif char == '"':
                if literal:
                    pieces.append(Piece(literal, line))
                    literal = ""
                pieces += self.quoted()
            elif char == "$" or char == "`":
                if literal:
                    pieces.append(Piece(literal, line))
                    literal = ""
                pieces += self.expansion(quoted=False)
            else:
                literal += char
                self.advance()
        if literal or not pieces:
            pieces.append(Piece(literal, line))
        if self.at == start:
            self.advance()  # never stand still
        return tuple(pieces)

    def array(self) -> tuple[Pieces, ...]:
        """The words of `( ... )`, each split as the shell would."""
        self.advance()
        self.in_array = True
        words: list[Pieces] = []
        while not self.at_end():
            while not self.at_end() and self.text[self.at] in " \t\r\n;":
                self.advance()
            self.blanks()
            if self.at_end():
                break
            char = self.text[self.at]
            if char == ")":
                self.advance()
                break
            if char == "#":
                self.comment()
            elif char in "(<>&|\n":
                self.advance()
            else:
                words += [(Piece(word.text, word.line),) for word in self.split(self.word())]
            if len(words) > MAX_WORDS:
                raise InputError(f"more than {MAX_WORDS:,} words", file=self.file, line=self.line)
        self.in_array = False
        return tuple(words)

    def quoted(self) -> list[Piece]:
        """Pieces of "...", one per line."""
        self.advance()
        pieces: list[Piece] = [Piece("", self.line)]
        literal, line = "", self.line
        while not self.at_end():
            char = self.text[self.at]
            if char == '"':
                self.advance()
                break
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ("\n", '"', "\\", "$", "`"):
                literal += "" if self.text[self.at + 1] == "\n" else self.text[self.at + 1]
                self.advance(2)
            elif char in "$`":
                pieces += [Piece(literal, line), *self.expansion(quoted=True)]
                literal = ""
            else:
                literal += char
                self.advance()
            if self.line != line:
                pieces.append(Piece(literal, line))
                literal, line = "", self.line
        pieces.append(Piece(literal, line))
        return [piece for piece in pieces if piece.text] or [Piece("", line)]

    def expansion(self, *, quoted: bool) -> list[Piece]:
        """What stands at a `$` or a backquote: known values, else the text itself."""
        line, start = self.line, self.at
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1, self.at + MAX_COMMAND)
            inside = end >= 0 and "\n" not in self.text[self.at : end]
            self.advance(end + 1 - self.at if inside else 1)
            return [Piece("${command}" if inside else "`", line, not quoted)]
        if self.text.startswith("$((", self.at):
            end = self.balanced(self.at + 1)
            inner = self.text[self.at + 3 : end - 2]
            self.advance(end - self.at)
            number = evaluated(inner, self.variables_in(inner))
            return [Piece(self.open_part(inner) if number is None else str(number), line, not quoted)]
        if self.text.startswith("$(", self.at):
            end = self.balanced(self.at + 1)
            self.advance(end - self.at)
            return [Piece("${command}", line, not quoted)]
        if self.text.startswith("${", self.at):
            end = self.text.find("}", self.at)
            self.spend((end if end >= 0 else len(self.text)) - self.at)
            depth = self.text.count("${", self.at + 2, max(end, 0))
            while end >= 0 and depth > 0:
                following = self.text.find("}", end + 1)
                if following < 0:
                    break
                depth = depth - 1 + self.text.count("${", end, following)
                end = following
            if end < 0:
                self.advance(2)
                return [Piece("${", line)]
            inner = self.text[self.at + 2 : end]
            self.advance(end + 1 - start)
            return self.parameter(inner, line, quoted, 0)
        name = _NAME.match(self.text, self.at + 1)
        if name is None:
            special = self.text[self.at + 1 : self.at + 2]
            size = 2 if special and special in "0123456789@*#?$!-" else 1
            self.advance(size)
            return [Piece(self.text[start : start + size], line, not quoted)]
        self.advance(name.end() - self.at)
        return self.value(name[0], line, quoted, all_words=False)

    def open_part(self, text: str) -> str:
        """The first variable of an arithmetic text that has no number, as `${NAME}`."""
        names = _NAME.findall(text[:400])
        known = self.variables_in(text)
        return f"${{{next((name for name in names if not known.get(name, '').strip().isdecimal()), 'arithmetic')}}}"

    def variables_in(self, text: str) -> dict[str, str]:
        """Values of the variables that an arithmetic text names."""
        return {name: text_of(self.variables[name]) for name in _NAME.findall(text[:400]) if name in self.variables}

    def balanced(self, opening: int) -> int:
        """The index behind the `)` that closes the `(` at `opening`; the end of the line where there is none."""
        depth = 0
        for match in re.compile(r"[()]").finditer(self.text, opening):
            depth += 1 if match[0] == "(" else -1
            if depth == 0:
                self.spend(match.end() - opening)
                return match.end()
            self.spend(1)
        self.spend(len(self.text) - opening)
        newline = self.text.find("\n", opening)
        return len(self.text) if newline < 0 else newline

    def parameter(self, inner: str, line: int, quoted: bool, depth: int) -> list[Piece]:
        """`${NAME}`, `${NAME[@]}`, `${NAME:-default}`."""
        match = re.match(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+)(\[[@*]\])?(?:(:?[-=])(.*))?$", inner, re.DOTALL)
        if match is None or depth > MAX_DEFAULTS:
            return [Piece(f"${{{inner}}}", line, not quoted)]
        name, every, default = match[1], match[2], match[4]
        known = self.variables.get(name)
        if known is not None and (text_of(known) or not (match[3] or "").startswith(":")):
            return self.value(name, line, quoted, all_words=every is not None)
        if default is None:
            return [Piece(f"${{{name}}}", line, not quoted)]
        if default.startswith("${") and default.endswith("}"):
            return self.parameter(default[2:-1], line, quoted, depth + 1)
        if default.startswith("$") and _NAME.fullmatch(default, 1):
            return self.value(default[1:], line, quoted, all_words=False)
        return [Piece(default.strip("\"'"), line, not quoted)]

    def value(self, name: str, line: int, quoted: bool, *, all_words: bool) -> list[Piece]:
        words = self.variables.get(name)
        if words is None:
            return [Piece(f"${{{name}}}", line, not quoted)]
        self.spend(sum(len(each) for each in words))
        pieces = list(joined(words if all_words or len(words) == 1 else words[:1]))
        if all_words:  # "${a[@]}" gives one word per element
            return [Piece(piece.text, piece.line, True) for piece in pieces]
        return [Piece(piece.text, piece.line, not quoted) for piece in pieces]
