"""Count files, lines, import cycles, repeated class names, fragments and vocabulary of the source.

    python benchmarks/code_structure.py                                   # the source beside this script
    python benchmarks/code_structure.py --before OLD/src --name result    # old and new side by side, as a results page

Everything is parsed with `ast` and nothing is imported, so any revision can be counted.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = ("keys and values", "KV cache")
REGISTRATION = re.compile(r"^@[\w.]+\(\s*\n?\s*[\"']", re.M)  # @METHODS.register("gptq", ...): a registry entry


@dataclass(frozen=True)
class Source:
    """The modules below one `src` folder, parsed once."""

    folder: Path
    package: str = "smelt"
    trees: dict[str, ast.Module] = field(init=False, default_factory=dict)
    texts: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for file in sorted((self.folder / self.package).rglob("*.py")):
            name = ".".join(file.relative_to(self.folder).with_suffix("").parts).removesuffix(".__init__")
            self.texts[name] = file.read_text(encoding="utf-8")
            self.trees[name] = ast.parse(self.texts[name])

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Return the package modules that each module imports, function-local imports included."""
        return {name: {target for target in self._targets(tree) if target != name} for name, tree in self.trees.items()}

    def _targets(self, tree: ast.Module) -> Iterator[str]:
        """`from a.b import c` is `a.b.c` where that is a module, and `a.b` otherwise."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.trees)
            elif isinstance(node, ast.ImportFrom) and node.module in self.trees:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name if name in self.trees else str(node.module) for name in names)

    def cycles(self) -> list[list[str]]:
        """Return strongly connected components with more than one module (Tarjan)."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        components: list[list[str]] = []

        def visit(node: str) -> None:
            index[node] = low[node] = len(index)
            stack.append(node)
            for target in sorted(self.imports[node]):
                if target not in index:
                    visit(target)
                    low[node] = min(low[node], low[target])
                elif target in stack:
                    low[node] = min(low[node], index[target])
            if low[node] == index[node]:
                start = stack.index(node)
                component = sorted(stack[start:])
                del stack[start:]
                if len(component) > 1:
                    components.append(component)

        for name in self.imports:
            if name not in index:
                visit(name)
        return components

    def repeated_classes(self) -> dict[str, list[str]]:
        """Return public top-level class names that more than one module defines."""
        places: dict[str, list[str]] = {}
        for name, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(name)
        return {name: modules for name, modules in sorted(places.items()) if len(modules) > 1}

    def single_importer(self) -> list[str]:
        """Return modules with exactly one importer that register nothing; packages and commands excluded."""
        importers: Counter[str] = Counter(target for targets in self.imports.values() for target in targets)
        packages = {name.rpartition(".")[0] for name in self.trees}
        return [
            name
            for name in self.trees
            if importers[name] == 1
            and name not in packages
            and not name.startswith(f"{self.package}.cli.")
            and not REGISTRATION.search(self.texts[name])
        ]

    def phrase(self, words: str) -> int:
        """Return how often a phrase occurs in the source, across line breaks and case-insensitively."""
        pattern = re.compile(r"\s+".join(map(re.escape, words.split())), re.I)
        return sum(len(pattern.findall(text)) for text in self.texts.values())

    def local_names(self) -> Counter[str]:
        """Return how many functions assign each local name (parameters, `_` and tuple targets once each)."""
        counts: Counter[str] = Counter()
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    counts.update(
                        {
                            leaf.id
                            for leaf in ast.walk(node)
                            if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store)
                        }
                    )
        return counts

    def rows(self) -> list[tuple[str, str]]:
        """Return the counts as labels and values."""
        names = ", ".join(f"`{name}` {count}" for name, count in self.local_names().most_common(20))
        repeated = self.repeated_classes()
        return [
            ("files", f"{len(self.trees)}"),
            ("lines", f"{sum(text.count(chr(10)) for text in self.texts.values()):,}"),
            ("import cycles (modules in them)", f"{len(self.cycles())} ({sum(map(len, self.cycles()))})"),
            ("public class names that repeat", f"{len(repeated)}" + (f": {', '.join(repeated)}" if repeated else "")),
            ("modules with one importer, no registry entry", f"{len(self.single_importer())}"),
            *[(f'"{words}"', f"{self.phrase(words)}") for words in PHRASES],
            ("20 most common local variables (functions)", names),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the `src` folder of another revision")
    parser.add_argument("--name", help="write benchmarks/results/NAME.md instead of printing")
    parser.add_argument("--fragments", action="store_true", help="list the modules with one importer")
    options = parser.parse_args()
    now = Source(ROOT / "src")
    if options.fragments:
        print("\n".join(now.single_importer()))
        return
    if options.before is None:
        lines = ["| | now |", "|---|---|", *[f"| {label} | {value} |" for label, value in now.rows()]]
    else:
        pairs = zip(Source(options.before).rows(), now.rows(), strict=True)
        lines = ["| | before | after |", "|---|---|---|", *[f"| {a} | {old} | {new} |" for (a, old), (_, new) in pairs]]
    page = "\n".join(
        ["# The source, counted", "", "`python benchmarks/code_structure.py --before OLD/src`", "", *lines, ""]
    )
    if options.name is None:
        print(page)
    else:
        (ROOT / "benchmarks" / "results" / f"{options.name}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
