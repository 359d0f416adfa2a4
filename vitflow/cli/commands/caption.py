"""`vitflow caption`: caption an image or a video, and map each generated word onto it."""

from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.output import check_images, output_file, say, say_model_note, say_record, writing
from vitflow.errors import printable
from vitflow.images import FIGURE_FORMATS, VIDEO_FORMATS
from vitflow.text.method_table import IMAGE_DEFAULT, text_method


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
    "transformers id or folder of a vision–language model, or demo-caption (bundled; knows drawn shapes only).",
    required=True,
)
@shared.language_model_options
@shared.text_method_option(
    default=IMAGE_DEFAULT, help="Method. gae needs a backward pass for each token, rollout none."
)
@shared.text_method_options
@shared.option("Method", "--through-tower", bool, "Propagate the maps to the patches of the vision tower.")
@shared.option(
    "Method", "--blank", bool, "Also report the probability of each word with the image replaced by its mean colour."
)
@shared.output_option(
    help="File for the strip of maps, .png, .pdf or .svg; or a folder, with / at its end.  [default: "
    "IMAGE-caption.png here]",
)
@shared.option("", "--html", shared.NEW_FILE, "Also write an interactive page: click a word to see its map.")
@shared.option("", "--json as_json", bool, "Print one JSON object with the map of each word instead.")
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
    output = output_file([image], given["output"], "caption", FIGURE_FORMATS)
    check_images([image], filter(None, [given["html"]]))
    is_video = image.suffix.lower() in VIDEO_FORMATS
    from vitflow.analysis.strips import draw_clip_words, draw_words
    from vitflow.images.figures import save_figure
    from vitflow.text.generating import explain_generation
    from vitflow.text.languages import called

    given["name"] = given["name"] or called(given["model"])
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
