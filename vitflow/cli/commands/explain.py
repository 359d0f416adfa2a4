"""`vitflow explain`: one method over one or several images."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.outputs import CannotWrite, check_images, check_suffix, names_folder, writing
from vitflow.cli.saying import say, say_model_note, say_notes, say_record
from vitflow.errors import ImageError, OptionError, printable
from vitflow.explaining.choices import choose_methods
from vitflow.images import FIGURE_FORMATS, WRITE_OPTIONS


@click.command(short_help="Lay one method's map over images.", panel="Images")
@shared.images_argument
@shared.model_options
@shared.question_options
@shared.method_option(help="What to compute; `vitflow methods` lists the choices.")
@shared.classes_option(
    help="Class to explain and report; repeat it for a strip of one map each.  [default: the predicted class]"
)
@shared.against_option
@shared.method_options
@shared.drawing_options
@shared.same_scale_option
@shared.output_option(help="File for one image, folder for several.  [default: here]")
@click.option(
    "--figure",
    is_flag=True,
    help="Write a figure that stands alone: the overlay with its method, what was asked, and a colour bar; also as "
    ".pdf or .svg.",
)
@click.option("--save-map", is_flag=True, help="Write the unscaled map as .npz beside the overlay.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per image.")
def explain(images: tuple[Path, ...], **given: Any) -> None:
    """Lay a saliency map over each IMAGE."""
    options = shared.method_values(given)
    named = given["method"]
    # before torch is loaded
    given["method"] = choose_methods(named and [named], options, asks=shared.asks(given))[0].name
    suffixes = FIGURE_FORMATS if given["figure"] or _asks_several(given) else tuple(WRITE_OPTIONS)
    outputs = _output_paths(images, given["output"], given["method"], suffixes)
    explainer = shared.make_explainer(given)
    failed = sum(
        not _explained(explainer, image, output, options, given) for image, output in zip(images, outputs, strict=True)
    )
    if failed < len(images):
        if named is None:
            shared.say_default(given["method"])
        say_model_note(explainer)
    if failed:
        say(f"{len(images) - failed} explained, {failed} failed")
        sys.exit(1)


def _asks_several(given: Mapping[str, Any]) -> bool:
    """Whether a strip is shown: of several classes, by their names or as in top3, or beside what an image is like."""
    targets = given["targets"] or given["prompts"]
    if given["like"] or len(targets) != 1:
        return bool(given["like"]) or len(targets) > 1
    from vitflow.explaining.targets import is_several

    return is_several(targets[0])


def _maps(
    explainer: Any, image: Path, options: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any], Callable[..., Any]]:
    """The maps of an image, one for each class; their record, and what draws them."""
    asked = {"methods": [given["method"]], "targets": shared.targets_of(given), **options}
    if not _asks_several(given):
        [saliency] = explainer.explain_batch([image], **asked)
        return [saliency], saliency.to_dict(), saliency.figure if given["figure"] else saliency.save
    from vitflow.explaining.comparison import compare

    found = compare(image, model=explainer, **asked)
    [record] = found.records()
    return found.saliencies, record, partial(found.figure, same_scale=bool(given["same_scale"]))


def _explained(explainer: Any, image: Path, output: Path, options: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Explain one image and say so; whether it worked."""
    files = [output]
    try:
        saliencies, record, draw = _maps(explainer, image, options, given)
        with writing(output):
            draw(output, **shared.drawing_values(given))
        for saliency, own in zip(saliencies, record.get("maps", [record]), strict=True):
            if given["save_map"]:
                files.append(_map_file(output, saliency.score, len(saliencies)))
                own["map"] = str(files[-1])
                with writing(files[-1]):
                    saliency.save(files[-1])
    except (ImageError, CannotWrite) as error:
        named = "" if isinstance(error, CannotWrite) or image.name in str(error) else f"{printable(image)}: "
        say(f"error: {named}{error}")
        return False
    say_notes(saliencies)
    several = "maps" in record
    for saliency in saliencies:
        say(f"{printable(image)}: {_answer(saliency, explainer.class_names, several)}")
    if given["as_json"]:
        say_record(record | {"output": str(output)})
    else:
        for file in files:
            click.echo(printable(file))
    return True


def _map_file(output: Path, answer: Any, maps: int) -> Path:
    """Where a map goes: beside the overlay, or the strip of several, of which each has the number of its class."""
    numbers = answer.sides or (answer.index,)
    return output.with_name(
        f"{output.stem}-{'-against-'.join(map(str, numbers))}.npz" if maps > 1 else f"{output.stem}.npz"
    )


def _answer(saliency: Any, class_names: list[str] | None, several: bool) -> str:
    """What the model said of an image, in words; whether several classes were asked for."""
    answer = saliency.score
    if answer.sides:
        return f"{answer.name}, {answer.display}"
    if answer.index is None:
        return f"{saliency.method} (the model has no classes)"
    words = f"{answer.name} ({answer.index}), {answer.display}"
    if not answer.is_predicted:
        name = class_names[answer.predicted] if class_names else "class"
        words += f"; predicted: {name} ({answer.predicted})"
    if not saliency.class_specific and (several or not answer.is_predicted):
        words += f"; {saliency.method} does not depend on the class"
    return words


def _output_paths(images: tuple[Path, ...], asked: str | None, method: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Where each overlay goes: no two images claim one file, and none overwrites an image that is read."""
    output, is_folder = None if asked is None else Path(asked), asked is None or names_folder(asked)
    if output is not None and output.suffix.lower() in suffixes and not is_folder:
        if len(images) > 1:
            raise OptionError(f"Expected a folder for {len(images)} images, got the file name {str(output)!r}.")
        paths = [output]
    else:
        if output is not None and output.suffix and not is_folder:
            check_suffix(output, suffixes, ", or a folder (with / at its end, where its name has a dot)")
        folder, taken, paths = output or Path(), set[str](), []
        for image in images:
            stem, number = f"{image.stem}-{method}", 2
            while stem.lower() in taken:  # some file systems do not tell upper from lower case
                stem, number = f"{image.stem}-{number}-{method}", number + 1
            taken.add(stem.lower())
            paths.append(folder / f"{stem}.png")
    check_images(images, paths)
    return paths
