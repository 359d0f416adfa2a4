"""Pages that a browser opens: one base template and style for all of them, each page in one file without a network.

A page `NAME` is `NAME.html`, which extends `base.html`, with `NAME.css` behind the style of all pages. A page that a
reader can do something with has the script of all pages, `base.js`, and its own. Whatever comes from data or file names
is escaped, and no other script can run.
"""

import base64
import hashlib
import html
import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from vitflow.errors import printable
from vitflow.files import write_atomically
from vitflow.pictures.typesetting import decimal

#: Failed inputs listed on a page; what is kept beside it has them all.
FAILURES_SHOWN = 200


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """One self-contained page for a browser.

    Attributes:
        html: the page.
    """

    html: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.html) / 1e6:.1f} MB)"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page; nothing half-written ever stands under the final name."""
        with write_atomically(Path(path)) as file:
            file.write(self.html.encode("utf-8", "replace"))
        return Path(path)

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks: it can run its own script, and reach nothing of the notebook."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-downloads" '
            'title="vitflow" style="width: 100%; height: 900px; border: 0"></iframe>'
        )


def make_html(name: str, *scripts: str, **values: Any) -> str:
    """A page as text.

    Args:
        name: the page's template and style.
        scripts: names of its scripts, which run behind that of all pages.
        values: what the template shows; `data` is for the scripts.
    """
    style = Markup(_source("base.css") + _source(f"{name}.css"))
    script = Markup("".join(_source(f"{own}.js") for own in ("base", *scripts))) if scripts else Markup("")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _environment().get_template(f"{name}.html")
    return template.render(style=style, script=script, script_hash=digest, version=version("vitflow"), **values)


def write_html(path: Path, name: str, *scripts: str, **values: Any) -> Path:
    """Write a page as `make_html` makes it."""
    return Page(make_html(name, *scripts, **values)).save(path)


@cache
def _environment() -> Environment:
    loader = PackageLoader("vitflow.viewer")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["most_failures"] = FAILURES_SHOWN
    environment.filters |= {"printable": printable, "count": "{:,}".format, "decimal": decimal}
    return environment


@cache
def _source(name: str) -> str:
    """One of the template folder's files as it is; empty where a page has none of that kind."""
    path = Path(__file__).parent / "templates" / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""
