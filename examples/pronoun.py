"""Whom does a pronoun mean? The sentences of Abnar & Zuidema's Figure 4, read by BERT.

    python examples/pronoun.py [--model bert-base-uncased]

BERT fills the gap in "the author talked to Sara about [MASK] book": is it his or her book, and does the gap rest on the
author or on Sara? Needs a masked language model, from the hub or a folder; without one it says so.
"""

import argparse
import sys

import torch

import vitflow
from vitflow.text.languages import load_language_model

# Each with the two words that the pronoun may mean.
SENTENCES = (
    ("the author talked to sara about {mask} book.", ("author", "sara")),
    ("mary convinced john of {mask} love.", ("mary", "john")),
)
METHODS = (("attention", {}), ("rollout", {"preset": "paper"}), ("flow", {"preset": "paper"}))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base-uncased", help="hub id or folder of a masked language model")
    given = parser.parse_args()
    try:
        model, tokenizer = load_language_model(given.model)
    except vitflow.VitflowError as error:
        sys.exit(f"{error}\nThis example needs a masked language model: the hub, or --model FOLDER.")
    for sentence, candidates in SENTENCES:
        text = sentence.format(mask=tokenizer.mask_token)
        inputs = tokenizer(text, return_tensors="pt")
        gap = int((inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0])
        with torch.no_grad():
            logits = model(**inputs).logits[0, gap]
        his, her = logits[tokenizer.convert_tokens_to_ids(["his", "her"])].softmax(-1).tolist()
        print(f"{text}  his {his:.0%}, her {her:.0%}")
        for method, options in METHODS:
            reading = vitflow.text.explain_text(
                text, model=model, tokenizer=tokenizer, token=gap, method=method, **options
            )
            shares = [float(reading.weights[list(reading.tokens.find(word))].sum()) for word in candidates]
            reported = ", ".join(
                f"{word} {share / sum(shares):.0%}" for word, share in zip(candidates, shares, strict=True)
            )
            print(f"  {method}: {reported}")
