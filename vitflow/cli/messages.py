"""Terminal output: messages on stderr, records on stdout, with control characters of foreign strings escaped."""

import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from vitflow.errors import ModelError, OptionError, VitflowError, VitflowWarning, printable, printable_json
from vitflow.explaining.progress import shown_by


def say(text: object) -> None:
    """Print lines on stderr, with terminal control characters escaped."""
    click.echo(printable(str(text), lines=True), err=True)


def say_record(record: Any) -> None:
    """Print one line of JSON on stdout; strings survive a round trip."""
    click.echo(printable_json(json.dumps(record, ensure_ascii=False, allow_nan=False)))


def say_written(output: Path, records: Iterable[Mapping[str, Any]] | None) -> None:
    """Print the path of a command's only output file, or the records, each with that path."""
    if records is None:
        click.echo(printable(output))
    for record in records or ():
        say_record({**record, "output": str(output)})


@contextmanager
def reporting() -> Iterator[None]:
    """Turn errors into one line and an exit code, and warnings into lines on stderr."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        line = f"{'note' if issubclass(category, VitflowWarning) else 'warning'}: {message}"
        kind = re.sub(r"\d+(\.\d+)?", "0", line)  # the same message for several images differs in numbers only
        if not counts[kind]:
            say(line)
            first[kind] = line
        counts[kind] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", VitflowWarning)
        warnings.showwarning = show
        try:
            with shown_by(_progress_bar):
                yield
            for kind, count in counts.items():
                if count > 1:
                    start = first[kind] if len(first[kind]) < 60 else f"{first[kind][:57]}…"
                    say(f"{start} (printed once, occurred {count} times)")
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


def say_model_note(explainer: Any) -> None:
    """Print the note for readers that the model carries."""
    say_note_of(explainer.model_id, explainer.facts.note)


def say_note_of(model: str, note: str) -> None:
    """Print a model's note under its name."""
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
    """Yield a callback that shows images per second, the time left, the current file and failures, on stderr."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """Progress bar that shows its speed in images."""

        @property
        def format_dict(self) -> dict[str, Any]:
            fields: dict[str, Any] = super().format_dict
            done, elapsed = fields["n"] - fields["initial"], fields["elapsed"]
            pace = done / elapsed if elapsed else 0.0
            words = f"{pace:.1f} images/s" if pace >= 1 else f"{1 / pace:.1f} s/image" if pace else "starting"
            return fields | {"pace": words, "whole": int(fields["n"])}

    bar: Any = None

    def show(state: Any) -> None:
        nonlocal bar
        if bar is None:
            bar = Bar(
                total=state.total,
                initial=state.done,
                dynamic_ncols=True,
                file=sys.stderr,
                disable=None,  # no bar if stderr is a file
                mininterval=0.2,
                smoothing=0,
                bar_format="{percentage:3.0f} %|{bar}| {whole}/{total} images, {elapsed} passed, {remaining} left, "
                "{pace}{postfix}",
            )
        if state.row is not None:
            name = printable(state.row["input"])
            bar.set_postfix_str(name[-40:], refresh=False)
            if state.row["status"] == "failed":
                bar.write(f"error: {_failure(name, state.row)}", file=sys.stderr)
        bar.update(max(state.done + state.under_way - bar.n, 0))

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def _failure(name: str, row: Mapping[str, Any]) -> str:
    """Return the error message of an image, with its name once."""
    message = f"{row['error']}: {row['message']}"
    return message if name in message else f"{name}: {message}"
