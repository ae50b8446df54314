"""The folders and which imports which, read from the sources, as a mermaid picture: `python docs/picture.py`.

As a hook of mkdocs it puts the picture where a page says `<!-- folders -->`, so that no picture can be out of date.
An arrow that follows from two others is left out.
"""

import ast
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("velox_cache", "velox_fn", "metal_src")
PLACE = "<!-- folders -->"

Arrows = dict[str, set[str]]


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """What mkdocs calls for each page."""
    return (
        markdown.replace(PLACE, f"```mermaid\n{mermaid(without_detours(arrows()))}\n```")
        if PLACE in markdown
        else markdown
    )


def arrows() -> Arrows:
    """For each folder the folders that its modules import, also inside functions."""
    found: Arrows = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            importer = folder_of(module.removesuffix(".__init__"))
            imported = {folder_of(name) for name in imports(path) if name.split(".")[0] in PACKAGES}
            found.setdefault(importer, set()).update(imported - {importer})
    return found


def imports(path: Path) -> set[str]:
    """The modules that a file imports from, by their full names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def folder_of(module: str) -> str:
    """Where a module lies: `velox_fn.engine` of `velox_fn.engine.store.Store`; a file beside the folders is its own."""
    first, *rest = module.split(".")
    if not rest:
        return first
    inside = ROOT / first / rest[0]
    return f"{first}.{rest[0]}" if inside.is_dir() or inside.with_suffix(".py").exists() else first


def without_detours(graph: Arrows) -> Arrows:
    """The same graph without the arrows that follow from others; those within a circle all stay, to be seen."""
    reached = {start: _reached(graph, start) for start in graph}
    follows = {
        (start, end)
        for start, ends in graph.items()
        for end in ends
        for other in ends - {end}
        if end in reached.get(other, set()) and start not in reached[other] and other not in reached.get(end, set())
    }
    return {start: {end for end in ends if (start, end) not in follows} for start, ends in graph.items()}


def _reached(graph: Arrows, start: str) -> set[str]:
    reached: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        folder = waiting.pop()
        if folder not in reached:
            reached.add(folder)
            waiting.extend(graph.get(folder, ()))
    return reached


def mermaid(graph: Arrows) -> str:
    """The graph as mermaid's text, one box for each package."""
    lines = ["flowchart TD"]
    for package in PACKAGES:
        lines.append(f"  subgraph {package}_box[{package}]")
        inside = sorted(name for name in graph if name.split(".")[0] == package)
        lines += [f"    {name.replace('.', '_')}[{name.removeprefix(package + '.')}]" for name in inside]
        lines.append("  end")
    lines += [
        f"  {start.replace('.', '_')} --> {end.replace('.', '_')}"
        for start in sorted(graph)
        for end in sorted(graph[start])
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid(without_detours(arrows())))
