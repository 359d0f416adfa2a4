"""A page on which all of it can be tried in a browser; needs Gradio, which is loaded when a page is served."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitflow.errors import OptionError


def serve(
    models: Sequence[str],
    language_models: Sequence[str] = ("demo-caption",),
    *,
    checkpoint: str | Path | None = None,
    class_names: str | Path | None = None,
    prompts: Sequence[str] = (),
    samples: Sequence[str | Path] = (),
    host: str = "127.0.0.1",
    allowed_hosts: Sequence[str] = (),
    port: int | None = None,
    time_limit: float = 30.0,
    browser: bool = False,
    wait: bool = True,
) -> Any:
    """Serve a page that explains photographs, texts and captions by these models, and by no others.

    Each model is loaded when it is first asked, once for all visitors, who take turns. The page loads nothing from
    another host, and Gradio neither counts nor shares anything. It explains files that were uploaded to it, and its
    samples, and no other file of this machine.

    Args:
        models: for photographs, as `load_model` takes them; the first is chosen.
        language_models: for texts and captions, as `explain_text` and `explain_generation` take them.
        checkpoint: weights of the first of `models`, as for `load_model`.
        class_names: a file with the names of its classes.
        prompts: texts to begin with, for a first model of images and texts.
        samples: images to begin with; by default the drawn ones that vitflow ships.
        host: this machine alone can reach it; with "0.0.0.0" whoever reaches this machine can.
        allowed_hosts: names by which browsers may ask for the page, besides `host` and localhost, such as that of a
            proxy; "*.example.org" stands for all below, "*" for any. With "0.0.0.0" any address in numbers is allowed.
        port: by default the first free one from 7860 on.
        time_limit: seconds that one question may take, so that the other visitors have their turn.
        browser: open it in a browser.
        wait: until it is interrupted. Else what is returned has its address, `local_url`, and ends it by `close()`.

    Raises:
        OptionError: Gradio is not installed, no model is named, or the port is taken.
    """
    if not models:
        raise OptionError("Expected at least one model for photographs, got none.")
    if not time_limit > 0:
        raise OptionError(f"Expected a time limit above 0 seconds, got {time_limit}.")
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}  # read when Gradio is loaded
    try:
        from vitflow.app.asking import Models
        from vitflow.app.page import launch
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("gradio"):
            raise
        raise OptionError("The page needs Gradio: pip install 'vitflow[app]'.") from error
    offered = Models(models, language_models, checkpoint=checkpoint, class_names=class_names)
    where: dict[str, Any] = {"host": host, "allowed_hosts": allowed_hosts, "port": port}
    page = launch(offered, samples, prompts=prompts, browser=browser, time_limit=time_limit, **where)
    if wait:
        page.block_thread()
    return page
