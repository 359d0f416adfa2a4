"""Write docs/model-list.md: the methods that apply to each pretrained architecture of the installed timm.

Each architecture is built with random weights and checked as by `vitflow check`: nothing is downloaded. This takes
hours.

    python -m tools.list_models
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from timm.models import model_entrypoint
from torch import nn

import vitflow
from vitflow.progress import tracking
from vitflow.recording.attention_kinds import is_difference, refusal_in_words

PAGE = Path(__file__).resolve().parent.parent / "docs" / "model-list.md"
# Two blocks, or two in each of four stages, are representative where a model takes these options, except in files whose
# later blocks are of another kind.
SHORT = ({"depth": 2}, {"depths": (2, 2, 2, 2)})
WHOLE = ("convit", "visformer")
# The largest number of parameters of a model that is checked.
LARGEST = 1_500_000_000


class Support(NamedTuple):
    """Support of rollout, raw attention, gradient rollout and GAE ("yes", "by stages", "no"), of flow, and why not."""

    rollout: str
    flow: str
    reason: str = ""


def family_of(name: str) -> str:
    """Return timm's file of an architecture."""
    return str(model_entrypoint(name).__module__).rpartition(".")[2]


def support_of(name: str) -> Support:
    """Determine the support of an architecture of timm."""
    for options in (*(() if family_of(name) in WHOLE else SHORT), {}):
        try:
            with torch.device("meta"):
                draft = timm.create_model(name, **options)
        except Exception:  # it does not take these options
            continue
        if sum(weight.numel() for weight in draft.parameters()) > LARGEST:
            return Support("not checked", "not checked", "too large")
        return support_in(timm.create_model(name, **options).eval())
    raise ValueError(f"timm does not build {name}.")


def support_in(model: nn.Module) -> Support:
    """Determine the support of a model by its check."""
    checked = vitflow.check(model, methods=["flow"])
    if not checked.refusal:
        windowed = bool(checked.methods["flow"])
        return Support("by stages", "no") if windowed else Support("yes", "yes")
    broken = [clause for clause in checked.clauses if clause.holds is False]
    if broken and broken[0].module:
        return Support("no", "no", f"clause {broken[0].number}: {broken[0].measured}")
    if broken:
        return Support("no", "no", "its windows cannot be mapped to the image")
    if any(map(is_difference, model.modules())):
        return Support("no", "no", "difference of two attention matrices")
    return Support("no", "no", refusal_in_words(model, []))


def grouped(names: Sequence[str]) -> dict[tuple[str, Support], list[str]]:
    """Return the architectures by their file of timm and their support."""
    groups: dict[tuple[str, Support], list[str]] = {}
    with tracking("models", len(names)) as done:
        for name in names:
            groups.setdefault((family_of(name), support_of(name)), []).append(name)
            done(1)
    return groups


def page_of(groups: Mapping[tuple[str, Support], Sequence[str]]) -> str:
    """Return the page as Markdown."""
    count = sum(map(len, groups.values()))
    applied = sum(len(members) for (_, support), members in groups.items() if support.rollout in ("yes", "by stages"))
    rows = []
    for (family, (rollout, flow, reason)), members in sorted(groups.items()):
        rows.append(f"| `{family}` | {rollout} | {flow} | {reason} | {', '.join(map('`{}`'.format, members))} |")
    return "\n".join(
        [
            "# Models of timm",
            "",
            f"The {count} architectures of timm {timm.__version__} with pretrained weights, checked with random "
            "ones by `python -m tools.list_models`, as `vitflow check` does. Rollout stands",
            f"for raw attention, gradient rollout and GAE, too, and applies to {applied}; "
            "*by stages*: through windows and stages to the finest patch grid. Grad-CAM,",
            "input gradient, occlusion and sampling support every model.",
            "",
            "| file of timm | rollout | flow | why not | architectures |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="*", help="architectures, with * as a wildcard")
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    names = sorted({name.partition(".")[0] for name in timm.list_pretrained(given.pattern)})
    given.output.write_text(page_of(grouped(names)), encoding="utf-8")


if __name__ == "__main__":
    main()
