"""`vitflow read`: attribution of a word of a text, or of each generated word, to the input tokens."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.output import check_suffix, say, say_record, writing
from vitflow.errors import OptionError, printable
from vitflow.images import FIGURE_FORMATS
from vitflow.text.method_table import PLAIN, text_method


@click.command(panel="Texts")
@click.argument("text", required=False)
@shared.option("Text", "--prompt", None, "Generate text from this prompt, and explain each generated token.")
@shared.option("Text", "--generate", 1, "Number of tokens to generate.  [default: 20]")
@shared.option("Model", "--model", "ID|PATH", "transformers id, or a folder with model and tokenizer.", required=True)
@shared.language_model_options
@shared.option(
    "Text",
    "--token",
    "WORD|INDEX",
    "Word or token index to explain (-1: the last token); with --prompt, the generated one that --png shows.  "
    "[default: the masked word, the last token of a decoder, else the class token]",
)
@shared.text_method_option(default=PLAIN, help="Method.")
@shared.option(
    "Method",
    "--target",
    "WORD|INDEX",
    "Output word (a single token) to explain with gae.  [default: the most probable]",
)
@shared.text_method_options
@shared.option("", "--view", ("text", "graph"), "View of TEXT to print and draw: the text, or graphs.", default="text")
@shared.option("", "--hide-special", bool, "Hide special tokens; the caption says so.")
@shared.option(
    "",
    "--hide-stop-words",
    "english|FILE",
    "Do not shade these words (a file with one word per line); the caption says so.",
)
@shared.option("", "--html", shared.NEW_FILE, "Write an interactive page.")
@shared.option("", "--png", shared.NEW_FILE, "Write the view as .png, .pdf or .svg.")
@shared.option("", "--json as_json", bool, "Print one JSON object with all values instead of the view.")
def read(text: str | None, **given: Any) -> None:
    """Attribute a word of TEXT, or each generated word, to the input tokens.

    \b
    vitflow read "The key to the cabinets is here" --model FOLDER --token is
    vitflow read --prompt "Once upon a time" --model ID --html story.html

    By default, maps of decoders are relative to the receptive field and not value-weighted; maps of encoders are
    value-weighted along the output.
    """
    options = shared.method_values(given)
    text_method(given["method"], options)  # before torch is loaded
    _check(text, given)
    hiding = {"special": not given["hide_special"], "stop_words": _stop_words(given["hide_stop_words"])}
    result = _compute(text, given, options)
    if text is None:
        view = result.shaded(-1 if given["token"] is None else _token(given["token"]), **hiding)
    else:
        view = (result.graph if given["view"] == "graph" else result.shaded)(**hiding)
    if (path := given["png"]) is not None:
        with writing(path, "--png"):
            view.save(path)
    if (path := given["html"]) is not None:
        with writing(path, "--html"):
            result.page(**hiding).save(path)
    _print(result, result.text(**hiding) if text is None else view.text(), given)


def _check(text: str | None, given: Mapping[str, Any]) -> None:
    """Raise OptionError for options that cannot be combined."""
    if (text is None) == (given["prompt"] is None):
        got = "neither" if text is None else "both"
        raise OptionError(f"Expected either TEXT or --prompt, got {got}.")
    writes = text is None
    for name in ("target",) if writes else ("generate",):
        if given[name] is not None:
            raise OptionError(f"--{name} {'cannot be used with' if writes else 'requires'} --prompt.")
    if writes and given["view"] == "graph":
        raise OptionError("--view graph cannot be used with --prompt.")
    if given["png"] is not None:
        check_suffix(given["png"], FIGURE_FORMATS)


def _stop_words(name: str | None) -> Iterable[str]:
    """Return the bundled stop words, or those of a file with one word per line."""
    if name is None:
        return ()
    from vitflow.text.words import ENGLISH_STOP_WORDS

    if name == "english":
        return ENGLISH_STOP_WORDS
    try:
        return Path(name).read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise OptionError(
            f"Expected --hide-stop-words english, or a file with one word per line, got {name!r}: {error}."
        ) from error


def _token(value: str | None) -> str | int | None:
    """Return a word, or a token index as a number."""
    return int(value) if value is not None and value.removeprefix("-").isdecimal() else value


def _compute(text: str | None, given: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """Return the reading of a text, or the generation for a prompt."""
    from vitflow.text.languages import load_language_model, refuse_images

    refuse_images(given["model"])
    model, tokenizer = load_language_model(given["model"], trust_remote_code=given["trust_remote_code"])
    if text is not None:
        from vitflow.text.reading import explain_text

        given = dict(given) | {"model": model}
        for name in ("token", "target"):
            if (value := given[name]) is not None and value.removeprefix("-").isdecimal():
                given[name] = int(value)
        return explain_text(text, tokenizer=tokenizer, **shared.arguments_of(explain_text, given), **options)
    from vitflow.text.generating import explain_generation

    arguments = shared.arguments_of(explain_generation, given) | {"model": model, **options}
    count = given["generate"] or 20
    return explain_generation(inputs=given["prompt"], tokenizer=tokenizer, max_new_tokens=count, **arguments)


def _print(result: Any, shown: str, given: Mapping[str, Any]) -> None:
    """Print the result on stdout as text or JSON."""
    from vitflow.text.words import text_of

    if given["as_json"]:
        say_record(result.to_dict())
        return
    if given["prompt"] is not None:
        click.echo(text_of(result.prompt_tokens + result.generated_tokens) + "\n")
    encoding = sys.stdout.encoding or "ascii"
    click.echo(shown.encode(encoding, "replace").decode(encoding))
    for path in (given["html"], given["png"]):
        if path is not None:
            say(f"written: {printable(path)}")
