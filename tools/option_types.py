"""Generate `vitflow/registry/option_types.py` from the option table: `python -m tools.option_types [--write]`.

Without `--write`, exits with 1 if the file differs from the table. Type checkers and IDEs read the options of methods
from that file, so that they flag a misspelt option.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, ForwardRef, Literal, get_args, get_origin

from vitflow.registry.options import OPTIONS, Option, options_of
from vitflow.text.method_table import TEXT_METHODS

FILE = Path(__file__).parents[1] / "vitflow/registry/option_types.py"

_HEAD = '''"""Types of the options of methods, for type checkers.

Generated from the option table by `python -m tools.option_types --write`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict
'''


def generated() -> str:
    """Return the source of the file."""
    rows = options_of("method", "refinement").values()
    of_texts = {name for method in TEXT_METHODS.values() for name in method.defaults}
    classes = (
        (
            "LayerMapOptions(TypedDict, total=False)",
            "Options of `layer_maps`, which selects layers and heads itself.",
            [option for option in rows if not option.selects_layers],
        ),
        (
            "MethodOptions(LayerMapOptions, total=False)",
            "Options of the methods for images.",
            [option for option in rows if option.selects_layers],
        ),
        (
            "TextOptions(TypedDict, total=False)",
            "Options of the methods for texts.",
            [option for option in OPTIONS.values() if option.name in of_texts],
        ),
    )
    return "\n\n".join([_HEAD, *(_class(*each) for each in classes)])


def _class(head: str, title: str, options: Sequence[Option]) -> str:
    fields = (f"    {option.name}: {_source(option.annotation)}" for option in options)
    return "\n".join([f"class {head}:", f'    """{title}"""', "", *fields, ""])


def _source(annotation: Any) -> str:
    """Return an annotation as source code."""
    if annotation is type(None):
        return "None"
    if isinstance(annotation, UnionType) or "Union" in str(get_origin(annotation)):
        parts = sorted(get_args(annotation), key=lambda part: part is type(None))  # None last
        if any(isinstance(part, ForwardRef) for part in parts):
            return f'"{" | ".join(map(_source, parts))}"'
        return " | ".join(map(_source, parts))
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    if get_origin(annotation) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(annotation)))}]"
    if get_args(annotation):  # tuple[int, int], Sequence[int]
        return f"{get_origin(annotation).__name__}[{', '.join(map(_source, get_args(annotation)))}]"
    return str(annotation.__name__)


def _formatted(source: str) -> str:
    ruff = Path(sys.executable).with_name("ruff")
    command = [ruff, "format", "--stdin-filename", str(FILE), "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Write or check the file; returns the exit code."""
    source = _formatted(re.sub(r"\n{4,}", "\n\n\n", generated()))
    if "--write" in sys.argv[1:]:
        FILE.write_text(source, encoding="utf-8")
    elif not FILE.exists() or FILE.read_text(encoding="utf-8") != source:
        print(f"{FILE.name} differs from the option table: run python -m tools.option_types --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
