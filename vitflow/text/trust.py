"""What to know before believing a row of weights: how much lies on special and first tokens, and how flat it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ShapeError
from vitflow.methods.sequence.layout import Words


def check_weights(weights: Any, shape: tuple[int | str, ...]) -> NDArray[np.float64]:
    """Weights as float64 of a shape, of which a name stands for any length; NaN where a token is not seen.

    Raises:
        ShapeError: another shape, infinite values, or nothing.
    """
    array = np.asarray(weights.detach().cpu() if hasattr(weights, "detach") else weights)
    fits = array.ndim == len(shape) and all(
        isinstance(want, str) or want == have for want, have in zip(shape, array.shape, strict=True)
    )
    if array.dtype.kind not in "fiub" or not fits or not array.size:
        wanted = ", ".join(map(str, shape))
        raise ShapeError(f"Expected weights [{wanted}], one for each token, got {array.dtype} {list(array.shape)}.")
    if np.isinf(array).any():
        raise ShapeError("Expected finite weights, or NaN for tokens that are not seen, got an infinite one.")
    return array.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Trust:
    """Shares of a row of weights, without their signs.

    Attributes:
        special: on special tokens; None where the text has none.
        first: on the first token.
        own: on the token that is asked about; None where none is.
        hidden: on what the view leaves out, by the reason.
        entropy: in bits.
        most: the entropy of equal weights on as many tokens.

    >>> str(Trust.of([0.5, 0.25, 0.25], Words(("<s>", "key", " is"), (0, 1, 2), (True, False, False))))
    'special tokens 50 % · first token 50 % · entropy 1.50 of 1.58 bits'
    """

    special: float | None
    first: float
    own: float | None
    hidden: Mapping[str, float]
    entropy: float
    most: float

    @classmethod
    def of(
        cls, weights: Any, words: Words, *, own: float | None = None, hidden: Mapping[int, str] | None = None
    ) -> "Trust":
        """What a row of weights [tokens] says of itself; `own` is the share of the token that is asked about."""
        shares = np.abs(np.nan_to_num(check_weights(weights, (words.length,))))
        shares = shares / (shares.sum() or 1.0)
        positive, special = shares[shares > 0], np.array(words.special, dtype=bool)
        given = dict(hidden or {})
        seen = words.length - int(np.isnan(check_weights(weights, (words.length,))).sum())
        return cls(
            float(shares[special].sum()) if special.any() else None,
            float(shares[0]),
            own,
            {why: float(sum(shares[p] for p in given if given[p] == why)) for why in dict.fromkeys(given.values())},
            float(-(positive * np.log2(positive)).sum()) + 0.0,
            float(np.log2(max(seen, 1))),
        )

    def __str__(self) -> str:
        told = [] if self.special is None else [f"special tokens {self.special:.0%}"]
        told.append(f"first token {self.first:.0%}")
        if self.own is not None:
            told.append(f"its own token {self.own:.0%}")
        told.append(f"entropy {self.entropy:.2f} of {self.most:.2f} bits")
        return " · ".join(told).replace("%", " %").replace("-", "−")

    @property
    def left_out(self) -> str:
        """What the view leaves out and how much of the weight lies there; empty where it shows all."""
        told = [f"{why} ({share:.0%} of the weight)".replace("%", " %") for why, share in self.hidden.items()]
        return f"Not shown: {', '.join(told)}." if told else ""
