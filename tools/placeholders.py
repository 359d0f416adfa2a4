"""List the placeholders of the project, or fill them in: `python -m tools.placeholders [--owner … --author … …]`.

    python -m tools.placeholders
    python -m tools.placeholders --owner example-lab --author "Ada Lovelace" --email ada@example.org \\
        --orcid 0000-0002-1825-0097 --affiliation "Example University"

The first form prints each line that holds a placeholder, and exits with 1 if there is one: a release stops there. The
second form writes the values into the files. Values that are left out keep their placeholders.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("pyproject.toml", "CITATION.cff", "CODE_OF_CONDUCT.md", "paper.md", "README.md")
#: The options, and what each value is.
VALUES = {
    "owner": "the account on GitHub that owns the repository",
    "author": "the name of the author",
    "email": "the address to which violations of the code of conduct are reported",
    "orcid": "the author's ORCID, such as 0000-0002-1825-0097",
    "affiliation": "where the author works",
    "tools": "the names and versions of the AI tools that were used, for the paper",
    "review": "what of the AI tools' results the authors have reviewed, for the paper",
}


def placeholder(name: str) -> str:
    """Return the placeholder of an option, as it appears in the files."""
    return f"PLACEHOLDER-{name.upper()}"


def remaining(root: Path) -> Iterator[str]:
    """Yield `file:line: text` for each line that holds a placeholder."""
    for name in FILES:
        if (path := root / name).exists():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if any(placeholder(option) in line for option in VALUES):
                    yield f"{name}:{number}: {line.strip()}"


def fill(root: Path, values: dict[str, str]) -> None:
    """Write the values of options into the files."""
    for name in FILES:
        if (path := root / name).exists():
            text = path.read_text(encoding="utf-8")
            for option, value in values.items():
                text = text.replace(placeholder(option), value)
            if "owner" in values:  # badges and links of the repository are hidden until then
                text = re.sub(r"<!-- of the repository:\n(.*?)\n-->", r"\1", text, flags=re.DOTALL)
            path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Fill in what is given, print what remains; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, meaning in VALUES.items():
        parser.add_argument(f"--{name}", help=meaning)
    fill(root, {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None})
    lines = list(remaining(root))
    print(*lines, f"{len(lines)} placeholder{'' if len(lines) == 1 else 's'}", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
