"""The explainer that the options of a command describe."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitflow.cli import options as shared
from vitflow.cli.output import say
from vitflow.errors import OptionError, printable
from vitflow.models.classes import class_index, imagenet_names, read_class_names, top_count

_WEIGHTS = (".bin", ".pt", ".pth", ".safetensors")


def check_before_loading(given: Mapping[str, Any]) -> None:
    """Raise OptionError, before torch is loaded, for a missing file of weights, and classes that are known to be wrong.

    The names of classes are those of --class-names, or ImageNet's for an id of timm whose weights are for it.
    """
    model = str(given["model"] or shared.DEFAULT_MODEL)
    if Path(model).suffix in _WEIGHTS and not Path(model).exists():
        raise OptionError(f"Expected --model as an id or an existing file, but {printable(model)} does not exist.")
    names = None
    if given["class_names"]:
        names = read_class_names(given["class_names"])
    elif model.endswith("in1k") and not (given["checkpoint"] or given["num_classes"]):
        names = imagenet_names(1000)
    others = given.get("prompts") or given.get("like") or given.get("box")
    for target in () if others else [*given.get("targets", ()), given.get("target"), given.get("against")]:
        if names and target != "rest" and top_count(target) is None:
            class_index(target, len(names), names)


def make_explainer(given: Mapping[str, Any]) -> Any:
    """Check and build the explainer that `model_options` and `question_options` describe."""
    check_before_loading(given)
    from vitflow.explaining.explainer import Explainer
    from vitflow.models.devices import default_device
    from vitflow.models.loading import load_model

    if given["model"] is None:
        say(f"model: {shared.DEFAULT_MODEL} (change with --model)")
    loading = shared.given_options(given, ("checkpoint", "num_classes", "class_names", "global_pool"))
    model = load_model(given["model"] or shared.DEFAULT_MODEL, dynamic_img_size=given["fit"] == "native", **loading)
    settings = shared.given_options(given, ("dtype", "fit", "name"))
    settings |= {"data_config": _data_config(given["data_config"]), "outputs": _outputs(given, model)}
    return Explainer(model, device=given["device"] or default_device(), **settings)


def _data_config(path: Path | None) -> Any:
    """Read the preprocessing of a model from a JSON file."""
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"Could not read --data-config {printable(path)} as JSON: {error}") from error


def _outputs(given: Mapping[str, Any], model: Any) -> Any:
    """Return the outputs that the options request; None for the model's classes."""
    from vitflow.explaining.image_model import similarity_to
    from vitflow.explaining.regions import about_region
    from vitflow.models.names import has_regions, is_segmenting
    from vitflow.models.pairs import prompts

    if given.get("prompts") and given.get("like"):
        raise OptionError("--prompt and --like cannot be used together.")
    named = None
    if given.get("prompts"):
        named = prompts(given["prompts"], templates=given["templates"] or None, raw=given["raw"])
    elif given.get("templates") or given.get("raw"):
        raise OptionError("--template and --raw require --prompt.")
    box = given["box"] if shared.is_about_box(given) else None
    if box is not None or (has_regions(model) and not given.get("like")):
        if given.get("like") or (named and is_segmenting(model)):
            raise OptionError("--box cannot be used with --like, and with --prompt for detectors only.")
        return about_region(model, box, prompts=named)
    return similarity_to(given["like"]) if given.get("like") else named
