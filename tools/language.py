"""Check names, docstrings and messages against the language rules: `python -m tools.language [PATH ...]`.

Reports identifiers that contain a discouraged word, docstrings that begin with What, Whether, How or Where, and, in the
package, messages with a discouraged word. Exits with 1 if there are any. CONTRIBUTING.md explains the rules.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = ("vitflow", "tests", "benchmarks", "tools", "examples")

#: Discouraged words, and what to write instead.
WORDS = {
    "found": "result, or the thing itself",
    "own": "default, self, or the thing itself",
    "asked": "requested",
    "told": "text, label, display or report",
    "tell": "text, label, display or report",
    "alike": "similar",
    "likeness": "similarity",
    "beside": "alongside",
    "picture": "image",
    "pictures": "images",
}
_OPENINGS = ("What", "Whether", "How", "Where")
# Names of Python that contain such a word.
_FOREIGN = frozenset({"ModuleNotFoundError", "PackageNotFoundError", "FileNotFoundError"})


def problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
                if text.split(maxsplit=1)[0] in _OPENINGS:
                    yield node.body[0].lineno, f"docstring begins with {text.split(maxsplit=1)[0]!r}"
        for name in _names(node):
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
            if name not in _FOREIGN:
                for word in sorted(words & WORDS.keys()):
                    yield node.lineno, f"name {name!r}: {word!r} -> {WORDS[word]}"  # type: ignore[attr-defined]
    for node in ast.walk(tree) if path.is_relative_to(ROOT / "vitflow") else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words = {word.lower() for word in re.findall(r"[A-Za-z]+", node.value)}
            for word in sorted(words & WORDS.keys()):
                yield node.lineno, f"message {node.value[:60]!r}: {word!r} -> {WORDS[word]}"


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers that a node defines or uses."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.alias):
        yield node.asname or ""


def main(paths: list[str]) -> int:
    """Print the problems of files and folders; returns the exit code."""
    count = 0
    for start in [ROOT / path for path in paths or CHECKED]:
        for path in [start] if start.is_file() else sorted(start.rglob("*.py")):
            if path != Path(__file__):
                for line, problem in problems(path):
                    print(f"{path.relative_to(ROOT)}:{line}: {problem}")
                    count += 1
    print(f"{count} problem{'' if count == 1 else 's'}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
