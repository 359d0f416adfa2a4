"""`vitflow methods`, `vitflow models`, `vitflow demo`: what there is to choose from, and a first look."""

import json
from pathlib import Path
from typing import Any

import click

from vitflow.cli.options import shown, talking
from vitflow.errors import printable
from vitflow.explaining.method_table import list_methods


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
@click.option("--all", "untrained", is_flag=True, help="List architectures without pretrained weights too.")
def models(pattern: str, as_json: bool, untrained: bool) -> None:
    """List timm's pretrained models whose id matches PATTERN (with * as a wildcard), and which methods apply to each.

    \b
    rollout    attention and rollout
    flow       attention flow
    gradients  gradient_rollout and gae
    yes        over all tokens of the model
    windows    through its windows and stages, down to the finest patch grid
    gradcam, input_gradient and occlusion apply to every model.

    In JSON, input_size is [channels, height, width] in pixels and grid is [rows, columns] of patches.

    Each architecture is built without weights and run once on shapes alone: nothing is downloaded.
    """
    with talking():
        from tqdm import tqdm

        from vitflow.explaining.applicability import list_models, matching

        names = matching(pattern, untrained=untrained)
        if not as_json:
            width = max(len(name) for name in names)
            columns = ("input", "grid", "prefix", "rollout", "flow", "gradients", "pooling, or why not")
            click.echo(_line("model", *columns, width), err=True)
        for row in list_models(names):
            with tqdm.external_write_mode():  # a line of the table, not the rest of a progress bar
                click.echo(json.dumps(row, ensure_ascii=False) if as_json else _row(row, width))


def _row(row: dict[str, Any], width: int) -> str:
    """One model as a line of the table."""
    size, grid = row["input_size"], row["grid"]
    prefix = row["num_prefix_tokens"]
    return _line(
        row["model"],
        "×".join(str(side) for side in size[1:]) if size else "",
        "×".join(str(side) for side in grid) if grid else "",
        "" if prefix is None else str(prefix),
        row["rollout"],
        row["flow"],
        row["gradients"],
        row["pooling"] or row["reason"] or "",
        width,
    )


def _line(
    model: str, size: str, grid: str, prefix: str, rollout: str, flow: str, gradients: str, rest: str, width: int
) -> str:
    columns = f"{model:{width}}  {size:>9}  {grid:>7}  {prefix:>6}  {rollout:7}  {flow:7}  {gradients:9}  {rest}"
    return columns.rstrip()


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
        from vitflow.cli.demo import run_demo

        for path in run_demo(output):
            click.echo(printable(path))
