"""Coverage of the intervals of sampling: the share of patches whose 95 % interval contains what many masks give.

    python -m benchmarks.intervals [--data demo:8] [--model demo] [--checkpoint FILE]

The reference is the difference of means of 2,048 other masks of the same distribution, which no prior shrinks. The
regression's weights w imply such a difference for each patch: D⁻¹ Xᵀ X w, where X are the centred masks of the
reference, and D is the sum of their squares for each patch. Correct intervals have a coverage of about 0.95.
"""

import argparse
from pathlib import Path

import torch

import vitflow
from vitflow.evaluation import estimate_means, open_dataset
from vitflow.explaining.applying import affinity_of, recording_options
from vitflow.explaining.sampling import sample
from vitflow.methods.sampling import NORMAL_95, mean_differences, regress
from vitflow.recording.isolation import evaluating
from vitflow.registry.choices import choose_methods

MASKS, REFERENCE = 64, 2048


def coverage(explainer: vitflow.Explainer, image: object) -> float:
    """Return the coverage of the intervals of an image's predicted class, before refinement."""
    options = recording_options(choose_methods(["sampling"], {}), explainer.model)
    recorded = explainer.record(image, **options)
    target = int(explainer.logits(recorded.pixels)[0].argmax())
    trace = explainer.targeted(recorded, torch.tensor([target]))
    with torch.no_grad(), evaluating(explainer.model):
        few, many = (
            sample(trace, masks=masks, random_seed=seed, affinity="both", occlusion_batch=32)
            for seed, masks in enumerate((MASKS, REFERENCE))
        )
    prior = affinity_of(trace, "both", trace.grid()).matrix[0].cpu().double()
    ([kept], [scores]), ([other], [others]) = few, many
    posterior = regress(kept, scores[:, target], prior)
    masks, values = kept.double() - kept.double().mean(dim=0), scores[:, target].double()
    values = values - values.mean()
    prior = prior @ prior.T
    prior = prior * len(kept) / (masks @ prior @ masks.T).trace()
    inverse = torch.linalg.inv(masks @ prior @ masks.T + posterior.noise * torch.eye(len(kept)).double())
    variance = values @ inverse @ values / (len(kept) - 1)
    covariance = variance * (prior - prior @ masks.T @ inverse @ masks @ prior)
    implied = mean_differences(other, other)  # of each patch's presence: D⁻¹ Xᵀ X
    std = (implied @ covariance @ implied.T).diagonal().clamp_min(0.0).sqrt()
    reference = mean_differences(other, others[:, target])
    return float(((implied @ posterior.mean - reference).abs() <= NORMAL_95 * std).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="demo:8")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkpoint", type=Path)
    given = parser.parse_args()
    explainer = vitflow.Explainer(vitflow.load_model(given.model, checkpoint=given.checkpoint))
    values = [coverage(explainer, sample.read().image) for sample in open_dataset(given.data, limit=8).samples]
    [estimate] = estimate_means(torch.tensor(values).double().numpy()[:, None], limits=(0.0, 1.0))
    print(f"{len(values)} images, {MASKS} masks, {REFERENCE} others: {estimate}")


if __name__ == "__main__":
    main()
