"""`vitflow explain`: one method over one or several images."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.explainer import make_explainer
from vitflow.cli.output import (
    CannotWrite,
    check_images,
    names_folder,
    output_file,
    say,
    say_model_note,
    say_notes,
    say_record,
    writing,
)
from vitflow.errors import ImageError, OptionError, printable
from vitflow.images import CLIP_FORMATS, FIGURE_FORMATS, VIDEO_FORMATS, WRITE_OPTIONS
from vitflow.models.classes import is_several
from vitflow.registry.choices import choose_methods

# Bytes of the ending of a default file name, which contains the requested classes.
_LONGEST_ENDING = 100


@click.command(short_help="Draw one method's saliency map over images.", panel="Images")
@shared.images_argument
@shared.model_options
@shared.classes_option(help="Class to explain, INDEX from 0; repeatable.  [default: the predicted class]")
@shared.against_option
@shared.question_options
@shared.method_option(help="Method; `vitflow methods` lists them.")
@shared.method_options
@shared.drawing_options
@shared.same_scale_option
@shared.output_option(help="File for one image, folder for several.  [default: IMAGE-METHOD-CLASS.png here]")
@shared.option("", "--figure", bool, "Write a figure with method, target and colour bar; also .pdf or .svg.")
@shared.option("", "--save-map", bool, "Also write the unscaled map as .npz.")
@shared.option("", "--blank", bool, "Also report the score of the image replaced by its mean colour.")
@shared.json_option
@shared.option(
    "Video",
    "--frames",
    1,
    f"Number of frames, evenly spaced ({', '.join(VIDEO_FORMATS)}).  [default: 8, or the video model's]",
)
def explain(images: tuple[Path, ...], **given: Any) -> None:
    """Draw a saliency map over each IMAGE, or over frames of a video.

    \b
    vitflow explain cat.jpg --class tabby --figure -o cat.png
    """
    options = shared.method_values(given)
    named = given["method"]
    # before torch is loaded
    given["method"] = choose_methods(named and [named], options, has_target=shared.has_target(given))[0].name
    strip = _is_strip(given)
    suffixes = FIGURE_FORMATS if given["figure"] or strip else (*WRITE_OPTIONS, ".npy")
    if any(image.suffix.lower() in VIDEO_FORMATS for image in images):
        if len(images) > 1 or strip or given["against"] or given["save_map"] or given["blank"]:
            raise OptionError(
                "A video requires a single input and a single class, without --against, --save-map and --blank."
            )
        suffixes = CLIP_FORMATS
    elif given["frames"]:
        raise OptionError(f"--frames requires a video ({', '.join(VIDEO_FORMATS)}).")
    if given["blank"] and (strip or given["against"] or given["box"]):
        raise OptionError("--blank requires a single class, prompt or reference image, without --against and --box.")
    # maps of different classes must not overwrite each other
    targets = [*given["targets"], *(["against", given["against"]] if given["against"] else [])]
    outputs = _output_paths(images, given["output"], _ending(given["method"], *targets), suffixes)
    explainer = make_explainer(given)
    failed = sum(
        not _explained(explainer, image, output, options, given) for image, output in zip(images, outputs, strict=True)
    )
    if failed < len(images):
        if named is None:
            shared.say_default(given["method"])
        say_model_note(explainer.model_id, explainer.model_info.note)
    if failed:
        say(f"{len(images) - failed} explained, {failed} failed")
        sys.exit(1)


def _is_strip(given: Mapping[str, Any]) -> bool:
    """Return True if the output is a strip: several classes, prompts or reference images."""
    targets = given["targets"] or given["prompts"]
    if given["like"] or len(targets) != 1:
        return bool(given["like"]) or len(targets) > 1
    return is_several(targets[0])


def _maps(
    explainer: Any, image: Path, options: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any], Callable[..., Any]]:
    """Return the maps of an image, one for each class, their record, and the function that draws them."""
    if image.suffix.lower() in VIDEO_FORMATS:
        from vitflow.analysis.clips import explain_clip

        [target] = shared.targets_of(given)
        settings = {"method": given["method"], "target": target, "frames": given["frames"]}
        clip = explain_clip(image, model=explainer, **settings, **options)
        return [replace(clip.frames[clip.best], score=clip.score)], clip.to_dict(), clip.save
    arguments = {"methods": [given["method"]], "targets": shared.targets_of(given), **options}
    if not _is_strip(given):
        [saliency] = explainer.explain_batch([image], blank=given["blank"], **arguments)
        return [saliency], saliency.to_dict(), saliency.figure if given["figure"] else saliency.save
    from vitflow.analysis.comparison import compare

    strip = compare(image, model=explainer, **arguments)
    [record] = strip.records()
    return strip.saliencies, record, partial(strip.figure, same_scale=bool(given["same_scale"]))


def _explained(explainer: Any, image: Path, output: Path, options: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Explain one image and print the result; return False if it failed."""
    files = [output]
    try:
        saliencies, record, draw = _maps(explainer, image, options, given)
        with writing(output):
            draw(output, **shared.drawing_values(given))
        for saliency, entry in zip(saliencies, record.get("maps", [record]), strict=True):
            if given["save_map"]:
                indices = saliency.score.sides or (saliency.score.index,)
                ending = f"-{'-against-'.join(map(str, indices))}" if len(saliencies) > 1 else ""
                files.append(output.with_name(f"{output.stem}{ending}.npz"))
                entry["map"] = str(files[-1])
                with writing(files[-1]):
                    saliency.save(files[-1])
    except (ImageError, CannotWrite) as error:
        name = "" if isinstance(error, CannotWrite) or image.name in str(error) else f"{printable(image)}: "
        say(f"error: {name}{error}")
        return False
    say_notes(saliencies)
    for saliency in saliencies:
        say(f"{printable(image)}: {_prediction(saliency, explainer.class_names)}")
    if given["as_json"]:
        say_record(record | {"output": str(output)})
    else:
        for file in files:
            click.echo(printable(file))
    return True


def _prediction(saliency: Any, class_names: list[str] | None) -> str:
    """Describe the target of a map and its score."""
    score = saliency.score
    if score.sides:
        return f"{score.name}, {score.display}"
    if score.index is None:
        return f"{saliency.method} (the model has no classes)"
    text = f"{score.name} ({score.index}), {score.display}" if score.named else f"{score.name}, {score.display}"
    if not saliency.class_specific:
        from vitflow.explaining.captions import method_label

        label = method_label(saliency.method, saliency.options, class_specific=False)
        text = f"{label}; {'predicted: ' if score.is_predicted else ''}{text}"
    if not score.is_predicted:
        names = class_names and f"{class_names[score.predicted]} ({score.predicted})"
        text += f"; predicted: {names or f'class {score.predicted}'}"
    if against := saliency.facts.get("against"):
        text += f"; map of the score minus {against}"
    if blank := saliency.facts.get("blank"):
        text += f"; {blank['display']} for a blank image"
    return text


def _ending(*parts: object) -> str:
    """Return the ending of a default file name, from the method and the requested classes.

    >>> _ending("gae", "tabby cat", 3), len(_ending("gae", "猫" * 99).encode())
    ('gae-tabby-cat-3', 100)
    """
    joined = re.sub(r"[^\w.-]+", "-", "-".join(map(str, parts)))
    return joined.encode()[:_LONGEST_ENDING].decode(errors="ignore")


def _output_paths(images: Sequence[Path], output: str | None, kind: str, suffixes: Sequence[str]) -> list[Path]:
    """Return a separate path for each overlay, none of which overwrites an input image."""
    if len(images) > 1 and output is not None and not names_folder(output):
        raise OptionError(f"Expected a folder for {len(images)} images, got the file name {output!r}.")
    paths: list[Path] = []
    taken = set[str]()
    for image in images:
        path, number = output_file([image], output, kind, suffixes), 2
        while path.name.lower() in taken:  # some file systems ignore case
            path, number = path.with_name(f"{image.stem}-{number}-{kind}{path.suffix}"), number + 1
        taken.add(path.name.lower())
        paths.append(path)
    check_images(images, paths)
    return paths
