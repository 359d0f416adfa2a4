"""Check that each function of the package fits a screen: `python -m tools.functions`.

A function has at most 40 statements and 8 parameters; nested functions count separately. Public functions, those in
docs/api, may have more parameters, because their options are parameters. Compiled kernels and functions with the
signature of a function of torch are exempt. Exits with 1 if a function exceeds a limit.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
STATEMENTS, PARAMETERS = 40, 8
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Functions with the signature of a function of torch.
OF_TORCH = frozenset({"attend"})


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements inside a node, without those of functions and classes defined in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield from statements(child)


def problems(source: str, public: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for each function that exceeds a limit; `public` are names of functions and classes."""
    tree = ast.parse(source)
    methods = {
        id(node): owner.name for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef) for node in owner.body
    }
    for node in ast.walk(tree):
        if not isinstance(node, FUNCTIONS) or any(ast.unparse(each) == "compiled" for each in node.decorator_list):
            continue
        count = sum(1 for _ in statements(node)) - (ast.get_docstring(node) is not None)
        if count > STATEMENTS:
            yield node.lineno, f"{node.name} has {count} statements, at most {STATEMENTS}"
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        owner = methods.get(id(node), node.name)
        if count > PARAMETERS and owner not in public and node.name not in OF_TORCH:
            yield node.lineno, f"{node.name} has {count} parameters, at most {PARAMETERS}"


def main() -> int:
    """Print the problems of the package; returns the exit code."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/api").glob("*.md"))
    public = {name.rpartition(".")[2] for name in re.findall(r"auto(?:function|class):: ([\w.]+)", pages)}
    public.add("ImageModel")  # base class of Explainer, with the same arguments
    exceeding = [
        f"{path.relative_to(ROOT)}:{line}: {problem}"
        for path in sorted((ROOT / "vitflow").rglob("*.py"))
        for line, problem in problems(path.read_text(encoding="utf-8"), public)
    ]
    print(*exceeding, sep="\n", end="\n" if exceeding else "")
    return int(bool(exceeding))


if __name__ == "__main__":
    sys.exit(main())
