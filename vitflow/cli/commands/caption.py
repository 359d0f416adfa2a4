"""`vitflow caption`: caption an image, and map each generated word onto the image."""

from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.output import check_images, output_file, say, say_model_note, say_record, writing
from vitflow.errors import printable
from vitflow.images import FIGURE_FORMATS
from vitflow.text.method_table import IMAGE_DEFAULT, text_method


@click.command(short_help="Caption an image, with a map for each word.", panel="Texts")
@click.argument("image", type=click.Path(path_type=Path))
@click.option(
    "--prompt",
    panel="Text",
    help="Prompt about the image.  [default: 'Describe the image.', or the prompt that the bundled model was trained "
    "with; none if the model takes no prompt]",
)
@click.option(
    "--generate",
    panel="Text",
    type=click.IntRange(min=1),
    default=30,
    metavar="N",
    help="Maximum number of tokens to generate.",
)
@click.option(
    "--model",
    panel="Model",
    required=True,
    metavar="ID|demo-caption|PATH",
    help="transformers id or folder of a vision–language model, or demo-caption (bundled; knows drawn shapes only).",
)
@shared.language_model_options
@shared.text_method_option(
    default=IMAGE_DEFAULT, help="Method. gae needs a backward pass for each token, rollout none."
)
@shared.text_method_options
@click.option(
    "--neutral", panel="Method", metavar="PROMPT", help="Divide each map by the map of this uninformative prompt."
)
@click.option(
    "--through-tower", panel="Method", is_flag=True, help="Propagate the maps to the patches of the vision tower."
)
@shared.output_option(
    help="File for the strip of maps, .png, .pdf or .svg; or a folder, with / at its end.  [default: "
    "IMAGE-caption.png here]",
)
@click.option("--html", type=shared.NEW_FILE, help="Also write an interactive page: click a word to see its map.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the map of each word instead.")
def caption(image: Path, **given: Any) -> None:
    """Caption IMAGE with a vision–language model, and map each generated word onto the image.

    \b
    vitflow caption photo.jpg --model llava-hf/llava-1.5-7b-hf
    vitflow caption drawn.png --model demo-caption --html words.html
    vitflow caption photo.jpg --model FOLDER --prompt "What is here?" -o here.png

    Stop words and punctuation get no map; the output lists them.
    """
    options = shared.method_values(given)
    text_method(given["method"], options)  # before torch is loaded
    output = output_file([image], given["output"], "caption", FIGURE_FORMATS)
    check_images([image], filter(None, [given["html"]]))
    from vitflow.explaining.strips import draw_words
    from vitflow.images.figures import save_figure
    from vitflow.models.hub import called
    from vitflow.text.generating import explain_generation

    generation = explain_generation(
        given["model"],
        given["prompt"],
        image=image,
        method=given["method"],
        name=given["name"] or called(given["model"]),
        trust_remote_code=given["trust_remote_code"],
        neutral=given["neutral"],
        through_tower=given["through_tower"],
        max_new_tokens=given["generate"],
        do_sample=False,
        **options,
    )
    say_model_note(generation.model, generation.model_note)
    words, left_out = generation.words()
    relative = given["neutral"] is not None
    maps = [generation.image(places, relative=relative) for places in words.values()]
    if maps:
        with writing(output):
            save_figure(draw_words(maps, left_out=left_out), output)
    if (page := given["html"]) is not None:
        with writing(page, "--html"):
            generation.page(relative=relative).save(page)
        say(f"written: {printable(page)}")
    if given["as_json"]:
        entries = [
            {"word": word, **saliency.to_dict(), "map": saliency.grid.tolist()}
            for word, saliency in zip(words, maps, strict=True)
        ]
        say_record(
            {
                "answer": generation.answer,
                "words": entries,
                "left_out": left_out,
                "output": str(output) if maps else None,
            }
        )
        return
    click.echo(f"{printable(generation.answer)}\n")
    for word, saliency in zip(words, maps, strict=True):
        facts = saliency.facts
        click.echo(
            f"{printable(word):<16} {facts['on_image']:4.0%} on the image; of that {facts['on_edges']:.0%} on "
            f"its edges, {facts['on_first_patch']:.0%} on its first patch"
        )
    if left_out:
        click.echo(f"No map: {', '.join(printable(word) for word in left_out)}")
    click.echo(printable(output) if maps else "No word has a map: no figure was written.")
