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
    samples: Sequence[str | Path] = (),
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = False,
    wait: bool = True,
) -> Any:
    """Serve a page that explains photographs, texts and captions by these models, and by no others.

    Each model is loaded when it is first asked, once for all visitors, who take turns. The page loads nothing from
    another host, and Gradio neither counts nor shares anything.

    Args:
        models: for photographs, as `load_model` takes them; the first is chosen.
        language_models: for texts and captions, as `explain_text` and `explain_generation` take them.
        samples: pictures to begin with; by default the drawn ones that vitflow ships.
        host: this machine alone can reach it; with "0.0.0.0" whoever reaches this machine can.
        port: by default the first free one from 7860 on.
        browser: open it in a browser.
        wait: until it is interrupted. Else what is returned has its address, `local_url`, and ends it by `close()`.

    Raises:
        OptionError: Gradio is not installed, no model is named, or the port is taken.
    """
    if not models:
        raise OptionError("Expected at least one model for photographs, got none.")
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}  # read when Gradio is loaded
    try:
        from vitflow.app.page import launch
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("gradio"):
            raise
        raise OptionError("The page needs Gradio: pip install 'vitflow[app]'.") from error
    page = launch(models, language_models, samples, host=host, port=port, browser=browser)
    if wait:
        page.block_thread()
    return page
