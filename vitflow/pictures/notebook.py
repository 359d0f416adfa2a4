"""What a notebook shows of a result: a picture, a table, and words; the front end takes the richest that it knows."""

import base64
from collections.abc import Iterable, Sequence
from html import escape

import cv2
import numpy as np
from numpy.typing import NDArray

#: Pixels per inch of figures in a notebook: a strip is as wide as the page then.
DPI = 100


def shrink(image: NDArray[np.uint8], longest: int) -> NDArray[np.uint8]:
    """A picture [height, width, 3] whose longer side has at most so many pixels."""
    height, width = image.shape[:2]
    scale = longest / max(height, width)
    if scale >= 1:
        return image
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)


def bundle(text: str, *, picture: bytes | None = None, tables: Sequence[str] = ()) -> dict[str, str]:
    """What `_repr_mimebundle_` returns: the text, a picture as PNG, and tables in HTML with the picture below them."""
    found = {"text/plain": text}
    encoded = "" if picture is None else base64.b64encode(picture).decode()
    if encoded:
        found["image/png"] = encoded
    if tables:
        shown = f'<img src="data:image/png;base64,{encoded}" alt="">' if encoded else ""
        found["text/html"] = f"<p>{escape(text)}</p>{''.join(tables)}{shown}"
    return found


def html_table(rows: Iterable[Sequence[object]], head: Sequence[object] = ()) -> str:
    """A table in HTML; every cell is text, whatever it says.

    >>> html_table([("model", "a<b")])
    '<table><tr><th>model</th><td>a&lt;b</td></tr></table>'
    """
    lines = ["".join(f"<th>{escape(str(cell))}</th>" for cell in head)] if head else []
    for first, *cells in rows:
        lines.append(f"<th>{escape(str(first))}</th>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}")
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
