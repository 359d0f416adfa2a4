"""A text that a language model writes: what each of its tokens rests on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vitflow.errors import OptionError
from vitflow.methods.sequences import Words


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
        prompt_tokens: the tokens of the prompt.
        generated_tokens: the tokens that were written.
        model: the model's id.
        method: the method's name.
        options: every option of the method with the value used.
        own: where the rows are relative to the receptive field, the raw share of each row's own token, float32
            [n, layers]; else None.
        facts: what else belongs beside it.
        seconds: time of the generation with the method.
    """

    values: NDArray[np.float32]
    among_generated: NDArray[np.float32]
    prompt_tokens: Words | tuple[Words, ...]
    generated_tokens: Words | tuple[Words, ...]
    model: str
    method: str
    options: Mapping[str, Any]
    own: NDArray[np.float32] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

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
            own=None if self.own is None else self.own[number, :n],
        )


def explain_generation(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    method: str = "rollout",
    method_options: Mapping[str, Any] | None = None,
    **generate: Any,
) -> Generation:
    """Let a model write, and tell what each token that it writes rests on.

    Args:
        model: a causal language model of `transformers`.
        inputs: the prompt, as the tokenizer makes it (input_ids, attention_mask), ids [batch, tokens], or a text.
        tokenizer: its tokenizer; by default the one saved beside it. Without one, tokens are told by their numbers.
        method: "rollout", "attention", "flow" or "gae".
        method_options: the method's own, such as head_fusion="max", `causal` ("raw" or "receptive_field"), or
            preset="paper".
        generate: as `model.generate` takes them, such as max_new_tokens=20 or do_sample=True.

    Raises:
        VitflowError: the model or an option is wrong; the message says which and what to do.
    """
    raise NotImplementedError
