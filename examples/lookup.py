"""A task with a truth for words: look a key's value up, far back in the sequence.

    python examples/lookup.py [--model lookup-model] [--cases 500]

A small causal model learns drawn lookups: "k1 v7 k3 v2 … k3" is followed by "v2". What its answer rests on is known:
the one token v2 that stood behind k3. The script trains the model in two minutes on one core and keeps it, with its
tokenizer, in a folder that `vitflow read --model` takes; where that folder is there already, it is used. The table says
for each method how often the looked-up token is the most important one of those that were read.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import vitflow
from vitflow.methods.fusion import raw_attention
from vitflow.methods.rollout import gradient_weighted_attention, relevance

PAIRS, KEYS, VALUES = 12, 24, 24
TOKENS = ["<s>", *(f"k{number}" for number in range(1, KEYS + 1)), *(f"v{number}" for number in range(1, VALUES + 1))]


def draw_lookups(count: int, pairs: int, queries: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences of `pairs` keys with values, then `queries` of these keys, each with its value again.

    Returns:
        Tokens [count, 1 + 2 · pairs + 2 · queries], and where each query's value stood in the pairs, [count, queries].
    """

    def draw(most: int, number: int) -> Tensor:
        return torch.rand(count, most, generator=generator).argsort(dim=1)[:, :number]

    keys, values, requested = draw(KEYS, pairs) + 1, draw(VALUES, pairs) + 1 + KEYS, draw(pairs, queries)
    reported = torch.stack([keys, values], dim=-1).flatten(1)
    again = torch.stack([keys.gather(1, requested), values.gather(1, requested)], dim=-1).flatten(1)
    return torch.cat([torch.zeros(count, 1, dtype=torch.long), reported, again], dim=1), 2 + 2 * requested


def train(model: nn.Module, *, seconds: float = 600, batch: int = 64, rate: float = 2e-3, last: int = 400) -> None:
    """Train on fresh draws until all is right: of two pairs at first, of one more whenever 95 % are right."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    pairs, recent, step, begun = 2, list[float](), 0, time.process_time()
    while last and time.process_time() - begun < seconds:
        ids, _ = draw_lookups(batch, pairs, pairs, generator)
        requested = 1 + 2 * pairs + 2 * torch.arange(pairs)
        logits, truth = model(input_ids=ids).logits[:, requested], ids[:, requested + 1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), truth.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent, step = [*recent[-29:], (logits.argmax(-1) == truth).float().mean().item()], step + 1
        share = sum(recent) / len(recent)
        if step % 200 == 0:
            seconds_used = time.process_time() - begun
            print(f"step {step}: {pairs} pairs, {share:.1%} right, {seconds_used:.0f} s of the processor", flush=True)
        if len(recent) == 30 and share > 0.95 and pairs < PAIRS:
            pairs, recent = pairs + 1, []
        elif pairs == PAIRS and share > 0.95:
            last -= 1
            optimizer.param_groups[0]["lr"] = rate * last / 400


def trained(folder: Path) -> nn.Module:
    """The model of a folder; made and kept there, if there is none."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(TOKENS),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                max_position_embeddings=128,
                bos_token_id=0,
                eos_token_id=None,
            )
        )
        train(model)
        model.save_pretrained(folder)
        _save_tokenizer(folder)
    return LlamaForCausalLM.from_pretrained(folder).eval()


def _save_tokenizer(folder: Path) -> None:
    """A tokenizer that takes words between spaces and begins each text with <s>."""
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    words = [{"Sequence": {"id": kind, "type_id": 0}} for kind in "AB"]
    special = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    model = {"type": "WordLevel", "vocab": {token: number for number, token in enumerate(TOKENS)}, "unk_token": "<s>"}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [start, words[0]],
                    "pair": [start, *words],
                    "special_tokens": special,
                },
                "model": model,
            }
        )
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>")
    tokenizer.save_pretrained(folder)


def rows_of(model: nn.Module, ids: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Return each method's map for the last token of each text, [texts, tokens], by name."""
    with vitflow.record_attention(model, values=True, gradients=True) as trace:
        logits = model(input_ids=ids).logits
    last = torch.zeros(ids.shape[1])
    last[-1] = 1.0
    scores = logits[:, -1].gather(1, truth[:, None])
    gradients = trace.gradients_of(scores).attentions
    actual: dict[str, Tensor] = {
        "random": torch.rand(ids.shape, generator=torch.Generator().manual_seed(int(ids.sum())))
    }
    for weighting, reported in ((False, ""), (True, ", weighted by norm"), ("output", ", weighted along the output")):
        fused = [layer.detach() for layer in trace.fused("mean", value_weighted=weighting)]
        actual[f"raw attention, last layer{reported}"] = raw_attention(fused[-1], readout=last, num_prefix_tokens=0)
        for causal in ("raw", "receptive_field"):
            relative = reported + (", receptive field" if causal == "receptive_field" else "")
            actual[f"rollout{relative}"] = vitflow.attention_rollout(fused, causal=causal, readout=last)
            for layers in ("all", 3, 2):
                flow = vitflow.attention_flow(fused, source=ids.shape[1] - 1, causal=causal, layers=layers)
                window = "all layers" if layers == "all" else f"last {layers} layers"
                actual[f"flow, {window}{relative}"] = flow.normalized
        heads = [one.detach() for one in trace.heads(value_weighted=weighting)]
        actual[f"GAE{reported}"] = relevance(gradient_weighted_attention(heads, gradients, "mean"), readout=last)
    return actual


def measure(model: nn.Module, cases: int, batch: int = 50) -> tuple[dict[str, list[float]], float]:
    """For each method the share of cases with the looked-up token first, its mean share of the weight, and that of <s>.

    The asked token itself stands apart; the second result is the share of right answers.
    """
    generator = torch.Generator().manual_seed(1)
    sums: dict[str, Tensor] = {}
    right, done = 0, 0
    while done < cases:
        ids, places = draw_lookups(min(batch, cases - done), PAIRS, 1, generator)
        read, truth, place = ids[:, :-1], ids[:, -1], places[:, 0]
        with torch.no_grad():
            right += int((model(input_ids=read).logits[:, -1].argmax(-1) == truth).sum())
        for name, rows in rows_of(model, read, truth).items():
            others = rows.double()[:, :-1]
            others = others / others.sum(1, keepdim=True).clamp_min(1e-300)
            chosen = others.gather(1, place[:, None])[:, 0]
            reported = torch.stack([(others.argmax(1) == place).double(), chosen, others[:, 0]]).sum(1)
            sums[name] = sums.get(name, torch.zeros(3, dtype=torch.float64)) + reported
        done += len(ids)
    return {name: (total / cases).tolist() for name, total in sums.items()}, right / cases


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("lookup-model"), help="folder of the model")
    parser.add_argument("--cases", type=int, default=500)
    given = parser.parse_args()
    actual, right = measure(trained(given.model), given.cases)
    print(f"\n{given.cases} lookups among {PAIRS} pairs, {right:.1%} answered right\n")
    print("| method | looked-up token first | its share | share of <s> |\n|---|---|---|---|")
    for name, (first, share, start) in actual.items():
        print(f"| {name} | {first:.1%} | {share:.2f} | {start:.2f} |")
