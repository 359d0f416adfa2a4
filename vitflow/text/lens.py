"""The logit lens: which tokens' hidden states speak for a word."""

from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.models.languages import decoder_of, predicts_words
from vitflow.text.read_rows import ReadText
from vitflow.text.writing import refuse_looking_ahead


def logit_lens(text: ReadText, *, layer: int = -1) -> tuple[Tensor, Tensor]:
    """Rows of the logit lens, (h_l,j · e)⁺ for the output embedding e of each row's word, among the tokens up to it.

    Hidden states below the last layer go through the model's last norm, as those of the last layer do. The row's own
    token has no part in it, as its state is read to predict the word; its share is told beside. Rows sum to 1.

    Args:
        text: a pass with its hidden states.
        layer: which one is asked for; rows are given of all.

    Raises:
        UnsupportedModelError: the model does not write.

    Source: nostalgebraist, "interpreting GPT: the logit lens", 2020; on pictures as in Li et al., ICCV 2025 (TAM).
    """
    model: Any = text.trace.model
    if not predicts_words(model) or not text.hidden:
        raise UnsupportedModelError(
            f"The logit lens needs a model that writes, whose hidden states its output embedding reads, got "
            f"{type(model).__name__}: use rollout or attention."
        )
    refuse_looking_ahead(model)
    logits, norm = text.trace.logits, _last_norm(decoder_of(model))
    assert logits is not None
    numbers = [int(logits[0, place].argmax()) if word is None else word for place, word in text.targets]
    words = model.get_output_embeddings().weight[numbers].detach().float()
    places = torch.tensor([place for place, _ in text.targets], device=words.device).unsqueeze(1)
    tokens = torch.arange(text.readout.shape[-1], device=words.device)
    rows, shares = [], []
    for number, hidden in enumerate(text.hidden, start=1):
        states = hidden if number == len(text.hidden) or norm is None else norm(hidden)
        scores = (words @ states[0].detach().float().T).clamp_min(0.0).masked_fill(tokens > places, 0.0)
        own = tokens == places
        shares.append((scores * own).sum(dim=-1) / scores.sum(dim=-1).clamp_min(torch.finfo(scores.dtype).tiny))
        others = scores.masked_fill(own, 0.0)
        total = others.sum(dim=-1, keepdim=True)
        rows.append(others / torch.where(total > 0, total, 1.0))
    return torch.stack(rows), torch.stack(shares)


def _last_norm(decoder: nn.Module) -> nn.Module | None:
    """The norm that a decoder's tokens go through after its last layer; None where there is none to be seen."""
    norms = [module for module in decoder.children() if "norm" in type(module).__name__.lower()]
    return norms[-1] if norms else None
