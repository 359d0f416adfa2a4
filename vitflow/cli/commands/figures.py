"""`vitflow compare`, `vitflow layers` and `vitflow features`: figures of several maps."""

import re
from pathlib import Path
from typing import Any

import rich_click as click
from click.types import convert_type

from vitflow.cli import options as shared
from vitflow.cli.output import output_file, save_result, say, say_notes
from vitflow.errors import OptionError
from vitflow.registry.choices import check_methods, choose_methods, default_method
from vitflow.registry.method_table import DEFAULT_METHODS, get_method, split_label
from vitflow.registry.options import OPTIONS


class MethodWithOptions(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """NAME or NAME:OPTION=VALUE,…, with values parsed as on the command line."""

    name = "NAME[:OPTION=VALUE,…]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, dict[str, Any]]:
        """Return the method's name and options; a usage error if either is unknown."""
        if isinstance(value, tuple):
            return value
        name, listed = split_label(str(value))
        options: dict[str, Any] = {}
        # A comma separates options only if a name and "=" follow: a patch is written 3,7.
        for part in re.split(r",(?=[\w-]+=)", listed) if listed else []:
            key, equals, text = part.partition("=")
            if not equals:
                self.fail(f"expected OPTION=VALUE after {name}:, got {part!r}.", param, ctx)
            options[key.strip().replace("-", "_")] = text.strip()
        try:
            method = get_method(name)
            method.complete(dict.fromkeys(options))  # the names alone; values are still text
            for key, text in options.items():  # options of registered methods have the type of the default
                kind: Any = convert_type(None, method.defaults.get(key))
                options[key] = OPTIONS[key].read(text) if key in OPTIONS else kind.convert(text, param, ctx)
        except OptionError as error:
            self.fail(str(error), param, ctx)
        return name, options


@click.command(short_help="Show several methods side by side.", panel="Images")
@shared.images_argument
@shared.model_options
@shared.question_options
@shared.option(
    "Method",
    "--method methods",
    MethodWithOptions(),
    "Method to show, optionally with options: rollout:head_fusion=max,discard_ratio=0.9; repeatable.  "
    "[default: all fast methods and two baselines]",
    multiple=True,
)
@shared.classes_option(help="Class to explain; repeat it for more rows.  [default: the predicted class]")
@shared.against_option
@shared.method_options
@shared.drawing_options
@shared.same_scale_option
@shared.figure_option("strip", "compare")
@shared.json_option
def compare(images: tuple[Path, ...], **given: Any) -> None:
    """Draw the maps of several methods over each IMAGE side by side, and report their agreement."""
    options = shared.method_values(given)
    output = output_file(images, given["output"], "compare")
    methods = given["methods"] or None
    check_methods(methods or DEFAULT_METHODS, options)  # before torch is loaded
    from vitflow.analysis.comparison import compare

    explainer = shared.make_explainer(given)
    comparison = compare(images, model=explainer, methods=methods, targets=shared.targets_of(given), **options)
    drawing = shared.drawing_values(given) | shared.given_options(given, ["same_scale"])
    save_result(comparison, output, drawing, given["as_json"], explainer)
    say_notes(comparison.saliencies)
    say(str(comparison.agreement()))


@click.command(short_help="Show a map layer by layer, and the heads of one layer.", panel="Images")
@click.argument("image", metavar="IMAGE", type=click.Path(path_type=Path))
@shared.model_options
@shared.question_options
@shared.method_option(help="Method to accumulate: rollout, gradient_rollout or gae.")
@shared.class_option(metavar="NAME|INDEX", help="Class to explain and report.  [default: the predicted class]")
@shared.method_options
@shared.drawing_options
@shared.figure_option("sheet", "layers")
@shared.json_option
def layers(image: Path, **given: Any) -> None:
    """Show each layer's map of IMAGE, the accumulated map, and each head of one layer (--layer)."""
    options = shared.method_values(given)
    layer = options.pop("layer", -1)
    method = given["method"] or default_method(shared.has_target(given))
    choose_methods([method, "attention"], options)  # before torch is loaded
    output = output_file([image], given["output"], "layers")
    explainer = shared.make_explainer(given)
    from vitflow.analysis.layer_maps import layer_maps

    maps = layer_maps(image, model=explainer, method=given["method"], layer=layer, target=given["target"], **options)
    if given["method"] is None:
        shared.say_default(method)
    save_result(maps, output, shared.drawing_values(given), given["as_json"], explainer)


@click.command(short_help="Show three principal components of patch features as colours.", panel="Images")
@shared.images_argument
@shared.model_options
@shared.option(
    "Method",
    "--layer of_layer",
    int,
    "Layer of the features, counted from 1; -1 is the last.",
    default=-1,
    metavar="N≥1|-1",
)
@shared.option(
    "Method",
    "--foreground",
    bool,
    "Hide background patches: those on the side of the first component that covers more of the image border.",
)
@shared.drawing_option("alpha", "1")
@shared.drawing_option("interpolation")
@shared.figure_option("figure", "features")
@shared.json_option
def features(images: tuple[Path, ...], **given: Any) -> None:
    """Show the first three principal components of each IMAGE's patch features as colours.

    The components are computed over all images together, so that colours are comparable.
    """
    output = output_file(images, given["output"], "features")
    explainer = shared.make_explainer(given)
    from vitflow.analysis.features import feature_maps

    components = feature_maps(list(images), model=explainer, layer=given["of_layer"], foreground=given["foreground"])
    save_result(
        components, output, shared.given_options(given, ("alpha", "interpolation")), given["as_json"], explainer
    )
    say(repr(components))
