"""`vitflow methods`, `vitflow models`, `vitflow demo`: what there is to choose from, and a first look."""

import json
from pathlib import Path

import click

from vitflow.cli.options import printable, shown, talking
from vitflow.errors import ModelError
from vitflow.methods import list_methods


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def methods(as_json: bool) -> None:
    """List the methods, their options and where they come from."""
    if as_json:
        rows = [
            {
                "name": m.name,
                "summary": m.summary,
                "class_specific": m.class_specific,
                "options": dict(m.defaults),
                "paper": m.paper,
            }
            for m in list_methods()
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    for method in list_methods():
        click.echo(f"{method.name}{'  (class-specific)' if method.class_specific else ''}")
        click.echo(f"    {method.summary}")
        options = "  ".join(f"--{name.replace('_', '-')} {shown(value)}" for name, value in method.defaults.items())
        if options:
            click.echo(f"    defaults: {options}")
        if method.paper:
            click.echo(f"    source: {method.paper}")


@click.command()
@click.argument("pattern", default="*vit*")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per model.")
def models(pattern: str, as_json: bool) -> None:
    """List pretrained timm models whose id matches PATTERN (with * as a wildcard)."""
    with talking():
        from vitflow.models import list_models

        rows = list_models(pattern)
        if not rows:
            raise ModelError(f"No pretrained timm model matches {pattern!r}. Use * as a wildcard, such as 'vit_base*'.")
        if as_json:
            for row in rows:
                click.echo(json.dumps(row))
            return
        width = max(len(row["model"]) for row in rows)
        click.echo(f"{'model':{width}}  {'input':>9}  {'classes':>7}  attention", err=True)
        for row in rows:
            size = "×".join(str(side) for side in row["input_size"][1:])
            click.echo(f"{row['model']:{width}}  {size:>9}  {row['num_classes']:>7}  {row['attention']}")


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("vitflow-demo"),
    show_default=True,
    help="Folder for the overlays.",
)
def demo(output: Path) -> None:
    """Explain the bundled pictures with the bundled model: overlays and one strip."""
    with talking():
        from vitflow.demo.show import run_demo

        for path in run_demo(output):
            click.echo(printable(path))
