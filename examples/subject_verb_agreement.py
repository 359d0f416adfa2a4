"""Which words decide a verb's number? The tables of Abnar & Zuidema 2020, with a small model that is trained here.

    python examples/subject_verb_agreement.py [--sentences 200]

A small encoder learns from drawn sentences whether the verb to come is singular or plural ("the key to the cabinets" →
singular). Then, as in the paper, the [CLS] token's raw attention, rollout and flow of each layer are ranked against
occlusion scores (how much the right answer loses without a word) and against input gradients. Some three minutes on one
core; the paper's numbers are printed beside.
"""

import argparse
import random
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import vitflow
from vitflow.analysis.comparison import spearman

_LEXICON = """
key cabinet author book window friend report engine river teacher garden farmer song letter road doctor
old new red small quiet famous broken large
to near behind of with from
really often clearly never
"""
NOUNS, ADJECTIVES, PREPOSITIONS, ADVERBS = (line.split() for line in _LEXICON.strip().splitlines())
WORDS = ["[PAD]", "[UNK]", "[CLS]", "the", "that", "saw", *NOUNS, *(f"{noun}s" for noun in NOUNS)]
WORDS += [*ADJECTIVES, *PREPOSITIONS, *ADVERBS]
NUMBER = {word: number for number, word in enumerate(WORDS)}
PAD, UNK, CLS = 0, 1, 2

# Tables 1 and 2 of the paper: mean Spearman correlation over 2,000 sentences, layers 1 to 6.
PAPER = {
    "occlusion": {
        "raw attention": (0.69, 0.10, -0.11, -0.09, 0.20, 0.29),
        "rollout": (0.32, 0.38, 0.51, 0.62, 0.70, 0.71),
        "flow": (0.32, 0.44, 0.70, 0.70, 0.71, 0.70),
    },
    "input gradient": {
        "raw attention": (0.53, 0.16, -0.06, 0.00, 0.24, 0.46),
        "rollout": (0.22, 0.27, 0.39, 0.47, 0.53, 0.54),
        "flow": (0.22, 0.31, 0.54, 0.61, 0.60, 0.61),
    },
}


def draw_sentence(chance: random.Random) -> tuple[list[str], int]:
    """A sentence up to its verb, and whether that verb is plural; other nouns may mislead."""

    def phrase(plural: bool) -> list[str]:
        adjective = [chance.choice(ADJECTIVES)] if chance.random() < 0.4 else []
        return ["the", *adjective, chance.choice(NOUNS) + "s" * plural]

    plural = chance.random() < 0.5
    words = phrase(plural)
    for _ in range(chance.choice((0, 1, 1, 2))):
        words += [chance.choice(PREPOSITIONS), *phrase(chance.random() < 0.5)]
    if chance.random() < 0.3:
        words += ["that", *phrase(chance.random() < 0.5), "saw"]
    if chance.random() < 0.3:
        words.append(chance.choice(ADVERBS))
    return words, int(plural)


def encode(sentences: list[list[str]]) -> tuple[Tensor, Tensor]:
    """Numbers [sentences, tokens] and the mask of what is no padding; each sentence begins with [CLS]."""
    length = 1 + max(map(len, sentences))
    ids = torch.full((len(sentences), length), PAD)
    for row, words in zip(ids, sentences, strict=True):
        row[: 1 + len(words)] = torch.tensor([CLS, *(NUMBER[word] for word in words)])
    return ids, (ids != PAD).long()


def train(steps: int, batch: int = 64) -> nn.Module:
    """Train an encoder of the paper's depth and heads; a word in twenty is [UNK], as rare words are."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=8,
            max_position_embeddings=64,
            num_labels=2,
        )
    )
    chance, begun, right = random.Random(0), time.process_time(), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    model.train()
    for step in range(1, steps + 1):
        words, plural = zip(*(draw_sentence(chance) for _ in range(batch)), strict=True)
        ids, mask = encode(list(words))
        ids = torch.where((torch.rand(ids.shape) < 0.05) & (ids > CLS), UNK, ids)
        logits = model(input_ids=ids, attention_mask=mask).logits
        truth = torch.tensor(plural)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, truth).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        right += (logits.argmax(-1) == truth).float().mean().item() / 200
        if step % 200 == 0:
            print(f"step {step}: {right:.1%} right, {time.process_time() - begun:.0f} s of the processor", flush=True)
            right = 0.0
    return model.eval()


def references(model: nn.Module, ids: Tensor, plural: int) -> dict[str, np.ndarray]:
    """Occlusion and input gradient of each word of one sentence [1, tokens], without [CLS]."""
    blanked = ids.repeat(ids.shape[1], 1)
    blanked[torch.arange(1, ids.shape[1]), torch.arange(1, ids.shape[1])] = UNK  # the first row stays whole
    with torch.no_grad():
        probability = model(input_ids=blanked).logits.softmax(-1)[:, plural]
    vectors = model.get_input_embeddings()(ids).detach().requires_grad_()
    [gradient] = torch.autograd.grad(model(inputs_embeds=vectors).logits.softmax(-1)[0, plural], vectors)
    return {
        "occlusion": (probability[0] - probability[1:]).numpy(),
        "input gradient": gradient[0, 1:].norm(dim=-1).numpy(),
    }


def layer_maps(model: nn.Module, ids: Tensor) -> Iterator[tuple[str, int, np.ndarray]]:
    """Raw attention, rollout and flow of [CLS], as if each layer were the last: method, layer, weights of the words."""
    for weighting, reported in ((False, ""), ("output", ", value-weighted")):
        with vitflow.record_attention(model, head_fusion="mean", value_weighted=weighting) as trace, torch.no_grad():
            model(input_ids=ids)
        layers, first = trace.attentions, torch.eye(ids.shape[1])[0]
        for count in range(1, len(layers) + 1):
            yield f"raw attention{reported}", count, layers[count - 1][0, 0, 1:].numpy()
            rolled = vitflow.attention_rollout(layers[:count], readout=first)
            yield f"rollout{reported}", count, rolled[0, 1:].numpy()
            yield f"flow{reported}", count, vitflow.attention_flow(layers[:count], source=0).values[0, 1:].numpy()


def measure(model: nn.Module, sentences: int) -> tuple[dict[tuple[str, str], np.ndarray], float]:
    """Spearman per reference and method, [layers, sentences], of rightly answered sentences; share of right answers."""
    chance, actual, drawn, done = random.Random(1), dict[tuple[str, str], list[list[float]]](), 0, 0
    while done < sentences:
        words, plural = draw_sentence(chance)
        ids, _ = encode([words])
        drawn += 1
        with torch.no_grad():
            if int(model(input_ids=ids).logits.argmax()) != plural:
                continue
        done += 1
        held = references(model, ids, plural)
        for method, layer, weights in layer_maps(model, ids):
            for name, reference in held.items():
                rows = actual.setdefault((name, method), [[] for _ in range(6)])
                rho = spearman(weights, reference)
                rows[layer - 1].append(np.nan if rho is None else rho)
    return {key: np.array(rows) for key, rows in actual.items()}, done / drawn


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1600)
    given = parser.parse_args()
    actual, right = measure(train(given.steps), given.sentences)
    print(f"\n{given.sentences} sentences, {right:.1%} answered right\n")
    for reference, paper in PAPER.items():
        print(f"| Spearman with {reference} | L1 | L2 | L3 | L4 | L5 | L6 |\n|---|---|---|---|---|---|---|")
        for (name, method), rows in actual.items():
            if name == reference:
                cells = [f"{np.nanmean(row):.2f} ± {np.nanstd(row):.2f}" for row in rows]
                print(f"| {method} | {' | '.join(cells)} |")
            if name == reference and method in paper:
                print(f"| (the paper: {method}) | {' | '.join(f'{value:.2f}' for value in paper[method])} |")
        print()
