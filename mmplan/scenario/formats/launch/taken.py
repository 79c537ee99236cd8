"""Arguments looked up by their names, remembering which were: what is left at the end is told as ignored."""

from mmplan.scenario.formats.launch.arguments import Argument, CommandLine
from mmplan.scenario.formats.launch.facts import Fact, Value, truth


class Taken:
    """The arguments of a command line, and the names of those that were read."""

    def __init__(self, line: CommandLine) -> None:
        self.line = line
        self.names: set[str] = set()

    def argument(self, *names: str) -> Argument | None:
        for name in names:
            found = self.line.arguments.get(name)
            if found is not None and found.values[:1] != ("None",):
                self.names.add(name)
                return found
        return None

    def on(self, *names: str) -> bool | None:
        """A switch: yes, no, or None where it does not stand. What stands behind a bare switch is not its value."""
        found = self.switch(*names)
        return None if found is None else _answer(found)

    def switch(self, *names: str) -> Argument | None:
        """Of several spellings the one that is on, else the first that stands."""
        found = [argument for name in names if (argument := self.argument(name)) is not None]
        return next((argument for argument in found if _answer(argument)), found[0] if found else None)

    def text(self, *names: str) -> str:
        found = self.argument(*names)
        return found.values[0] if found is not None and found.values else ""


def _answer(argument: Argument) -> bool:
    answer = truth(argument.values[0]) if argument.values else True
    return True if answer is None else answer


def like(fact: Fact, value: Value) -> Fact:
    """Another value at the place of a fact."""
    return Fact(value=value, file=fact.file, line=fact.line, key=fact.key)
