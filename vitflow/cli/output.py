"""Output of commands: messages on stderr, records on stdout, and files.

Control characters of foreign strings are escaped.
"""

import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from vitflow.errors import ModelError, OptionError, VitflowError, VitflowWarning, printable
from vitflow.files import is_folder
from vitflow.images import FIGURE_FORMATS
from vitflow.progress import shown_by

# Seconds of a run whose expected duration is printed.
_LONG = 90.0
# Number of different notes on maps that are printed after a run.
_NOTES = 3


def say(text: object) -> None:
    """Print lines on stderr, with terminal control characters escaped."""
    click.echo(printable(str(text), lines=True), err=True)


def say_record(record: Any) -> None:
    """Print one line of JSON on stdout; strings survive a round trip."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    if printable(text) != text:
        text = json.dumps(record, allow_nan=False).replace("\x7f", "\\u007f")
    click.echo(text)


@contextmanager
def reporting() -> Iterator[None]:
    """Turn errors into one line and an exit code, and warnings into lines on stderr, each printed once."""
    shown = set[str]()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        line = f"{'note' if issubclass(category, VitflowWarning) else 'warning'}: {message}"
        kind = re.sub(r"\d+(\.\d+)?", "0", line)  # the same message for several images differs in numbers only
        if kind not in shown:
            say(line)
        shown.add(kind)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", VitflowWarning)
        warnings.showwarning = show
        try:
            with shown_by(_progress_bar):
                yield
        except VitflowError as error:
            say(f"error: {error}")
            sys.exit(2 if isinstance(error, OptionError | ModelError) else 1)


@contextmanager
def _progress_bar(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Progress bar on stderr for tasks of more than two seconds, on terminals only."""
    from tqdm import tqdm

    with tqdm(total=total, desc=label, delay=2, leave=False, disable=None) as bar:
        yield bar.update


def say_notes(saliencies: Iterable[Any]) -> None:
    """Print the notes of maps, once for each class of an image."""
    noted = (saliency for saliency in saliencies if "note" in saliency.facts)
    for note in dict.fromkeys(f"{printable(each.source)}, {each.label}: {each.facts['note']}." for each in noted):
        say(f"note: {note}")


def say_model_note(model: str, note: str) -> None:
    """Print the note for readers that a model carries."""
    if note:
        say(f"model: {model} {note}")


@contextmanager
def resumable(kept: bool) -> Iterator[None]:
    """Print on Ctrl-C how to resume the run, and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        saved = "finished images are saved; repeat the command to resume"
        say(f"interrupted: {saved if kept else 'nothing was saved; use -o FOLDER to make the run resumable'}")
        sys.exit(130)


@contextmanager
def images_bar() -> Iterator[Any]:
    """Yield a callback that shows images per second, the time left, the current file and failures, on stderr.

    Notes on maps are counted and printed at the end.
    """
    from tqdm import tqdm

    bar: Any = None
    notes: Counter[str] = Counter()
    announced = False

    def show(state: Any) -> None:
        nonlocal bar, announced
        if bar is None:
            bar = tqdm(
                total=state.total,
                initial=state.done,
                dynamic_ncols=True,
                file=sys.stderr,
                disable=None,  # no bar if stderr is a file
                mininterval=0.2,
                smoothing=0,
                unit="image",
                bar_format="{percentage:3.0f} %|{bar}| {n:.0f}/{total} images, {elapsed} passed, {remaining} left, "
                "{rate_fmt}{postfix}",
            )
        if state.row is not None:
            name = printable(state.row["input"])
            bar.set_postfix_str(name[-40:], refresh=False)
            notes.update(facts["note"] for facts in state.row.get("facts", {}).values() if "note" in facts)
            if state.row["status"] == "failed":
                kind, message = state.row["error"], printable(state.row["message"])
                bar.write(f"error: {message if name in message else f'{name}: {kind}: {message}'}", file=sys.stderr)
        if not announced and (state.seconds or 0.0) > _LONG:
            announced = True
            bar.write(f"note: about {state.seconds / 60:.0f} min in all, from the first image", file=sys.stderr)
        bar.update(max(state.done + state.under_way - bar.n, 0))

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
        for note, count in notes.most_common(_NOTES):
            say(f"note: {count} {'map' if count == 1 else 'maps'}: {note}")


class CannotWrite(VitflowError):
    """An output file cannot be written."""


@contextmanager
def writing(path: Path, flag: str = "-o") -> Iterator[None]:
    """Turn an OSError into a CannotWrite error that names the output path, not the temporary file."""
    try:
        yield
    except OSError as error:
        words = f"Cannot write {printable(path)}: {error.strerror or error}. Choose another place with {flag}."
        raise CannotWrite(words) from error


def check_images(images: Sequence[Path], outputs: Iterable[Path]) -> None:
    """Raise OptionError if an image is a folder, or if an output would overwrite an image."""
    for image in filter(is_folder, images):
        command, name = click.get_current_context().info_name, printable(image)
        raise OptionError(
            f"Expected images, got the folder {name}: use vitflow folder {name} -o OUTPUT for every image of a folder; "
            f"vitflow {command} takes image files."
        )
    read = {image.resolve() for image in images}
    for output in outputs:
        if output.resolve() in read:
            raise OptionError(f"The output would overwrite the image {str(output)!r}: choose another output.")


def output_file(
    images: Sequence[Path], output: str | None, kind: str, suffixes: Sequence[str] = (*FIGURE_FORMATS, ".json")
) -> Path:
    """Return the checked path of the output file of images: by default "IMAGE-KIND" with the first suffix, here."""
    others = f"-and-{len(images) - 1}-more" if len(images) > 1 else ""
    path = Path(output or "")
    if output is None or names_folder(output):
        path /= f"{images[0].stem}{others}-{kind}{suffixes[0]}"
    else:
        check_suffix(path, suffixes, ", or a folder (ending in / if its name has a dot)")
    check_images(images, [path])
    return path


def names_folder(output: str) -> bool:
    """Return True if an output is a folder, ends in a separator, or has no suffix."""
    return output.endswith(("/", os.sep)) or not Path(output).suffix or is_folder(output)


def check_suffix(output: Path, suffixes: Sequence[str], more: str = "") -> None:
    """Raise OptionError if an output has none of these suffixes."""
    if output.suffix.lower() not in suffixes:
        figure = " --figure writes .pdf and .svg." if ".npy" in suffixes and output.suffix in FIGURE_FORMATS else ""
        raise OptionError(f"Expected an output that ends in {', '.join(suffixes)}{more}, got {str(output)!r}.{figure}")


def save_result(result: Any, output: Path, drawing: Mapping[str, Any], as_json: bool, explainer: Any) -> None:
    """Write the only output file of a command, and print its path, or with `as_json` its records, one per image."""
    with writing(output):
        result.save(output, **({} if output.suffix.lower() == ".json" else drawing))
    for record in result.records() if as_json else ():
        say_record({**record, "output": str(output)})
    if not as_json:
        click.echo(printable(output))
    say_model_note(explainer.model_id, explainer.model_info.note)
