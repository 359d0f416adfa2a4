"""The models of a page: named beforehand, each loaded once, when it is first asked."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from vitflow.errors import check_known
from vitflow.explaining.captions import python_call
from vitflow.explaining.explainer import Explainer
from vitflow.models.hub import bundled
from vitflow.models.languages import load_language_model, load_processor
from vitflow.models.loading import load_model
from vitflow.models.pairs import is_pair
from vitflow.recording.isolation import default_device


class Models:
    """The models that a page offers, by name: `pictures` for photographs, `words` for texts and captions.

    `checkpoint` and `class_names` are of the first one for photographs, as for `load_model`.
    """

    def __init__(
        self,
        pictures: Sequence[str],
        words: Sequence[str],
        *,
        checkpoint: str | Path | None = None,
        class_names: str | Path | None = None,
    ) -> None:
        self.pictures, self.words = list(pictures), list(words)
        given = {"checkpoint": checkpoint, "class_names": class_names}
        self._of_first = {name: str(path) for name, path in given.items() if path is not None}
        self._loaded: dict[tuple[str, str], Any] = {}
        self.explainer = lru_cache(32)(self._explainer)  # prompts that were embedded are kept

    def _explainer(self, name: str, fit: str, prompts: tuple[str, ...]) -> Explainer:
        model = self._kept(self._load, name, self.pictures)
        return Explainer(model, device=default_device(), fit=fit, prompts=list(prompts) or None)

    def takes_prompts(self, name: str) -> bool:
        """Whether a model for photographs is asked by prompts."""
        return is_pair(self._kept(self._load, name, self.pictures))

    def in_python(self, name: str) -> str:
        """A model for photographs as an argument of a call that is written in Python."""
        given = self._given(name)
        return python_call("vitflow.load_model", name, **given) if given else name

    def _load(self, name: str | Path) -> nn.Module:
        return load_model(name, **self._given(name))

    def _given(self, name: str | Path) -> dict[str, Any]:
        return self._of_first if name == bundled(self.pictures[0]) else {}

    def reader(self, name: str, *, sees: bool = False) -> dict[str, Any]:
        """A model for words with its tokenizer, and with its processor if it sees, as arguments."""
        processor = {"processor": self._kept(load_processor, name, self.words)} if sees else {}
        model, tokenizer = self._kept(load_language_model, name, self.words)
        return {"model": model, "tokenizer": tokenizer, "name": name, **processor}

    def _kept(self, load: Callable[[Any], Any], name: str, offered: Sequence[str]) -> Any:
        check_known("model of this page", name, offered)
        if (load.__name__, name) not in self._loaded:
            self._loaded[load.__name__, name] = load(bundled(name))
        return self._loaded[load.__name__, name]
