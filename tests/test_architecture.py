"""The import rules of the project, read off the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mmplan"

# area -> areas it may import besides itself
ALLOWED = {
    "units": set(),
    "errors": set(),
    "files": {"errors"},
    "scenario": {"units", "errors", "files"},
    "cost_models": {"units", "errors", "files", "scenario"},
    "planner": {"units", "errors", "files", "scenario", "cost_models"},
    "kernels": set(),
    "runtime": {"units", "errors", "files", "scenario", "cost_models", "planner", "kernels"},
    "report": {"units", "errors", "files", "scenario", "cost_models", "planner", "runtime"},
    "commands": {"units", "errors", "files", "scenario", "cost_models", "planner", "runtime", "report"},
    "cli": {"units", "errors", "files", "scenario", "cost_models", "planner", "runtime", "report", "commands"},
    "__main__": {"cli"},
    "__init__": set(),
}
HEAVY = {
    "ortools": {"planner"},
    "torch": {"runtime", "kernels"},
    "triton": {"kernels"},
    "transformers": {"runtime"},
    "matplotlib": {"report"},
}
# reading run.json in reports, or asking whether a plan would run, must not pull torch in, which takes a second or two:
# these runtime files and all that they import are torch-free
TORCH_FREE_RUNTIME = ("measurement", "requirements", "thresholds", "validate")


def area_of(file: Path) -> str:
    part = file.relative_to(PACKAGE).parts[0]
    return part.removesuffix(".py")


def imports_of(file: Path, *, inside: bool = True) -> set[str]:
    """`inside`: with those that functions make."""
    names: set[str] = set()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{file}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_downwards(file: Path) -> None:
    area = area_of(file)
    for name in imports_of(file):
        parts = name.split(".")
        if parts[0] == "mmplan" and len(parts) > 1 and parts[1] in ALLOWED:
            assert parts[1] == area or parts[1] in ALLOWED[area], f"{area} imports {name}"
        if parts[0] in HEAVY:
            assert area in HEAVY[parts[0]], f"{area} imports {parts[0]}"


def test_there_are_no_import_cycles() -> None:
    import networkx as nx

    graph = nx.DiGraph()
    modules = {".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts): f for f in FILES}
    for module, file in modules.items():
        graph.add_edges_from((module, name) for name in imports_of(file) if name in modules and name != module)
    assert list(nx.simple_cycles(graph)) == []


def test_files_are_read_and_plans_judged_without_torch() -> None:
    reached, ahead = set[str](), [f"mmplan.runtime.{name}" for name in TORCH_FREE_RUNTIME]
    while ahead:
        name = ahead.pop()
        file = PACKAGE.parent / f"{name.replace('.', '/')}.py"
        if name not in reached and file.exists():
            found = imports_of(file, inside=False)
            assert not any(i.split(".")[0] == "torch" for i in found), name
            ahead += found
            reached.add(name)


def test_the_command_line_starts_without_heavy_packages() -> None:
    code = (
        "import sys, mmplan.cli; "
        "heavy = {'torch', 'ortools', 'matplotlib', 'numpy', 'networkx', 'pydantic', 'yaml'} & set(sys.modules); "
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
