"""The words of a shell script, with variables that the script itself sets put in. Nothing is executed.

What a reader of the script would know without running it: `NAME=value`, `NAME="..."`, arrays, `+=`, `${NAME:-default}`,
`$((2 * N))`, backslash at line ends, comments, here-documents, and tests in `if` and `case` that compare known values.
Everything else (`$1`, `$(hostname)`, a variable of the environment) stays in the text as `${NAME}`. Variables that are
set in branches whose condition is not known, with different values, are not known either.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.formats.launch.shell_text import (
    ASSIGNED,
    MAX_TEXT,
    REDIRECTS,
    SEPARATORS,
    Piece,
    Pieces,
    ShellText,
    Variables,
    Word,
    joined,
    plain,
    text_of,
)

MAX_NESTING = 100
_PATTERN = re.compile(r"\(?([^)\n]{1,400})\)")
_KEYWORDS = {"then", "do", "else", "{", "}", "!", "time", "export", "readonly", "local", "declare", "typeset"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The commands of a script with variables put in, those it sets, and lines that start with #SBATCH.

    Attributes:
        commands: words of each command that is run, or would be run in a branch whose condition is not known.
        variables: name -> value at the end of the script; unknown parts stay as `${NAME}`.
        directives: words of `#SBATCH` lines.
        comments: texts of comments, with their line.
        warnings: what the shell would read in another way than people mean.
    """

    commands: tuple[tuple[Word, ...], ...]
    variables: dict[str, str]
    directives: tuple[Word, ...]
    comments: tuple[Word, ...]
    warnings: tuple[str, ...]


def read_shell(text: str, file: Path) -> Script:
    """The commands of a script.

    Raises:
        InputError: variables that grow without end.
    """
    source = ShellText(text, file)
    reader = _Reader(source)
    reader.run()
    return Script(
        commands=tuple(reader.commands),
        variables={name: text_of(words) for name, words in source.variables.items()},
        directives=tuple(source.directives),
        comments=tuple(source.comments),
        warnings=tuple(dict.fromkeys(source.warnings)),
    )


@dataclass(slots=True)
class _Branch:
    """An `if` or `case`: whether a branch was surely taken, whether this one runs (None: not known), what was set
    before, and what each branch that may run has set."""

    taken: bool = False
    runs: bool | None = True
    before: Variables = field(default_factory=dict)
    results: list[Variables] = field(default_factory=list)
    subject: str | None = None
    line: int = 0


class _Reader:
    def __init__(self, source: ShellText) -> None:
        self.source = source
        self.commands: list[tuple[Word, ...]] = []
        self.branches: list[_Branch] = []
        self.exported = False  # behind export, declare, ... options may stand
        self.ended_by = "\n"
        self.pattern_follows = False
        self.guard: bool | None = True  # whether the command behind `[ a = b ] &&` runs

    def run(self) -> None:
        while not self.source.at_end():
            words = self.command()
            if not words:
                continue
            if self.guard is not False:
                self.interpret(words)
            self.guard = self.next_guard(words)

    def next_guard(self, words: list[Pieces]) -> bool | None:
        """Whether what stands behind this command runs, where it is a test and `&&` or `||` follows."""
        if self.ended_by not in ("&&", "||") or plain(words[0]) not in ("[", "[[", "test"):
            return True
        holds = self.test([" ".join(w.text for w in self.source.split(word)) for word in words])
        return holds if holds is None else holds == (self.ended_by == "&&")

    def command(self) -> list[Pieces]:
        """Words up to the end of a command, as pieces that are not yet split."""
        words: list[Pieces] = []
        while not self.source.at_end():
            self.source.blanks()
            if self.source.at_end():
                break
            char = self.source.char
            if self.pattern_follows and not words:
                self.pattern()
                continue
            if REDIRECTS.match(self.source.text, self.source.at) and self.source.redirect():
                continue
            if char in SEPARATORS:
                self.pattern_follows = self.source.text.startswith(";;", self.source.at) and self.in_case
                self.ended_by = self.source.text[self.source.at : self.source.at + 2] if char in "&|" else char
                self.source.advance(len(self.ended_by))
                if char == "\n":
                    self.source.skip_heredocs()
                if words or char == "\n":
                    break
                continue
            if char == "#":
                self.source.comment()
                continue
            if char in "()":
                self.source.advance()
                continue
            word = self.source.word()
            words.append(word)
            self.source.count_word()
        return words

    def interpret(self, words: list[Pieces]) -> None:
        """Act on one command: branches, assignments, or keep it."""
        while words:
            first = plain(words[0])
            if first in ("if", "elif", "else", "fi", "case", "esac", "for", "while", "until", "done", "function"):
                words = self.branch(first, words)
                continue
            if first in _KEYWORDS or (
                first.startswith("-") and len(first) == 2 and first[1].isalpha() and self.exported
            ):
                self.exported = first in ("export", "readonly", "local", "declare", "typeset") or self.exported
                words = words[1:]
                continue
            break
        self.exported = False
        if any(branch.runs is False for branch in self.branches):
            return
        kept: list[Word] = []
        assigning = True
        for word in words:
            match = ASSIGNED.match(word[0].text) if assigning and word and not word[0].split else None
            if match:
                self.assign(match, word)
                continue
            assigning = False
            kept += self.source.split(word)
        if kept:
            self.commands.append(tuple(kept))

    def assign(self, match: re.Match[str], word: Pieces) -> None:
        name, index, plus = match[1], match[2], match[3]
        rest = Piece(word[0].text[match.end() :], word[0].line)
        before, array = self.source.variables.get(name, ()), word[0].array
        value: tuple[Pieces, ...] = (tuple(piece for piece in (rest, *word[1:]) if piece.text),)
        if array is not None:
            value = (*before, *array) if plus else array
        elif index is not None:
            value = (*before, *value)
        elif plus:
            value = ((*joined(before), *value[0]),)
        if sum(len(piece.text) for each in value for piece in each) > MAX_TEXT:
            raise InputError(
                f"the variable {name} grows beyond {MAX_TEXT:,} characters",
                file=self.source.file,
                line=self.source.line,
            )
        if self.guard is None:
            value = self.agreed(name, [before, value], self.source.line)
        self.source.variables[name] = value

    def branch(self, keyword: str, words: list[Pieces]) -> list[Pieces]:
        """Open, turn or close a branch; the words of the command that are left."""
        flat = [" ".join(w.text for w in self.source.split(word)) for word in words[1:]]
        if keyword == "function":
            return []
        if len(self.branches) > MAX_NESTING:
            raise InputError(f"branches nested deeper than {MAX_NESTING}", file=self.source.file, line=self.source.line)
        if keyword == "if":
            self.branches.append(_Branch(before=dict(self.source.variables), line=self.source.line))
            self.start(self.test(["if", *flat]))
        elif keyword == "case":
            subject = flat[0] if flat else ""
            self.branches.append(
                _Branch(before=dict(self.source.variables), subject=subject, runs=False, line=self.source.line)
            )
            self.pattern_follows = True
        elif keyword in ("for", "while", "until"):
            if keyword == "for" and flat:
                self.source.variables[flat[0]] = ((Piece(f"${{{flat[0]}}}", self.source.line),),)
        elif self.branches and keyword in ("elif", "else"):
            self.end()
            self.start(self.test(["elif", *flat]) if keyword == "elif" else True)
            return words[1:] if keyword == "else" else []
        elif self.branches and keyword in ("fi", "esac"):
            self.end()
            self.close(self.branches.pop())
        return []

    def start(self, holds: bool | None) -> None:
        branch = self.branches[-1]
        branch.runs = False if branch.taken else holds
        branch.taken = branch.taken or holds is True
        self.source.spend(len(branch.before))
        self.source.variables = dict(branch.before)

    def end(self) -> None:
        branch = self.branches[-1]
        if branch.runs is not False:
            branch.results.append(self.source.variables)
        self.source.variables = dict(branch.before)

    def close(self, branch: _Branch) -> None:
        """What holds behind a branch: the values that all branches which may have run agree on."""
        results = branch.results if branch.taken else [*branch.results, branch.before]
        merged = dict(results[0]) if results else dict(branch.before)
        for name in dict.fromkeys(name for result in results for name in result):
            values = [result.get(name) for result in results]
            self.source.spend(len(values))
            if any(value is not values[0] for value in values):
                merged[name] = self.agreed(name, values, branch.line)
        self.source.variables = merged

    def agreed(self, name: str, values: list[tuple[Pieces, ...] | None], line: int) -> tuple[Pieces, ...]:
        """What holds of a variable where it is not known which of the values it has: if some of them only add arguments
        to the shortest, that one, and the others are told; else it is not known."""
        texts = [text_of(value or ()).split() for value in values]
        self.source.spend(sum(map(len, texts)))
        least = min(range(len(texts)), key=lambda index: len(texts[index]))
        shortest, more = texts[least], [text[len(texts[least]) :] for text in texts]
        if all(
            text[: len(shortest)] == shortest and (not rest or rest[0].startswith("-"))
            for text, rest in zip(texts, more, strict=True)
        ):
            added = dict.fromkeys(" ".join(rest)[:80] for rest in more if rest)
            for arguments in added:
                self.source.warnings.append(f"line {line}: {arguments}: depends on what is not known here; not read")
            return values[least] or ()
        return ((Piece(f"${{{name}}}", line),),)

    @property
    def in_case(self) -> bool:
        return bool(self.branches) and self.branches[-1].subject is not None

    def pattern(self) -> None:
        """`8B|8b)` of a case, or its end."""
        while not self.source.at_end() and self.source.char in " \t\r\n;":
            self.source.advance()
        if self.source.text.startswith("#", self.source.at):
            self.source.comment()
            return
        self.pattern_follows = False
        found = _PATTERN.match(self.source.text, self.source.at)
        if found is None or self.source.text.startswith("esac", self.source.at) or not self.in_case:
            return
        self.source.advance(found.end() - self.source.at)
        self.end()
        subject = self.branches[-1].subject or ""
        patterns = [pattern.strip(" \"'") for pattern in found[1].split("|")]
        if "*" in patterns:
            self.start(True)
        elif "$" in subject or any(set("*?[$") & set(pattern) for pattern in patterns):
            self.start(None)
        else:
            self.start(subject in patterns)

    def test(self, words: list[str]) -> bool | None:
        """The truth of `[ a = b ]` and its kin, None where it is not known or only a part of it stands here."""
        if words and words[0] in ("if", "elif") and self.ended_by in ("&&", "||"):
            return None
        words = [word for word in words if word not in ("if", "elif", "[", "[[", "]", "]]", "test", "then")]
        negated = bool(words) and words[0] == "!"
        words = words[1:] if negated else words
        answer = _compared(words)
        return answer if answer is None else answer != negated


def _compared(words: list[str]) -> bool | None:
    """The truth of a comparison whose two sides are known."""
    if any("$" in word for word in words):
        return None
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 1 and words[0] in ("-z", "-n"):
        return words[0] == "-z"
    if len(words) != 3:
        return None
    left, operator, right = words
    if operator in ("=", "==", "!="):
        return None if set("*?[") & set(right) else (left == right) == (operator != "!=")
    numeric = {"-eq": 0, "-ne": 0, "-gt": 1, "-lt": -1, "-ge": 1, "-le": -1}
    if operator in numeric and all(re.fullmatch(r"-?[0-9]{1,15}", side) for side in (left, right)):
        sign = (int(left) > int(right)) - (int(left) < int(right))
        if operator in ("-eq", "-ge", "-le") and sign == 0:
            return True
        return sign != 0 if operator == "-ne" else sign == numeric[operator] and operator != "-eq"
    return None
