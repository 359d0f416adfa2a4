"""Web page to try everything in a browser; requires Gradio, which is imported when a page is served."""

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
    """Serve a page that explains images, clips, texts and captions with the given models only.

    Each model is loaded at its first use, once for all visitors, whose requests are queued. The page loads nothing from
    other hosts, and Gradio's analytics and sharing are off. Only uploaded files and the samples can be explained.

    Args:
        models: models for images and clips as for `load_model`; the first is selected.
        language_models: models for texts, as for `explain_text` and `explain_generation`.
        checkpoint: weights of the first of `models`, as for `load_model`.
        class_names: a file with the names of its classes.
        prompts: initial prompts, if the first model is an image–text model.
        samples: sample images; by default the bundled drawn ones.
        host: by default only this machine can connect; "0.0.0.0" allows all.
        allowed_hosts: further host names, such as that of a proxy; "*.example.org" includes all subdomains, "*" any
            host. With "0.0.0.0" all numeric addresses are allowed.
        port: by default the first free port from 7860.
        time_limit: maximum duration of a request in seconds.
        browser: open it in a browser.
        wait: wait until interrupted; otherwise return an object with the address, `local_url`, and `close()`.

    Raises:
        OptionError: Gradio is not installed, no model is named, or the port is taken.
    """
    if not models:
        raise OptionError("Expected at least one model for photographs, got none.")
    if not time_limit > 0:
        raise OptionError(f"Expected a time limit above 0 seconds, got {time_limit}.")
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}  # read when Gradio is loaded
    os.environ["OPENCV_FFMPEG_LOGLEVEL"] = "-8"  # quiet: the page shows what is wrong with a video
    try:
        from vitflow.app.actions import Models
        from vitflow.app.page import launch
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("gradio"):
            raise
        raise OptionError("The app requires Gradio, which is not installed: pip install 'vitflow[app]'.") from error
    offered = Models(models, language_models, checkpoint=checkpoint, class_names=class_names)
    where: dict[str, Any] = {"host": host, "allowed_hosts": allowed_hosts, "port": port}
    page = launch(offered, samples, prompts=prompts, browser=browser, time_limit=time_limit, **where)
    if wait:
        page.block_thread()
    return page
