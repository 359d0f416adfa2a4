"""`vitflow read`: what a word of a text rests on, or each word that a model writes."""

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.outputs import check_suffix, writing
from vitflow.cli.saying import say, say_record
from vitflow.errors import OptionError, printable
from vitflow.images import FIGURE_FORMATS
from vitflow.text.method_table import PLAIN, text_method

# What a text, or what was written, can be looked at as.
_VIEWS = ("text", "layers", "graph", "matrix")


@click.command(panel="Texts")
@click.argument("text", required=False)
@click.option("--prompt", panel="Text", help="Let the model write on from this text, and explain what it writes.")
@click.option(
    "--generate", panel="Text", type=click.IntRange(min=1), metavar="N", help="How many tokens to write.  [default: 20]"
)
@click.option(
    "--model",
    panel="Model",
    required=True,
    metavar="ID|PATH",
    help="transformers id, or a folder with model and tokenizer.",
)
@shared.language_model_options
@click.option(
    "--token",
    panel="Text",
    metavar="WORD|NUMBER",
    help="The word whose row to show, or its number (-1: the last token).  [default: the masked word, the last token "
    "of a decoder, else the class token]",
)
@shared.text_method_option(default=PLAIN, help="What to compute.")
@click.option(
    "--target",
    panel="Method",
    metavar="WORD|NUMBER",
    help="For gae, the word (one token) to explain.  [default: the likeliest]",
)
@shared.text_method_options
@click.option(
    "--view",
    type=click.Choice(_VIEWS),
    help="What to show and to draw.  [default: text; matrix with --prompt]",
)
@click.option("--hide-special", is_flag=True, help="Leave special tokens out of what is shown; told below.")
@click.option(
    "--hide-stop-words",
    metavar="english|FILE",
    help="Show these words without a shade; a file has one word per line. Told below.",
)
@click.option("--html", type=shared.NEW_FILE, help="Write a page whose words can be clicked.")
@click.option("--png", type=shared.NEW_FILE, help="Write the view as .png, .pdf or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all numbers instead of the view.")
def read(text: str | None, **given: Any) -> None:
    """Show what words rest on that a model reads or writes.

    \b
    vitflow read "The key to the cabinets is here" --model FOLDER --token is
    vitflow read --prompt "Once upon a time" --model ID --html story.html

    Unless asked otherwise, decoders are read without value weighting and relative to the receptive field, encoders
    value-weighted along the output.
    """
    options = shared.method_values(given)
    text_method(given["method"], options)  # before torch is loaded
    view = _check(text, given)
    hiding = {"special": not given["hide_special"], "stop_words": _stop_words(given["hide_stop_words"])}
    result = _compute(text, given, options)
    draw = partial(_drawn, result, view, given["prompt"] is not None, hiding)
    if (path := given["png"]) is not None:
        with writing(path, "--png"):
            draw().save(path)
    if (path := given["html"]) is not None:
        with writing(path, "--html"):
            result.page(**hiding).save(path)
    _print(result, draw, given)


def _check(text: str | None, given: Mapping[str, Any]) -> str:
    """Refuse what does not go together; returns the view."""
    if (text is None) == (given["prompt"] is None):
        got = "neither" if text is None else "both"
        raise OptionError(f"Expected a text to read, or --prompt with a text to write on from, got {got}: give one.")
    writes = text is None
    for name in ("token", "target") if writes else ("generate",):
        if given[name] is not None:
            other = "a text that is read: without --prompt" if writes else "--prompt"
            raise OptionError(f"--{name} is an option of {other}; got it {'with' if writes else 'without'} --prompt.")
    if given["png"] is not None:
        check_suffix(given["png"], FIGURE_FORMATS)
    view: str = given["view"] or ("matrix" if writes else "text")
    fitting = ("text", "matrix") if writes else ("text", "layers", "graph")
    if view not in fitting:
        raise OptionError(
            f"Expected --view {' or '.join(fitting)} {'with' if writes else 'without'} --prompt, got {view}."
        )
    return view


def _stop_words(name: str | None) -> Iterable[str]:
    """The words of a file, one per line, or the bundled ones."""
    if name is None:
        return ()
    from vitflow.text.labels import ENGLISH_STOP_WORDS

    if name == "english":
        return ENGLISH_STOP_WORDS
    try:
        return Path(name).read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise OptionError(
            f"Expected --hide-stop-words english, or a file with one word per line, got {name!r}: {error}."
        ) from error


def _compute(text: str | None, given: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """What was read or written, with its weights."""
    from vitflow.models.hub import refuse_images
    from vitflow.models.languages import load_language_model

    refuse_images(given["model"])
    model, tokenizer = load_language_model(given["model"], trust_remote_code=given["trust_remote_code"])
    if text is not None:
        from vitflow.text.reading import explain_text

        token, target = (_number_or_word(given[name]) for name in ("token", "target"))
        chosen: dict[str, Any] = {"method": given["method"], "name": given["name"], **options}
        return explain_text(text, model=model, tokenizer=tokenizer, token=token, target=target, **chosen)
    from vitflow.text.generating import explain_generation

    return explain_generation(
        model,
        given["prompt"],
        tokenizer=tokenizer,
        method=given["method"],
        name=given["name"],
        max_new_tokens=given["generate"] or 20,
        **options,
    )


def _number_or_word(value: str | None) -> str | int | None:
    """A token by its number, or a word."""
    return int(value) if value is not None and value.removeprefix("-").isdecimal() else value


def _drawn(result: Any, view: str, writes: bool, hiding: Mapping[str, Any]) -> Any:
    """A view of a result, by its name."""
    if writes:
        return result.sheet(**hiding) if view == "matrix" else result.shaded(-1, **hiding)
    return {"text": result.shaded, "layers": result.sheet, "graph": result.graph}[view](**hiding)


def _print(result: Any, view: Callable[[], Any], given: Mapping[str, Any]) -> None:
    """Say the result on stdout: for people, or as JSON."""
    from vitflow.text.labels import text_of

    if given["as_json"]:
        say_record(result.to_dict())
        return
    if given["prompt"] is not None:
        click.echo(text_of(result.prompt_tokens + result.generated_tokens) + "\n")
    encoding = sys.stdout.encoding or "ascii"
    click.echo(view().text().encode(encoding, "replace").decode(encoding))
    for path in (given["html"], given["png"]):
        if path is not None:
            say(f"written: {printable(path)}")
