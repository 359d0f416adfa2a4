"""What a page takes from its fields: plain values, uploaded files, and nothing beyond what each field declares."""

import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from vitflow.errors import OptionError, check_known, whole_number

# A name or a number needs no more characters; fields for longer texts declare their own limit.
_CHARACTERS = 200


def refusal(message: str) -> gr.Error:
    """An error that the page shows, and that leaves no traceback in the console."""
    return gr.Error(escape(message), print_exception=False)


def received(fields: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Values as they may reach Gradio and the page: each is plain, or a file that was uploaded.

    Gradio follows every path and URL among its inputs, so they are checked before it sees them.

    Args:
        fields: the components that the values are of.
        values: as the request has them.

    Raises:
        gr.Error: the number or the type of the values is wrong, or a file is not of this page.
    """
    if len(values) != len(fields):
        raise refusal(f"Expected {len(fields)} values, got {len(values)}.")
    return [_received(field, value) for field, value in zip(fields, values, strict=True)]


def _received(field: Any, value: Any) -> Any:
    if field.stateful or value is None:
        return value
    if isinstance(field, gr.Image):
        return _uploaded(value)
    if isinstance(field, gr.Dataset) and (type(value) is not int or not 0 <= value < len(field.samples)):
        raise refusal(f"Expected one of the {len(field.samples)} samples, got another.")
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise refusal(f"{_name(field)}: expected a text, a number or a switch, got {type(value).__name__}.")


def _uploaded(file: Any) -> dict[str, Any]:
    """A file of the upload folder; any other path has the same answer, whether there is such a file or not."""
    path = file.get("path") if isinstance(file, dict) else None
    if not isinstance(path, str) or not _is_uploaded(path):
        raise refusal(
            "Expected a photograph that was uploaded to this page, or one of its samples, got another file. Uploads "
            "are removed after a while: drop the photograph again."
        )
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def _is_uploaded(path: str) -> bool:
    try:
        real = Path(os.path.realpath(path))  # without links and ".."
        return real.is_relative_to(os.path.realpath(get_upload_folder())) and real.is_file()
    except (OSError, ValueError):  # no name of a file at all
        return False


def is_click(event: Any) -> bool:
    """Whether an event of Gradio holds where on the page a click was: a number, or two."""
    data = getattr(event, "_data", None)
    at = data.get("index") if isinstance(data, dict) and "value" in data else None
    numbers = at if isinstance(at, list) else [at]
    return 1 <= len(numbers) <= 2 and all(isinstance(one, int | float) and math.isfinite(one) for one in numbers)


def checked(field: Any, value: Any) -> Any:
    """A plain value that a field can have.

    Raises:
        OptionError: the field declares that it takes no such value.
    """
    name = _name(field)
    if isinstance(field, gr.Slider):
        return _of_slider(field, name, value)
    if isinstance(field, gr.Checkbox):
        if value not in (None, True, False):
            raise OptionError(f"{name}: expected on or off, got {value!r:.80}.")
        return bool(value)
    if not isinstance(field, gr.Textbox | gr.Dropdown | gr.Radio):
        return value
    text = "" if value is None else value
    if not isinstance(text, str):
        raise OptionError(f"{name}: expected a text, got {text!r:.80}.")
    most = getattr(field, "max_length", None) or _CHARACTERS
    if len(text) > most:
        raise OptionError(f"{name}: expected at most {most:,} characters, got {len(text):,}.")
    if isinstance(field, gr.Radio | gr.Dropdown) and not getattr(field, "allow_custom_value", False):
        check_known(f"{name} of this page", text, [str(known) for _, known in field.choices])
    return text


def _of_slider(field: gr.Slider, name: str, value: Any) -> Any:
    if field.step == 1:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        return whole_number(name, None if isinstance(whole, bool) else whole, int(field.minimum), int(field.maximum))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not field.minimum <= value <= field.maximum:
        raise OptionError(f"{name}: expected a number from {field.minimum} to {field.maximum}, got {value!r:.80}.")
    return value


def _name(field: Any) -> str:
    return str(getattr(field, "label", None) or type(field).__name__).lower()
