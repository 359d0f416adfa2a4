"""Web page to try everything in a browser; requires Gradio, which is imported when a page is served."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitflow.errors import OptionError, load_extra


def serve(
    models: Sequence[str],
    *,
    samples: Sequence[str | Path] = (),
    prompts: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int | None = None,
    allowed_hosts: Sequence[str] = (),
    **loading: Any,
) -> Any:
    """Serve a page that explains images with the given models only.

    Each model is loaded at its first use, once for all visitors, whose requests are queued. The page loads nothing from
    other hosts, and Gradio's analytics and sharing are off. Only uploaded files and the samples can be explained.

    Args:
        models: models as for `load_model`; the first is selected.
        samples: sample images, of which the first is explained at once; by default a photograph, if a model is offered
            that knows more than drawn shapes, and the bundled drawn images.
        prompts: initial prompts, if the first model is an image–text model.
        host: by default only this machine can connect; "0.0.0.0" allows all.
        port: by default the first free port from 7860.
        allowed_hosts: further host names, such as that of a proxy; "*.example.org" includes all subdomains, "*" any
            host. With "0.0.0.0" those of this machine are allowed.
        loading: arguments of `load_model` for the first of `models`, such as checkpoint and class_names.

    Returns:
        The page, which is served in the background: `local_url`, `block_thread()` and `close()`.

    Raises:
        OptionError: Gradio is not installed, no model is named, or the port is taken.
        ModelError: a model is unknown.
    """
    if not models:
        raise OptionError("Expected at least one model, got none.")
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}  # read when Gradio is loaded
    load_extra("gradio", "The app", "app")
    from vitflow.app.models import Models
    from vitflow.app.page import launch

    loading = {name: value for name, value in loading.items() if value is not None}
    return launch(Models(models, loading), samples, prompts, host=host, port=port, allowed_hosts=allowed_hosts)
