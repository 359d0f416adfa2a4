"""`vitflow compare`, `layers`, `features` and `explore`: figures and an interactive page of several maps."""

import re
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.explainer import make_explainer
from vitflow.cli.output import output_file, save_result, say, say_model_note, say_notes, writing
from vitflow.errors import OptionError, printable
from vitflow.registry.choices import DEFAULT_METHODS, check_methods, choose_methods, default_method, split_label
from vitflow.registry.method_table import get_method
from vitflow.registry.options import OPTIONS


class MethodWithOptions(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """NAME or NAME:OPTION=VALUE,…, with values parsed as on the command line; or one of the words."""

    def __init__(self, *words: str) -> None:
        self._words, self.name = words, "|".join(("NAME[:OPTION=VALUE,…]", *words))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the method's name and options, or a word; a usage error if either is unknown."""
        if isinstance(value, tuple) or value in self._words:
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
            get_method(name).complete(dict.fromkeys(options))  # the names alone; values are still text
            return name, {key: OPTIONS[key].read(text) for key, text in options.items()}
        except OptionError as error:
            self.fail(str(error), param, ctx)


@click.command(short_help="Show several methods side by side.", panel="Images")
@shared.images_argument
@shared.model_options
@shared.classes_option(help="Class to explain, INDEX from 0; repeat it for more rows.  [default: the predicted class]")
@shared.against_option
@shared.question_options
@shared.methods_option(
    "Method to show, optionally with options: rollout:head_fusion=max,discard_ratio=0.9; repeatable.  "
    "[default: all fast methods and two baselines]",
    MethodWithOptions(),
)
@shared.method_options
@shared.drawing_options
@shared.same_scale_option
@shared.figure_option("strip", "compare")
@shared.json_option
def compare(images: tuple[Path, ...], **given: Any) -> None:
    """Draw the maps of several methods over each IMAGE side by side; --json has their agreement."""
    options = shared.method_values(given)
    output = output_file(images, given["output"], "compare")
    methods = given["methods"] or None
    check_methods(methods or DEFAULT_METHODS, options)  # before torch is loaded
    explainer = make_explainer(given)
    from vitflow.analysis.comparison import compare

    comparison = compare(images, model=explainer, methods=methods, targets=shared.targets_of(given), **options)
    drawing = shared.drawing_values(given) | shared.given_options(given, ["same_scale"])
    save_result(comparison, output, drawing, given["as_json"], explainer)
    say_notes(comparison.saliencies)


@click.command(short_help="Show a map layer by layer, and the heads of one layer.", panel="Images")
@shared.image_argument
@shared.model_options
@shared.class_option(
    metavar="NAME|INDEX", help="Class to explain and report, INDEX from 0.  [default: the predicted class]"
)
@shared.question_options
@shared.method_option(help="Method to accumulate: rollout, gradient_rollout or gae.")
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
    explainer = make_explainer(given)
    from vitflow.analysis.layers import layer_maps

    maps = layer_maps(image, model=explainer, method=given["method"], layer=layer, target=given["target"], **options)
    if given["method"] is None:
        shared.say_default(method)
    save_result(maps, output, shared.drawing_values(given), given["as_json"], explainer)


@click.command(short_help="Show three principal components of patch features as colours.", panel="Images")
@shared.images_argument
@shared.model_options
@shared.option("Method", "--layer of_layer", int, "Layer, counted from 1; -1: the last.", default=-1, metavar="N≥1|-1")
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
    explainer = make_explainer(given)
    from vitflow.analysis.layers import feature_maps

    components = feature_maps(list(images), model=explainer, layer=given["of_layer"], foreground=given["foreground"])
    drawing = shared.given_options(given, ("alpha", "interpolation"))
    save_result(components, output, drawing, given["as_json"], explainer)
    say(components.summary)


@click.command(panel="Images")
@shared.images_argument
@shared.model_options
@shared.classes_option(help="Class for class-specific maps; repeatable.  [default: top3]")
@shared.question_options
@shared.methods_option(
    "Map to compute in advance, in addition to those that the page computes; repeatable.  [default: the "
    "class-specific methods and flow, if the model supports them]"
)
@shared.option(
    "",
    "--max-size",
    click.FloatRange(min=0, min_open=True),
    "Maximum size of the page. Data that does not fit is left out, single heads first; the page reports it.",
    default=40.0,
    metavar="MB",
)
@shared.option(
    "",
    "--deletion/--no-deletion",
    None,
    "Run the model while the highest patches of the GAE maps are removed, and show whether the class's score falls.",
    default=True,
)
@shared.output_option(
    help="The page, .html; or a folder.  [default: IMAGE-explore.html here; of several, IMAGE-and-N-more-explore.html]"
)
def explore(images: tuple[Path, ...], **given: Any) -> None:
    """Write an interactive page: click a patch of an IMAGE to see its attention.

    Rollout or raw attention through any of the layers, computed in the browser without a server or network.
    """
    output = output_file(images, given["output"], "explore", (".html",))
    methods = list(given["methods"]) or None
    choose_methods(methods or ["rollout"], {})  # before torch is loaded
    explainer = make_explainer(given)
    from vitflow.analysis.exploring import explore

    page = explore(
        list(images),
        model=explainer,
        methods=methods,
        targets=list(given["targets"] or given["prompts"]) or "top3",
        max_size=given["max_size"],
        deletion=given["deletion"],
        call=_call(given),
    )
    with writing(output):
        page.save(output)
    say_model_note(explainer.model_id, explainer.model_info.note)
    click.echo(printable(output))


def _call(given: dict[str, Any]) -> Any:
    """Return the command and Python call that load the model of these options."""
    from vitflow.explaining.captions import python_call
    from vitflow.viewer.explorer import ModelCall

    model, native = given["model"] or shared.DEFAULT_MODEL, given["fit"] == "native"
    fit = None if given["fit"] == "crop" else given["fit"]
    loading = shared.given_options(given, ("checkpoint", "num_classes", "global_pool", "class_names"))
    loading = {name: str(value) if isinstance(value, Path) else value for name, value in loading.items()}
    question = {name: list(map(str, given[name])) for name in ("prompts", "templates", "like") if given[name]}
    arguments = ["--model", model]
    for name, values in {**{name: [value] for name, value in loading.items()}, **question}.items():
        flag = shared.flag_of(name.removesuffix("s") if name in question else name)
        arguments += [word for value in values for word in (flag, str(value))]
    arguments += [*(["--raw"] if given["raw"] else []), *(["--fit", fit] if fit else [])]
    loaded = python_call("vitflow.load_model", model, **loading, dynamic_img_size=native)
    outputs = None
    if prompts := question.pop("prompts", None):
        outputs = python_call("vitflow.prompts", prompts, **question, raw=given["raw"])
    elif question:
        outputs = python_call("vitflow.similarity_to", question["like"])
    built = python_call("vitflow.Explainer", loaded if loading or native else model, outputs=outputs, fit=fit)
    return ModelCall(arguments, built)
