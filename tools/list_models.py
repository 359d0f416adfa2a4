"""Write docs/model-list.md: the methods that apply to each pretrained architecture of the installed timm.

Each architecture is built without weights and runs once on torch's meta device, where tensors have shapes but no
values: nothing is downloaded. A model that needs values runs with random ones if it is small. Takes some minutes.

    python -m tools.list_models
"""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from timm.models import model_entrypoint
from torch import nn

from vitflow import record_attention
from vitflow.errors import NoAttentionError, UnsupportedModelError
from vitflow.progress import tracking
from vitflow.recording.attention_kinds import is_difference, other_attention_in, refusal_in_words

PAGE = Path(__file__).resolve().parent.parent / "docs" / "model-list.md"
# Two blocks, or two in each of four stages, are representative where a model takes these options, except in files whose
# later blocks are of another kind.
SHORT = ({"depth": 2}, {"depths": (2, 2, 2, 2)})
WHOLE = ("convit", "visformer")
# Maximum number of parameters of models that run with values if they do not run without.
SMALL = 50_000_000


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
        with suppress(Exception):  # not buildable with these options, or values are required
            with torch.device("meta"):
                model = timm.create_model(name, **options)
            return support_in(model.eval(), "meta")
    with suppress(Exception):
        if sum(weight.numel() for weight in model.parameters()) <= SMALL:
            return support_in(timm.create_model(name).eval(), "cpu")
    return Support("unknown", "unknown", "not run")


def support_in(model: nn.Module, device: str) -> Support:
    """Determine the support of a model by running it once."""
    try:
        with torch.no_grad(), record_attention(model, head_fusion="mean") as trace:
            model(torch.zeros(1, *model.pretrained_cfg["input_size"], device=device))
    except NoAttentionError:
        return Support("no", "no", other_attention_in(model) or "no attention between tokens")
    except UnsupportedModelError:
        if any(map(is_difference, model.modules())):
            return Support("no", "no", "difference of two attention matrices")
        raise
    if trace.refusal is not None:
        return Support(
            "no",
            "no",
            refusal_in_words(model, [layer.name for layer in trace.layers])
            or "its windows cannot be mapped to the image",
        )
    return Support("by stages", "no") if trace.staged else Support("yes", "yes")


def grouped(names: Sequence[str]) -> dict[tuple[str, Support], list[str]]:
    """Return the architectures by their file of timm and their support."""
    groups: dict[tuple[str, Support], list[str]] = {}
    with tracking("models", len(names)) as done:
        for name in names:
            groups.setdefault((family_of(name), support_of(name)), []).append(name)
            done(1)
    return groups


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="*", help="architectures, with * as a wildcard")
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    names = sorted({name.partition(".")[0] for name in timm.list_pretrained(given.pattern)})
    groups = grouped(names)
    applied = sum(len(members) for (_, support), members in groups.items() if support.rollout in ("yes", "by stages"))
    rows = []
    for (family, (rollout, flow, reason)), members in sorted(groups.items()):
        rows.append(f"| `{family}` | {rollout} | {flow} | {reason} | {', '.join(map('`{}`'.format, members))} |")
    given.output.write_text(
        "\n".join(
            [
                "# Models of timm",
                "",
                f"The {len(names)} architectures of timm {timm.__version__} with pretrained weights, written by "
                "`python -m tools.list_models`. Rollout stands",
                f"for raw attention, gradient rollout and GAE, too, and applies to {applied}; "
                "*by stages*: through windows and stages to the finest patch grid. Grad-CAM,",
                "input gradient, occlusion and sampling support every model.",
                "",
                "| file of timm | rollout | flow | why not | architectures |",
                "|---|---|---|---|---|",
                *rows,
                "",
            ]
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
