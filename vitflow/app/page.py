"""The page: its two tabs, its look, and how it is served."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from vitflow.app.models import Models
from vitflow.app.pictures import pictures_tab
from vitflow.app.words import words_tab
from vitflow.errors import OptionError
from vitflow.pictures.images import MAX_PIXELS

# How many visitors may wait or are remembered, and how many seconds what they made is kept.
_VISITORS, _KEPT = 32, 3600
_CSS = """
.told p { margin: 0; padding: .5em .75em; white-space: pre-wrap; overflow-wrap: anywhere; border-left: 4px solid }
.told .note { border-color: #2b5fb3 }
.told .error { border-color: #c0392b; font-weight: 600; background: var(--body-background-fill) }
.told .error { position: fixed; inset: 0 0 auto; z-index: 99; box-shadow: 0 2px 8px #0006 }
:is(.block, .told):not(:has(p)):is(:has(.told), .told) { display: none }
"""


def launch(
    models: Sequence[str], language_models: Sequence[str], samples: Sequence[str | Path], *, browser: bool, **where: Any
) -> Any:
    """Make the page and serve it in the background; arguments as for `serve`."""
    offered = Models(models, language_models)
    with gr.Blocks(title="vitflow", analytics_enabled=False, delete_cache=(_KEPT, _KEPT)) as page:
        gr.Markdown("# vitflow\nSee what a Vision Transformer looks at.")
        with gr.Tab("Photographs"):
            pictures_tab(offered, samples)
        if language_models:
            with gr.Tab("Texts and captions"):
                words_tab(offered, samples)
    fonts: dict[str, Any] = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # local
    shut: dict[str, Any] = {"share": False, "enable_monitoring": False, "ssr_mode": False, "pwa": False}
    look: dict[str, Any] = {"theme": gr.themes.Default(**fonts), "css": _CSS, "footer_links": []}
    # A file may have as many bytes as a picture may have pixels.
    bounds: dict[str, Any] = {"max_file_size": MAX_PIXELS, "state_session_capacity": _VISITORS}
    to: dict[str, Any] = {"server_name": where["host"], "server_port": where["port"], "inbrowser": browser}
    try:
        page.queue(max_size=_VISITORS).launch(prevent_thread_lock=True, quiet=True, **to, **bounds, **look, **shut)
    except OSError as error:
        raise OptionError(f"Expected a free port, got {where['port'] or 'none from 7860 on'}: {error}") from error
    return page
