"""A text that a language model writes: what each of its tokens rests on."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, printable, whole_number
from vitflow.explaining.captions import method_record
from vitflow.explaining.method import Method
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Score
from vitflow.methods.fusion import check_layer
from vitflow.text.images import PromptImages, less_earlier
from vitflow.text.labels import ENGLISH_STOP_WORDS, caption, hide, labels_of, spoken_words, text_of
from vitflow.text.layout import Words
from vitflow.text.method_table import TEXT_METHODS
from vitflow.text.shaded import ShadedText
from vitflow.text.sheet import Sheet
from vitflow.text.textpage import ShownImage, TextRow, page_of
from vitflow.viewer.pages import Page

# So many characters of a text tell it from others.
_SHOWN = 60


class WordSaliency(Saliency):
    """The map of a word over an image that a vision–language model was given."""

    __slots__ = ()

    @property
    def definition(self) -> Method:
        """The row of the table of methods for texts that made this map."""
        return TEXT_METHODS[self.method]


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What each generated token rests on: a weight for each token of the prompt, layer by layer.

    Of one prompt the axes are as below; of several there is a leading batch axis, `prompt_tokens` and
    `generated_tokens` are tuples with one entry for each prompt, prompts are padded on the left with weight 0 and
    `generation[i]` gives the i-th without padding. With n generated and m prompt tokens:

    Attributes:
        values: float32 [n, m, layers], M of the definitions: `values[i, :, l]` is the row, up to layer l + 1, at the
            position whose output *is* generated token i, over the prompt.
        among_generated: float32 [n, n, layers], the rest of these rows, which lies on generated tokens:
            `among_generated[i, k, l]` is the share of generated token k.
        prompt_tokens: the tokens of the prompt. With an encoder beside the decoder: those of the source, then those
            that the decoder begins with.
        generated_tokens: the tokens that were written.
        model: the model's id.
        method: the method's name.
        options: every option of the method with the value used.
        self_share: where the rows are relative to the receptive field, the raw share of each row's own token, float32
            [n, layers]; else None.
        seconds: time of the generation with the method.
        images: the images of the prompt, and where their patches stand among its tokens; None without.
        model_note: what a reader must know of the model, if it carries such a note.
    """

    values: NDArray[np.float32]
    among_generated: NDArray[np.float32]
    prompt_tokens: Words | tuple[Words, ...]
    generated_tokens: Words | tuple[Words, ...]
    model: str
    method: str
    options: Mapping[str, Any]
    self_share: NDArray[np.float32] | None = None
    seconds: float = 0.0
    images: PromptImages | None = None
    model_note: str = ""

    def __repr__(self) -> str:
        if not isinstance(self.prompt_tokens, Words) or not isinstance(self.generated_tokens, Words):
            told = f"{len(self)} prompts of at most {self.values.shape[2]} tokens"
        else:
            text = text_of(self.prompt_tokens + self.generated_tokens)
            written, prompt = self.generated_tokens.length, self.prompt_tokens.length
            told = f"{text[:_SHOWN]!r}, {written} tokens after a prompt of {prompt}"
        return f"Generation({told}, {self.method}, {self.values.shape[-1]} layers, {printable(self.model)})"

    def __len__(self) -> int:
        return len(self.prompt_tokens) if isinstance(self.prompt_tokens, tuple) else 1

    def __getitem__(self, number: int) -> "Generation":
        """The generation of one prompt of several, without padding."""
        if isinstance(self.prompt_tokens, Words) or isinstance(self.generated_tokens, Words):
            if number not in (0, -1):
                raise OptionError(f"Expected 0, as there is one prompt, got {number}.")
            return self
        prompt, written = self.prompt_tokens[number], self.generated_tokens[number]
        n, m = written.length, prompt.length
        start = self.values.shape[2] - m
        return replace(
            self,
            values=self.values[number, :n, start:],
            among_generated=self.among_generated[number, :n, :n],
            prompt_tokens=prompt,
            generated_tokens=written,
            self_share=None if self.self_share is None else self.self_share[number, :n],
        )

    @property
    def answer(self) -> str:
        """What was written, without what ends the text."""
        _, written = self._one_prompt()
        while written.length and written.special[-1]:
            written = written[:-1]
        return text_of(written).strip()

    def words(self, stop_words: Iterable[str] = ENGLISH_STOP_WORDS) -> tuple[dict[str, tuple[int, ...]], list[str]]:
        """The written words that say something, with the numbers of their tokens; and the rest.

        A word that is written again is called "heart (2)". The rest are stop words and punctuation, each once.

        Args:
            stop_words: words to count among the rest.
        """
        _, written = self._one_prompt()
        stopped, found, rest = {word.casefold() for word in stop_words}, dict[str, tuple[int, ...]](), list[str]()
        for word, places in spoken_words(written):
            if word.casefold() in stopped or not word[0].isalnum():
                rest += [] if word in rest else [word]
                continue
            name, number = word, 2
            while name in found:
                name, number = f"{word} ({number})", number + 1
            found[name] = places
        return found, rest

    def image(
        self,
        word: str | int | Sequence[int],
        *,
        image: int | None = None,
        role: str | None = None,
        layer: int | None = None,
        relative: bool = False,
        without_earlier: bool = False,
        through_tower: bool | None = None,
    ) -> Saliency:
        """What a written word rests on in an image of the prompt: a map on that image.

        The weights are shares of the word's whole row, so that their sum tells how much of it lies on the image at
        all: that is `facts["on_image"]`. Beside it stand the shares of the map that lie on the first patch and on the
        patches of the edges, where attention is often parked.

        Args:
            word: a word of the answer, whose tokens' rows are averaged; a token by its number (0 is the first); or the
                numbers of the tokens that make up a word, as `words` gives them.
            image: which image, 0 for the first; needed where there are several.
            role: "whole", "tile" or "thumbnail" for these parts of the image alone; by default all, added by area.
            layer: up to which layer, 1 for the first, −1 for the last; by default the method's own.
            relative: as a multiple of the row of the neutral prompt (Zhang et al., ICLR 2025).
            without_earlier: less what the maps of earlier written words explain of it (after Li et al., ICCV 2025):
                their sum, weighted by what the word's row has on them, times the factor that fits best; what is below
                0 is cut off.
            through_tower: carried on to the vision tower's own patches; by default where that was asked for.

        Raises:
            OptionError: no such word, image or part; or what an option needs was not asked for before.
        """
        _, written = self._one_prompt()
        if self.images is None:
            raise OptionError("Expected an image in the prompt, got none: pass image= to explain_generation.")
        chosen = self.images.chosen(image, role)
        several = [word] if isinstance(word, str | int) else word
        places = sorted({place for one in several for place in written.find(one)})
        if not places:
            raise OptionError("Expected a word or the numbers of its tokens, got none.")
        asked = self.options.get("layer", -1) if layer is None else layer
        index = check_layer("layer", asked, self.values.shape[2])
        rows = self.values[:, :, index].astype(np.float64)
        row = rows[places].mean(axis=0)
        whole = row.sum() + self.among_generated[places, :, index].mean(axis=0).sum()
        if without_earlier:
            row = less_earlier(row, rows[: places[0]], self.among_generated[places[0], : places[0], index])
        through = self._through(through_tower)
        grid, placement, facts = self.images.map_of(
            row, float(whole), chosen, layer=index, relative=relative, through_tower=through
        )
        number = self.images.parts[chosen[0]].image
        told = {"relative": relative, "without_earlier": without_earlier, "through_tower": through}
        return WordSaliency(
            grid=grid,
            placement=placement,
            image=self.images.images[number],
            source=self.images.sources[number],
            model=self.model,
            method=self.method,
            options={**self.options, **{name: True for name, value in told.items() if value}},
            class_specific=TEXT_METHODS[self.method].class_specific,
            score=Score(text_of(written[places[0] : places[-1] + 1]).strip()),
            facts={**facts, "layer": index + 1, **({"model_note": self.model_note} if self.model_note else {})},
            seconds=self.seconds,
        )

    def shaded(self, number: int, *, special: bool = True, stop_words: Iterable[str] = ()) -> ShadedText:
        """What one generated token rests on, over the prompt and what was written before it.

        Args:
            number: which generated token, 0 for the first, −1 for the last.
            special: show special tokens.
            stop_words: words to show without a shade; what is not shown is said below, with its share of the weight.

        Raises:
            OptionError: no such token, or several prompts: take `generation[0]`.
        """
        prompt, written = self._one_prompt()
        number = whole_number("the generated token", number, -written.length, written.length - 1) % written.length
        place = prompt.length + number
        words, hidden = self._seen(prompt + written, special, stop_words)
        weights = self._whole_rows()[number, :, -1]
        return ShadedText(
            words,
            weights,
            selected=(place - 1, place),
            self_share=float(weights[place - 1] if self.self_share is None else self.self_share[number, -1]),
            hidden=hidden,
            title=f"What “{labels_of(words)[place].text}” rests on",
            caption=caption(self.method, self.options, self.model),
        )

    def sheet(
        self, layer: int = -1, *, generated: bool = False, special: bool = True, stop_words: Iterable[str] = ()
    ) -> Sheet:
        """A row for each generated token, a column for each token of the prompt.

        Args:
            layer: up to which layer, 1 for the first, −1 for the last.
            generated: a column for each generated token, too, instead of their sum.
            special, stop_words: as for `shaded`.
        """
        prompt, written = self._one_prompt()
        index = check_layer("layer", layer, self.values.shape[2])
        words, hidden = self._seen(prompt + written if generated else prompt, special, stop_words)
        return Sheet(
            words,
            self._whole_rows()[:, : words.length, index],
            [label.text for label in labels_of(written)],
            rest=None if generated else np.nansum(self.among_generated[:, :, index], axis=1),
            rest_name="generated",
            self_tokens=list(range(prompt.length - 1, prompt.length - 1 + written.length)),
            self_share=None if self.self_share is None else float(np.mean(self.self_share[:, index])),
            hidden=hidden,
            title="What each generated token rests on",
            caption=caption(self.method, self.options, self.model),
        )

    def page(
        self,
        *,
        special: bool = True,
        stop_words: Iterable[str] = (),
        relative: bool = False,
        through_tower: bool | None = None,
    ) -> Page:
        """One page for a browser: click a written word for what it rests on, layer by layer, and for its map on each
        image of the prompt; one of the prompt for who rests on it.

        Args:
            special, stop_words: as for `shaded`: what they hide can be shown again there.
            relative, through_tower: as for `image`.

        `found.page().save("written.html")` writes it.
        """
        prompt, written = self._one_prompt()
        m, words = prompt.length, prompt + written
        whole = np.concatenate([self.values, self.among_generated], axis=1)
        own = [None] * written.length if self.self_share is None else self.self_share
        rows = [
            TextRow(label.text, (place,), place, whole[place - m].T, at=place - 1, self_share=own[place - m])
            for place, label in enumerate(labels_of(words)[m:], start=m)
        ]
        parts = () if self.images is None else self.images.parts
        shown: list[ShownImage] = []
        first = 0
        if self.images is not None:
            through, wholes = self._through(through_tower), whole.sum(axis=1)
            shown = self.images.shown(self.values, wholes, relative=relative, through_tower=through)
            first = next((places[0] for places in self.words()[0].values()), 0)
        return page_of(
            words,
            rows,
            first=first,
            method=self.method,
            options=self.options,
            model=self.model,
            special=special,
            stop_words=stop_words,
            written=m,
            patches={place for part in parts for place in part.positions},
            images=shown,
        )

    def _through(self, asked: bool | None) -> bool:
        """Whether maps are carried on through the tower: as asked, or wherever it was recorded."""
        return self.images is not None and self.images.tower is not None if asked is None else asked

    def _seen(self, words: Words, special: bool, stop_words: Iterable[str]) -> tuple[Words, dict[int, str]]:
        """The words of a view, and what it leaves out by position, and why; the patches of images are no words."""
        parts = () if self.images is None else self.images.parts
        patches = {place: "patches of images" for part in parts for place in part.positions}
        hidden = hide(words, special=not special, stop_words=stop_words) | patches
        plain = tuple(special and place not in patches for place, special in enumerate(words.special))
        return replace(words, special=plain), hidden

    def _one_prompt(self) -> tuple[Words, Words]:
        """The tokens of the prompt and the written ones; OptionError where there are several prompts."""
        if not isinstance(self.prompt_tokens, Words) or not isinstance(self.generated_tokens, Words):
            raise OptionError(f"Expected one prompt to draw, got {len(self)}: take generation[0].")
        return self.prompt_tokens, self.generated_tokens

    def _whole_rows(self) -> NDArray[np.float64]:
        """Rows over prompt and generated tokens, [n, m + n, layers]; NaN for what came later."""
        rows = np.concatenate([self.values, self.among_generated], axis=1, dtype=np.float64)
        later = np.arange(rows.shape[1]) >= self.values.shape[1] + np.arange(len(rows))[:, None]
        rows[later] = np.nan
        return rows

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the sheet as .png, .pdf or .svg; options as for `sheet`."""
        return self.sheet(**options).save(path)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: `values` [n, m, layers] and `among_generated` [n, n, layers] as nested lists."""
        prompt, written = self._one_prompt()
        return {
            "prompt_tokens": list(prompt.strings),
            "prompt_ids": list(prompt.ids),
            "generated_tokens": list(written.strings),
            "generated_ids": list(written.ids),
            "values": self.values.tolist(),
            "among_generated": self.among_generated.tolist(),
            "own": None if self.self_share is None else self.self_share.tolist(),
            "images": [] if self.images is None else self.images.to_list(),
            "model": self.model,
            **method_record(TEXT_METHODS[self.method], self.options),
            "seconds": round(self.seconds, 4),
        }

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        found = [self[number].sheet()._repr_mimebundle_(include, exclude) for number in range(len(self))]
        return {kind: "\n".join(one[kind] for one in found) for kind in found[0]}
