"""Summary of a row of weights: shares of special and hidden tokens, and how uniform it is."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ShapeError
from vitflow.text.words import Words

#: Reason to hide the image patches of a prompt.
PATCHES = "image patches"
#: Description of a row by its entropy relative to that of a uniform distribution: first one whose limit is exceeded.
VERDICTS = (
    (0.95, "nearly uniform: uninformative"),
    (0.8, "spread over many words"),
    (0.5, "some words stand out"),
    (0.0, "concentrated on few words"),
)


def percent(share: float) -> str:
    """Format a share in whole percent; shares that would round to 0 as "<1".

    >>> percent(0.234), percent(0.002), percent(-0.1), percent(0.0)
    ('23', '<1', '−10', '0')
    """
    if not np.isfinite(share):
        return "–"
    number = round(100 * share)
    return "<1" if number == 0 and share > 0 else f"{number}".replace("-", "−")


def check_weights(weights: Any, tokens: int) -> NDArray[np.float64]:
    """Return weights as float64 after checking that there is one per token; NaN means not seen.

    Raises:
        ShapeError: wrong shape, infinite values, or empty.
    """
    array = np.asarray(weights.detach().cpu() if hasattr(weights, "detach") else weights)
    if array.dtype.kind not in "fiub" or array.shape != (tokens,) or not tokens:
        raise ShapeError(f"Expected {tokens} weights, one per token, got {array.dtype} {list(array.shape)}.")
    if np.isinf(array).any():
        raise ShapeError("Expected finite weights, or NaN for unseen tokens, got infinite values.")
    return array.astype(np.float64)


@dataclass(frozen=True, slots=True)
class RowSummary:
    """Summary of a row of weights, as shares of the sum of their absolute values.

    Attributes:
        special: share of special tokens; None if the text has none.
        first: share of the first token.
        self_share: share of the explained token; None if there is none.
        hidden: share of the hidden tokens by reason.
        entropy: entropy in bits, over the seen tokens without `left_out`.
        max_entropy: entropy of a uniform distribution over these tokens, in bits.

    >>> str(RowSummary.of([0.5, 0.25, 0.25], Words(("<s>", "key", " is"), (0, 1, 2), (True, False, False))))
    'special tokens 50 % · first token 50 % · spread over many words (entropy 1.50 of 1.58 bits)'
    """

    special: float | None
    first: float
    self_share: float | None
    hidden: Mapping[str, float]
    entropy: float
    max_entropy: float

    @classmethod
    def of(
        cls,
        weights: Any,
        words: Words,
        *,
        selected: Sequence[int] = (),
        self_share: float | None = None,
        hidden: Mapping[int, str] | None = None,
        left_out: Collection[int] = (),
    ) -> "RowSummary":
        """Summarise a row of weights [tokens].

        Args:
            weights: the row, NaN for unseen tokens.
            words: the tokens.
            selected: positions of the explained token.
            self_share: its share, if it is not among the weights.
            hidden: hidden positions with the reason.
            left_out: positions that the entropy does not count, such as image patches, which have a map of their own.
        """
        checked = check_weights(weights, words.length)
        shares = np.abs(np.nan_to_num(checked))
        shares = shares / (shares.sum() or 1.0)
        if selected and self_share is None:
            self_share = float(shares[list(selected)].sum())
        reasons: dict[str, float] = {}
        for position, reason in (hidden or {}).items():
            reasons[reason] = reasons.get(reason, 0.0) + float(shares[position])
        special, counted = np.array(words.special, dtype=bool), ~np.isnan(checked)
        counted[list(left_out)] = False
        positive = shares[counted & (shares > 0)]
        positive = positive / (positive.sum() or 1.0)
        return cls(
            special=float(shares[special].sum()) if special.any() else None,
            first=float(shares[0]),
            self_share=self_share,
            hidden=reasons,
            entropy=float(-(positive * np.log2(positive)).sum()) + 0.0,
            max_entropy=float(np.log2(max(int(counted.sum()), 1))) if positive.size else 0.0,
        )

    @property
    def verdict(self) -> str:
        """Description of how uniform the row is; empty for fewer than two tokens, or without weight."""
        if not self.max_entropy:
            return ""
        return next(text for limit, text in VERDICTS if self.entropy > limit * self.max_entropy or not limit)

    def __str__(self) -> str:
        parts = [] if self.special is None else [f"special tokens {self.special:.0%}"]
        parts.append(f"first token {self.first:.0%}")
        if self.self_share is not None:
            parts.append(f"query token {self.self_share:.0%}")
        if self.verdict:
            parts.append(f"{self.verdict} (entropy {self.entropy:.2f} of {self.max_entropy:.2f} bits)")
        return " · ".join(parts).replace("%", " %").replace("-", "−")

    @property
    def hidden_shares(self) -> str:
        """Sentence on the hidden tokens and their share of the weight; empty if nothing is hidden."""
        parts = [f"{why} ({share:.0%} of the weight)".replace("%", " %") for why, share in self.hidden.items()]
        return f"Not shown: {', '.join(parts)}." if parts else ""
