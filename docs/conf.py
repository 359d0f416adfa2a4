"""How Sphinx builds the site: `make docs`. Nothing is fetched and nothing is executed."""

import ast
import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import vitflow

project = "vitflow"
author = "The vitflow developers"
release = vitflow.__version__
html_title = "vitflow"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]  # the map of the documentation, as assistants read it
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_sphinx = False

nb_execution_mode = "off"  # notebooks are kept with their outputs, and the tests run them
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline", "dollarmath"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Facts", "params_style")]
default_role = "py:obj"

# Our own names must have their place in the reference. Those of other projects stand as plain text, and so do the
# words of docstrings that are no full names, and the types of which only parts of parts are made.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!vitflow\.[\w.]+$).*"),
    (
        r"py:class",
        r"vitflow\..*\.(_?[A-Z]\w*Options|Balanced|Call|Head|Readouts|ReadBlock|Coordinate|ModuleAttention|Panel)",
    ),
    (r"py:class", r"vitflow\..*\.(Boxes|Masks|PlacedImage|Prompts|ShownImage|SimilarityTo|Table|TextRow|Values)"),
    (r"py:class", r"vitflow\..*\.(_Token|LargestValues|Certificate|HeadWatch)"),
]


def public_names() -> dict[str, str]:
    """What a reader calls each public name, by where it is made."""
    found = {}
    namespaces = ("text", "folder", "methods", "evaluation", "demo")
    for room in ("vitflow", *(f"vitflow.{namespace}" for namespace in namespaces)):
        stub = Path(find_spec(room).origin).with_suffix(".pyi")
        for node in ast.parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:  # `from . import text` is a namespace
                names = {f"{room}.{node.module}.{alias.name}": f"{room}.{alias.name}" for alias in node.names}
                found |= {made: name for made, name in names.items() if made not in found}
    return found


PUBLIC = public_names()
#: The names with which the table of all names begins.
FIRST = [f"vitflow.{name}" for name in ("explain", "Explainer", "Saliency", "compare", "Comparison")]


def under_its_public_name(app, env, node, content):
    """Lead a reference to where a name is made to the public name, under which the reference has it."""
    target = node.get("reftarget", "")
    name = max((made for made in PUBLIC if target == made or target.startswith(f"{made}.")), key=len, default="")
    if node.get("refdomain") != "py" or not name:
        return None
    public = PUBLIC[name] + target[len(name) :]
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, content)


def options_of_methods() -> str:
    """A section for each method and a table of all options, from the table that the command line is made from."""
    from vitflow.registry.options import METHOD_OPTIONS

    texts = ["## Methods\n"]
    for method in vitflow.list_methods():
        defaults = ", ".join(f"`{key}={value!r}`" for key, value in method.defaults.items())
        paper = ", ".join(f"`{key}={value!r}`" for key, value in method.presets.get("paper", {}).items())
        texts += [f"### {method.name}\n", f"{method.summary}\n", f"- Question: {method.question}"]
        texts += ["- Class-specific."] * method.class_specific
        texts += [f"- Options and defaults: {defaults or 'none'}"]
        texts += [f'- As published, `preset="paper"`: {paper}'] * bool(paper)
        texts += [f"- Source: {method.paper}"] * bool(method.paper) + [""]
    texts += ["## Options\n", "| option | meaning | values |", "|---|---|---|"]
    texts += [
        f"| `{name}` | {option.help} | {option.values.replace('|', ', ')} |".replace("\n", " ")
        for name, option in METHOD_OPTIONS.items()
    ]
    return "\n".join(texts)


def all_names() -> str:
    """A row for each public name: what it is, in one sentence."""
    rows = ["| name | description |", "|---|---|"]
    for name in sorted(PUBLIC.values(), key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        room, _, last = name.rpartition(".")
        found = getattr(import_module(room), last)
        first = (found.__doc__ or "").strip().partition("\n")[0] if hasattr(found, "__name__") else "A constant."
        rows += [f"| {{py:obj}}`{name}` | {first} |"]
    return "\n".join(rows)


MADE = {"api/options": options_of_methods, "api/index": all_names}


def filled_in(app, docname, source):
    """Put the tables that are made from the code into their pages."""
    if docname in MADE:
        source[0] = source[0].replace("<!-- made from the code -->", MADE[docname]())


def with_other_names(app, docname, source):
    """Make the other names of a page, which are in a comment, its keywords and main entries of the index."""
    if found := re.search(r"<!-- also known as: (.*?)\s-->", source[0], re.DOTALL):
        names = " ".join(found[1].split())
        keywords = f"---\nmyst:\n  html_meta:\n    keywords: {json.dumps(names)}\n---\n"
        entries = ", ".join(f"! {name}" for name in names.split(", "))
        source[0] = f"{keywords}\n```{{index}} {entries}\n```\n\n{source[0]}"


def setup(app):
    """Connect the functions above."""
    app.connect("missing-reference", under_its_public_name)
    app.connect("source-read", filled_in)
    app.connect("source-read", with_other_names)
