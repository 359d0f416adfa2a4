"""Why does a model find two sentences alike? Each word shaded by what it adds to their likeness.

    python examples/sentence_similarity.py [--model ../shared/data/minilm] ["sentence" "sentence"]

The likeness is the cosine between the mean vectors of both sentences, as sentence encoders such as all-MiniLM-L6-v2 are
used; its gradient speaks through generic attention explainability (GAE). Writes similarity-1.png and
similarity-2.png.
"""

import argparse
import sys

import torch
from torch import nn

import vitflow
from vitflow.methods.rollout import gradient_weighted_attention, relevance
from vitflow.text.languages import load_language_model
from vitflow.text.view import ShadedText
from vitflow.text.words import hide, words_of

SENTENCES = ("A man is playing a guitar on the stage.", "Someone performs music in front of an audience.")


def shaded(model: nn.Module, tokenizer: object, sentence: str, other: str) -> tuple[ShadedText, float]:
    """The first sentence, each token shaded by what it adds to the likeness with the second; and that likeness."""
    with torch.no_grad():
        goal = model(**tokenizer(other, return_tensors="pt")).last_hidden_state.mean(1)
    inputs = tokenizer(sentence, return_tensors="pt")
    with vitflow.record_attention(model, gradients=True) as trace:
        mean = model(**inputs).last_hidden_state.mean(1)
    similarity = nn.functional.cosine_similarity(mean, goal)
    layers = gradient_weighted_attention(
        [heads.detach() for heads in trace.heads()], trace.gradients_of(similarity).attentions, "mean"
    )
    tokens = inputs["input_ids"].shape[1]
    everywhere = torch.full((tokens,), 1 / tokens)
    weights = relevance(layers, readout=everywhere)[0] - everywhere  # without each token's own part, alike for all
    words = words_of(tokenizer, inputs["input_ids"][0].tolist())
    view = ShadedText(words, weights, hidden=hide(words), caption=f"gae, likeness to “{other}”")
    return view, float(similarity.detach())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", nargs="*", default=list(SENTENCES))
    parser.add_argument("--model", default="../shared/data/minilm", help="folder or hub id of a sentence encoder")
    given = parser.parse_args()
    if len(given.sentences) != 2:
        sys.exit(f"Expected two sentences, got {len(given.sentences)}.")
    try:
        encoder, tokenizer = load_language_model(given.model)
    except vitflow.VitflowError as error:
        sys.exit(f"{error}\nThis example needs a sentence encoder: --model sentence-transformers/all-MiniLM-L6-v2")
    encoder.requires_grad_(False)
    for number, (sentence, other) in enumerate((given.sentences, given.sentences[::-1]), start=1):
        view, similarity = shaded(encoder, tokenizer, sentence, other)
        print(view.text(), end="\n\n")
        print(view.save(f"similarity-{number}.png"))
    print(f"likeness (cosine): {similarity:.3f}")
