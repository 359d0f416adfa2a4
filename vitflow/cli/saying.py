"""What the commands print: talk on stderr and records on stdout, whatever strings of others stand in them."""

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
    """Print lines on stderr; what a terminal would take for a command becomes escapes."""
    click.echo(printable(str(text), lines=True), err=True)


def say_record(record: Any) -> None:
    """Print one line of JSON on stdout, from which a parser gets back the very strings."""
    click.echo(printable_json(json.dumps(record, ensure_ascii=False, allow_nan=False)))


def say_written(output: Path, records: Iterable[Mapping[str, Any]] | None) -> None:
    """Print where a command wrote its one file; or records, each with that."""
    if records is None:
        click.echo(printable(output))
    for record in records or ():
        say_record({**record, "output": str(output)})


@contextmanager
def talking() -> Iterator[None]:
    """Turn errors into one line and an exit code, and warnings into lines on stderr."""
    told: Counter[str] = Counter()
    first: dict[str, str] = {}

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        line = f"{'note' if issubclass(category, VitflowWarning) else 'warning'}: {message}"
        kind = re.sub(r"\d+(\.\d+)?", "0", line)  # the same of other images, whatever its numbers are
        if not told[kind]:
            say(line)
            first[kind] = line
        told[kind] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", VitflowWarning)
        warnings.showwarning = show
        try:
            with shown_by(_progress_bar):
                yield
            for kind, count in told.items():
                if count > 1:
                    start = first[kind] if len(first[kind]) < 60 else f"{first[kind][:57]}…"
                    say(f"{start} (told once, it came up {count} times)")
        except VitflowError as error:
            say(f"error: {error}")
            sys.exit(2 if isinstance(error, OptionError | ModelError) else 1)


@contextmanager
def _progress_bar(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr for what takes longer than a moment, on terminals only."""
    from tqdm import tqdm

    with tqdm(total=total, desc=label, delay=2, leave=False, disable=None) as bar:
        yield bar.update


def say_notes(saliencies: Iterable[Any]) -> None:
    """Say what a reader of these maps should bear in mind, each class of an image once."""
    noted = (one for one in saliencies if "note" in one.facts)
    for note in dict.fromkeys(f"{printable(one.source)}, {one.label}: {one.facts['note']}." for one in noted):
        say(f"note: {note}")


def say_model_note(explainer: Any) -> None:
    """Print the note for readers that the model carries."""
    say_note_of(explainer.model_id, explainer.facts.note)


def say_note_of(model: str, note: str) -> None:
    """The same for a model by its name."""
    if note:
        say(f"model: {model} {note}")


@contextmanager
def going_on(kept: bool) -> Iterator[None]:
    """Say on Ctrl-C how a run goes on, and end with its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        done = "what was done is kept; the same command goes on from there"
        say(f"interrupted: {done if kept else 'nothing is kept; with -o FOLDER a run can be gone on with'}")
        sys.exit(130)


@contextmanager
def images_bar() -> Iterator[Any]:
    """A callback that shows images per second, the time left, the current file and what failed, on stderr."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """A bar that tells its pace in words."""

        @property
        def format_dict(self) -> dict[str, Any]:
            found: dict[str, Any] = super().format_dict
            done, elapsed = found["n"] - found["initial"], found["elapsed"]
            pace = done / elapsed if elapsed else 0.0
            words = f"{pace:.1f} images/s" if pace >= 1 else f"{1 / pace:.1f} s/image" if pace else "starting"
            return found | {"pace": words, "whole": int(found["n"])}

    bar: Any = None

    def show(state: Any) -> None:
        nonlocal bar
        if bar is None:
            bar = Bar(
                total=state.total,
                initial=state.done,
                dynamic_ncols=True,
                file=sys.stderr,
                disable=None,  # none into a file
                mininterval=0.2,
                smoothing=0,
                bar_format="{percentage:3.0f} %|{bar}| {whole}/{total} images, {elapsed} passed, {remaining} left, "
                "{pace}{postfix}",
            )
        if state.row is not None:
            name = printable(state.row["input"])
            bar.set_postfix_str(name[-40:], refresh=False)
            if state.row["status"] == "failed":
                bar.write(f"error: {_told(name, state.row)}", file=sys.stderr)
        bar.update(max(state.done + state.under_way - bar.n, 0))

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def _told(name: str, row: Mapping[str, Any]) -> str:
    """What is wrong with an image, its name told once."""
    message = f"{row['error']}: {row['message']}"
    return message if name in message else f"{name}: {message}"
