"""`vitflow read` and `vitflow caption`: attribution of words to the tokens of a text, or to the patches of an image."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.output import check_images, check_suffix, output_file, say, say_model_note, say_record, writing
from vitflow.errors import OptionError, printable
from vitflow.images import FIGURE_FORMATS, VIDEO_FORMATS
from vitflow.text.method_table import IMAGE_DEFAULT, PLAIN, text_method


@click.command(panel="Texts")
@click.argument("text", required=False)
@shared.option("Text", "--prompt", None, "Generate text from this prompt, and explain each generated token.")
@shared.option("Text", "--generate", 1, "Number of tokens to generate.  [default: 20]")
@shared.option("Model", "--model", "ID|PATH", "transformers id, or a folder with model and tokenizer.  [required]")
@shared.language_model_options
@shared.option(
    "Text",
    "--token",
    "WORD|INDEX",
    "Word or token index to explain (from 0; -1: the last token); with --prompt, the generated one that --png shows.  "
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
@shared.option("", "--hide-special", bool, "Hide special tokens; the caption says so.")
@shared.option("", "--hide-stop-words", bool, "Do not shade English stop words; the caption says so.")
@shared.option("", "--html", shared.NEW_FILE, "Write an interactive page.")
@shared.option("", "--png", shared.NEW_FILE, "Write the shaded text as .png, .pdf or .svg.")
@shared.option("", "--json as_json", bool, "Print one JSON object with all values instead.")
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
    from vitflow.text.words import ENGLISH_STOP_WORDS, text_of

    stop_words = ENGLISH_STOP_WORDS if given["hide_stop_words"] else ()
    hiding = {"special": not given["hide_special"], "stop_words": stop_words}
    for name in ("token", "target"):  # a word, or an index
        if (value := given[name]) is not None and value.removeprefix("-").isdecimal():
            given[name] = int(value)
    result = _compute(text, given, options)
    word = [given["token"]] if text is None and given["token"] is not None else []
    view = result.shaded(*word, **hiding)
    saved = {"--html": lambda: result.page(**hiding), "--png": lambda: view}
    paths = [(flag, path) for flag in saved if (path := given[flag[2:]]) is not None]
    for flag, path in paths:
        with writing(path, flag):
            saved[flag]().save(path)
    if given["as_json"]:
        say_record(result.to_dict())
        return
    if text is None:
        click.echo(text_of(result.prompt_tokens + result.generated_tokens) + "\n")
    encoding = sys.stdout.encoding or "ascii"
    shown = result.text(**hiding) if text is None else view.text()
    click.echo(shown.encode(encoding, "replace").decode(encoding))
    for _, path in paths:
        say(f"written: {printable(path)}")


def _check(text: str | None, given: Mapping[str, Any]) -> None:
    """Raise OptionError for options that cannot be combined."""
    if (text is None) == (given["prompt"] is None):
        got = "neither" if text is None else "both"
        raise OptionError(f"Expected either TEXT, to read it, or --prompt, to continue it, got {got}.")
    if text is not None and given["generate"] is not None:
        raise OptionError("--generate requires --prompt: vitflow read --prompt TEXT.")
    if text is None and given["target"] is not None:
        raise OptionError("--target cannot be used with --prompt, which explains each generated token: omit it.")
    if given["model"] is None:
        raise OptionError(
            "Expected --model, the transformers id or folder of a language model such as "
            f"{'openai-community/gpt2' if text is None else 'google-bert/bert-base-uncased'}, got none."
        )
    if given["png"] is not None:
        check_suffix(given["png"], FIGURE_FORMATS)


def _compute(text: str | None, given: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """Return the reading of a text, or the generation for a prompt."""
    from vitflow.text.languages import load_language_model, refuse_images

    refuse_images(given["model"])
    model, tokenizer = load_language_model(given["model"], trust_remote_code=given["trust_remote_code"])
    if text is not None:
        from vitflow.text.reading import explain_text

        arguments = shared.arguments_of(explain_text, given) | {"model": model, **options}
        return explain_text(text, tokenizer=tokenizer, **arguments)
    from vitflow.text.generating import explain_generation

    arguments = shared.arguments_of(explain_generation, given) | {"model": model, **options}
    count = given["generate"] or 20
    return explain_generation(inputs=given["prompt"], tokenizer=tokenizer, max_new_tokens=count, **arguments)


@click.command(short_help="Caption an image or video, with a map for each word.", panel="Texts")
@click.argument("image", type=click.Path(path_type=Path))
@shared.option(
    "Text",
    "--prompt",
    None,
    "Prompt about the image.  [default: 'Describe the image.', or the prompt that the bundled model was trained "
    "with; none if the model takes no prompt]",
)
@shared.option("Text", "--generate", 1, "Maximum number of tokens to generate.", default=30)
@shared.option("Text", "--frames", 1, f"Frames of a video, evenly spaced ({', '.join(VIDEO_FORMATS)}).  [default: 8]")
@shared.option(
    "Model",
    "--model",
    "ID|demo-caption|PATH",
    "transformers id or folder of a vision–language model, or demo-caption (bundled; knows drawn shapes only).  "
    "[required]",
)
@shared.language_model_options
@shared.text_method_option(
    default=IMAGE_DEFAULT, help="Method. gae needs a backward pass for each token, rollout none."
)
@shared.option("Method", "--through-tower", bool, "Propagate the maps to the patches of the vision tower.")
@shared.option(
    "Method", "--blank", bool, "Also report the probability of each word with the image replaced by its mean colour."
)
@shared.output_option(
    help="File for the strip of maps, .png, .pdf or .svg; or a folder, with / at its end.  [default: "
    "IMAGE-caption.png here]"
)
@shared.option("", "--html", shared.NEW_FILE, "Also write an interactive page: click a word to see its map.")
@shared.option("", "--json as_json", bool, "Print one JSON object with the map of each word instead.")
@shared.text_method_options
def caption(image: Path, **given: Any) -> None:
    """Caption IMAGE, or a video, with a vision–language model, and map each generated word onto it.

    \b
    vitflow caption photo.jpg --model llava-hf/llava-1.5-7b-hf
    vitflow caption drawn.png --model demo-caption --html words.html
    vitflow caption photo.jpg --model FOLDER --prompt "What is here?" -o here.png
    vitflow caption clip.mp4 --model Qwen/Qwen2.5-VL-3B-Instruct --frames 16

    Stop words and punctuation get no map; the output lists them.
    """
    options = shared.method_values(given)
    text_method(given["method"], options)  # before torch is loaded
    if given["model"] in (None, "demo", "demo-text"):
        raise OptionError(
            "Expected --model, the transformers id or folder of a vision–language model such as "
            f"llava-hf/llava-1.5-7b-hf, got {given['model'] or 'none'}. To try the command: --model demo-caption "
            "(bundled; knows drawn shapes only)."
        )
    output = output_file([image], given["output"], "caption", FIGURE_FORMATS)
    check_images([image], filter(None, [given["html"]]))
    is_video = image.suffix.lower() in VIDEO_FORMATS
    from vitflow.analysis.strips import draw_clip_words, draw_words
    from vitflow.images.figures import save_figure
    from vitflow.text.generating import explain_generation

    source: dict[str, Any] = {"video" if is_video else "image": image}
    arguments = shared.arguments_of(explain_generation, given) | {"max_new_tokens": given["generate"], **options}
    generation = explain_generation(inputs=given["prompt"], do_sample=False, **source, **arguments)
    say_model_note(generation.model, generation.model_note)
    words, left_out = generation.words()
    explained, draw = (generation.clip, draw_clip_words) if is_video else (generation.image, draw_words)
    maps: list[Any] = [explained(places) for places in words.values()]
    if maps:
        with writing(output):
            save_figure(draw(maps, left_out=left_out), output)
    if (page := given["html"]) is not None:
        with writing(page, "--html"):
            generation.page().save(page)
        say(f"written: {printable(page)}")
    if given["as_json"]:
        entries = [
            {"word": word, **saliency.to_dict(), "map": saliency.grid.tolist()}
            for word, saliency in zip(words, maps, strict=True)
        ]
        written = str(output) if maps else None
        say_record({"answer": generation.answer, "words": entries, "left_out": left_out, "output": written})
        return
    click.echo(f"{printable(generation.answer)}\n")
    for word, saliency in zip(words, maps, strict=True):
        click.echo(f"{printable(word):<16} {_shares(saliency)}")
    if left_out:
        click.echo(f"No map: {', '.join(printable(word) for word in left_out)}")
    click.echo(printable(output) if maps else "No word has a map: no figure was written.")


def _shares(result: Any) -> str:
    """Return a line on where the weight of a word is, for its map or clip."""
    if hasattr(result, "shares"):
        index = int(result.shares.argmax())
        return (
            f"{result.frames[0].facts['on_video']:4.0%} on the video; of its map {result.shares[index]:.0%} on frame "
            f"{index * result.span + 1}"
        )
    facts = result.facts
    blank = ""
    if "blank" in facts:
        blank = f"; probability {facts['blank']['with_image']:.1%}, for a blank image {facts['blank']['value']:.1%}"
    return (
        f"{facts['on_image']:4.0%} on the image; of that {facts['on_edges']:.0%} on its edges, "
        f"{facts['on_first_patch']:.0%} on its first patch{blank}"
    )
