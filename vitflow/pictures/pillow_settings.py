"""Pillow's own bound on pixels and its warnings, which belong to the whole process, set while pictures are read."""

import contextlib
import threading
import warnings
from collections.abc import Iterator

from PIL import Image


class _PillowSettings:
    """Pillow's global size limit and its warnings, set while any thread reads a picture and restored afterwards.

    Both are global to the process, so that threads which read at the same time must share them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits: list[int] = []
        self._restore = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self, max_pixels: int) -> Iterator[None]:
        with self._lock:
            if not self._limits:
                self._restore.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
                self._restore.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._limits.append(max_pixels)
            self._set_limit()
        try:
            yield
        finally:
            with self._lock:
                self._limits.remove(max_pixels)
                if self._limits:
                    self._set_limit()
                else:
                    self._restore.close()

    def _set_limit(self) -> None:
        # Pillow warns above its limit and refuses above twice its limit.
        Image.MAX_IMAGE_PIXELS = max(-(-max(self._limits) // 2), 1)


#: A context in which pictures of at most so many pixels can be read: `with pillow_settings(max_pixels):`.
pillow_settings = _PillowSettings()
