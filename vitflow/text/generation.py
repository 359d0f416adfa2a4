"""Attribution of the tokens that a language model generates."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.analysis.clips import Clip, joint_shares
from vitflow.errors import OptionError, printable
from vitflow.explaining.captions import method_record
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Score
from vitflow.images.figures import bundle
from vitflow.images.geometry import Placement
from vitflow.methods.fusion import check_layer
from vitflow.registry.method_table import Method
from vitflow.text.method_table import TEXT_METHODS
from vitflow.text.methods import caption
from vitflow.text.page import TextPage, TextRow
from vitflow.text.prompts import PromptImages
from vitflow.text.view import ShadedText
from vitflow.text.words import ENGLISH_STOP_WORDS, PATCHES, Words, grouped_words, hide, labels_of, text_of
from vitflow.viewer.pages import Page

_SHOWN = 60  # characters of the text in a repr


class WordSaliency(Saliency):
    """Saliency map of a generated word over an image of the prompt."""

    __slots__ = ()

    @property
    def definition(self) -> Method:
        """The method for texts that computed this map."""
        return TEXT_METHODS[self.method]


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Attribution of each generated token to the tokens of the prompt, by layer.

    With n generated and m prompt tokens:

    Attributes:
        values: float32 [n, m, layers], M of the definitions: `values[i, :, l]` is the row over the prompt, up to layer
            l + 1, of the query token whose output is generated token i.
        among_generated: float32 [n, n, layers], the same rows over generated tokens: `among_generated[i, k, l]` is the
            weight of generated token k.
        prompt_tokens: tokens of the prompt. For encoder-decoder models: tokens of the source, then the initial tokens
            of the decoder.
        generated_tokens: generated tokens.
        model: model id.
        method: method name.
        options: all options of the method.
        self_share: raw share of each row's query token, float32 [n, layers], if the rows are relative to the receptive
            field; else None.
        seconds: time of the generation and the method.
        images: images of the prompt and the positions of their patch tokens; None without images.
        probabilities: probability of each generated token with the images, with each replaced by its mean colour, and
            with all of several images replaced; float32 [n, 2], or [n, images + 2]. None unless requested by `blank`.
        model_note: note on the model, if its metadata has one.
    """

    values: NDArray[np.float32]
    among_generated: NDArray[np.float32]
    prompt_tokens: Words
    generated_tokens: Words
    model: str
    method: str
    options: Mapping[str, Any]
    self_share: NDArray[np.float32] | None = None
    seconds: float = 0.0
    images: PromptImages | None = None
    probabilities: NDArray[np.float32] | None = None
    model_note: str = ""

    def __repr__(self) -> str:
        text = text_of(self.prompt_tokens + self.generated_tokens)
        tokens = f"{self.generated_tokens.length} tokens after a prompt of {self.prompt_tokens.length}"
        layers = f"{self.values.shape[-1]} layers"
        return f"Generation({text[:_SHOWN]!r}, {tokens}, {self.method}, {layers}, {printable(self.model)})"

    @property
    def answer(self) -> str:
        """The generated text without end-of-sequence tokens."""
        generated = self.generated_tokens
        while generated.length and generated.special[-1]:
            generated = generated[:-1]
        return text_of(generated).strip()

    def words(self, stop_words: Iterable[str] = ENGLISH_STOP_WORDS) -> tuple[dict[str, tuple[int, ...]], list[str]]:
        """Return the generated content words with the indices of their tokens, and the stop words and punctuation.

        Repeated words are numbered, such as "heart (2)".

        Args:
            stop_words: words to exclude from the content words.
        """
        stopped, content, rest = {word.casefold() for word in stop_words}, dict[str, tuple[int, ...]](), list[str]()
        for word, indices in grouped_words(self.generated_tokens):
            if word.casefold() in stopped or not word[0].isalnum():
                rest += [] if word in rest else [word]
                continue
            name, count = word, 2
            while name in content:
                name, count = f"{word} ({count})", count + 1
            content[name] = indices
        return content, rest

    def image(
        self,
        word: str | int | Sequence[int],
        *,
        image: int | None = None,
        layer: int | None = None,
    ) -> Saliency:
        """Compute the saliency map of a generated word over an image of the prompt.

        Tiles and the whole image are combined by area. The map is propagated to the patches of the vision tower if that
        was recorded (`through_tower`).

        `facts["on_image"]` is the share of the word's row on the image; `facts["on_first_patch"]` and
        `facts["on_edges"]` are the shares of the map on the first patch and on the border patches, common attention
        sinks.

        Args:
            word: a word of the answer, whose tokens' rows are averaged; a token index (0 is the first); or the indices
                of the tokens of a word, as returned by `words`.
            image: image index, 0 is the first; required for several images.
            layer: last layer to include, 1 is the first, −1 the last; by default the layer of the method.

        Raises:
            OptionError: unknown word or image, or no image in the prompt.
        """
        if self.images is None:
            raise OptionError("Expected an image in the prompt, got none: pass image= to explain_generation.")
        indices, parts = self._indices_of(word), self.images.chosen(image)
        row, total, top = self._row_of(indices, layer)
        grid, placement, facts = self.images.map_of(row, total, parts)
        facts["layer"] = top + 1
        if self.probabilities is not None:  # of a word, the product over its tokens
            products = self.probabilities[indices].astype(np.float64).prod(axis=0)
            shown = self.images.parts[parts[0]].image if self.images.video is None else 0
            with_image, blank = (round(float(products[column]), 6) for column in (0, 1 + shown))
            display = f"{blank:.1%} (with the image {with_image:.1%})"
            facts["blank"] = {"value": blank, "with_image": with_image, "display": display}
        return self._saliency(indices, grid, placement, self.images.parts[parts[0]].image, facts)

    def clip(self, word: str | int | Sequence[int], *, layer: int | None = None) -> Clip:
        """Compute the saliency maps of a generated word over the frames of the video in the prompt.

        Args:
            word, layer: as for `image`.

        Returns:
            Clip with a map for each position along time, drawn on its first frame; `facts["on_video"]` of each map is
            the share of the word's row on the whole video.

        Raises:
            OptionError: unknown word, or no video in the prompt.
        """
        images = self.images
        if images is None:
            raise OptionError("Expected a video in the prompt, got none: pass video= to explain_generation.")
        if images.video is None:
            raise OptionError("Expected a video in the prompt, got images: use generation.image(word, image=0).")
        indices = self._indices_of(word)
        row, total, top = self._row_of(indices, layer)
        grids = images.grids(row, range(len(images.parts)))
        share = sum(float(grid.sum()) for grid in grids)
        facts = {"on_video": share / total if total else 0.0, "layer": top + 1}
        maps = [
            self._saliency(indices, grid.astype(np.float32), placement, index, facts)
            for index, (grid, placement) in enumerate(zip(grids, images.placements, strict=True))
        ]
        frames = tuple(replace(frame, seconds=self.seconds / len(grids)) for frame in maps)
        shares = joint_shares(np.stack([frame.grid for frame in frames]))
        return Clip(frames, frames[0].score, shares, images.video, span=images.span, joint=True)

    def _indices_of(self, word: str | int | Sequence[int]) -> list[int]:
        """Return the indices of the generated tokens of a word."""
        tokens = [word] if isinstance(word, str | int) else word
        indices = sorted({index for token in tokens for index in self.generated_tokens.find(token)})
        if not indices:
            raise OptionError("Expected a word or token indices, got an empty sequence.")
        return indices

    def _row_of(self, indices: Sequence[int], layer: int | None) -> tuple[NDArray[np.float64], float, int]:
        """Return the row of a word over the prompt, its sum with earlier generated tokens, and its layer index."""
        layer = self.options.get("layer", -1) if layer is None else layer
        top = check_layer("layer", layer, self.values.shape[2])
        row = self.values[indices, :, top].astype(np.float64).mean(axis=0)
        return row, float(row.sum() + self.among_generated[indices, :, top].mean(axis=0).sum()), top

    def _saliency(
        self,
        indices: Sequence[int],
        grid: NDArray[np.float32],
        placement: Placement,
        image: int,
        facts: Mapping[str, Any],
    ) -> WordSaliency:
        """Return the map of a word on an image of the prompt."""
        assert self.images is not None
        return WordSaliency(
            grid=grid,
            placement=placement,
            image=self.images.images[image],
            source=self.images.sources[image],
            model=self.model,
            method=self.method,
            options={**self.options, **({} if self.images.tower is None else {"through_tower": True})},
            class_specific=TEXT_METHODS[self.method].class_specific,
            score=Score(text_of(self.generated_tokens[indices[0] : indices[-1] + 1]).strip()),
            facts={**facts, **({"model_note": self.model_note} if self.model_note else {})},
            seconds=self.seconds,
        )

    def shaded(
        self, word: str | int | Sequence[int] = -1, *, special: bool = True, stop_words: Iterable[str] = ()
    ) -> ShadedText:
        """Return the prompt and the generated text, shaded by the attribution of one generated token.

        Args:
            word: the token, as for `image`; the last token of a word of several.
            special: show special tokens.
            stop_words: words to draw without a shade; the caption reports the share of the weight of hidden tokens.

        Raises:
            OptionError: unknown word, or index out of range.
        """
        index, prompt = self._indices_of(word)[-1], self.prompt_tokens
        position, words = prompt.length + index, prompt + self.generated_tokens
        weights = np.concatenate([self.values[index, :, -1], self.among_generated[index, :, -1]], dtype=np.float64)
        weights[position:] = np.nan
        plain = tuple(special and place not in self._patches for place, special in enumerate(words.special))
        return ShadedText(
            replace(words, special=plain),
            weights,
            selected=(position - 1, position),
            self_share=None if self.self_share is None else float(self.self_share[index, -1]),
            hidden=hide(words, special=not special, stop_words=stop_words) | dict.fromkeys(self._patches, PATCHES),
            title=f"Attribution of “{labels_of(words)[position].text}”",
            caption=caption(self.method, self.options, self.model),
        )

    def text(self, *, special: bool = True, stop_words: Iterable[str] = ()) -> str:
        """Return the strongest tokens of each generated token as plain text; options as for `shaded`."""
        options: dict[str, Any] = {"special": special, "stop_words": list(stop_words)}
        views = [self.shaded(index, **options) for index in range(self.generated_tokens.length)]
        names = [label.text for label in labels_of(self.generated_tokens)]
        lines = [
            f"  {name}: {view.line} · {view.summary.verdict}".removesuffix(" · ")
            for name, view in zip(names, views, strict=True)
        ]
        return "\n".join(["Attribution of each generated token", *lines, "", views[-1].caption])

    def page(self, *, special: bool = True, stop_words: Iterable[str] = ()) -> Page:
        """Return an interactive HTML page: click a generated word for its attribution by layer and its map on each
        image of the prompt; click a word of the prompt for the generated words attributed to it.

        Args:
            special, stop_words: as for `shaded`; hidden tokens can be shown on the page.

        Write the page with `generation.page().save("generation.html")`.
        """
        m, words = self.prompt_tokens.length, self.prompt_tokens + self.generated_tokens
        full = np.concatenate([self.values, self.among_generated], axis=1)
        self_share = [None] * len(full) if self.self_share is None else self.self_share
        rows = [
            TextRow(label.text, (m + i,), m + i, full[i].T, at=m + i - 1, self_share=self_share[i])
            for i, label in enumerate(labels_of(words)[m:])
        ]
        content = TextPage(
            words=words,
            rows=rows,
            first=0 if self.images is None else next((word[0] for word in self.words()[0].values()), 0),
            model=self.model,
            caption=caption(self.method, self.options, ""),
            options=self.options,
            written=m,
            patches=self._patches,
            images=() if self.images is None else self.images.records(self.values, full.sum(axis=1)),
        )
        return content.page(special=special, stop_words=stop_words)

    @property
    def _patches(self) -> set[int]:
        """Positions of the image patches in the prompt."""
        return set() if self.images is None else {place for part in self.images.parts for place in part.positions}

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the shaded text as .png, .pdf or .svg; options as for `shaded`."""
        return self.shaded(**options).save(path)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, with `values` and `among_generated` as nested lists."""
        prompt, generated = self.prompt_tokens, self.generated_tokens
        return {
            "prompt_tokens": list(prompt.strings),
            "prompt_ids": list(prompt.ids),
            "generated_tokens": list(generated.strings),
            "generated_ids": list(generated.ids),
            "values": self.values.tolist(),
            "among_generated": self.among_generated.tolist(),
            "self_share": None if self.self_share is None else self.self_share.tolist(),
            "images": [] if self.images is None else [asdict(part) for part in self.images.parts],
            "probabilities": None if self.probabilities is None else self.probabilities.tolist(),
            "model": self.model,
            **method_record(TEXT_METHODS[self.method], self.options),
            "seconds": round(self.seconds, 4),
        }

    def _repr_mimebundle_(self, **_: Any) -> Any:
        return bundle(self.text(), self.shaded().figure())
