"""Imports: a part can be read after the parts that it imports, and there is such an order."""
import ast
import sys
from graphlib import TopologicalSorter

from helpers import ROOT


def imports(file) -> set[str]:
    """First names of all modules that a file imports, inside functions too; of parts `parts.x`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= ({f"{node.module}.{name.name}" for name in node.names}
                      if node.module in ("parts", "explorer") else {node.module})
    return found


def test_parts_import_no_script_and_nothing_that_imports_them():
    """Nor does the viewer. The sampler and the built-in problems need the standard library only."""
    for alone in ("ada_sampler.py", "models/problems.py"):
        assert imports(ROOT / alone) <= sys.stdlib_module_names
    parts = {f"{room}.{file.stem}": imports(file)
             for room in ("parts", "explorer") for file in (ROOT / room).glob("*.py")}
    scripts = {file.stem for file in ROOT.glob("*.py")} - {"ada_sampler", "rewards"}
    assert {name: found & scripts for name, found in parts.items() if found & scripts} == {}
    graph = {name: found & parts.keys() for name, found in parts.items()}
    assert not [name for name, found in graph.items() if name.startswith("parts.")
                and any(other.startswith("explorer.") for other in found)]
    assert not imports(ROOT / "minirl.py") & {"eval", "explore"}
    list(TopologicalSorter(graph).static_order())  # or CycleError
