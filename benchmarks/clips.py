"""Do the shares of frames find the frames that show an object?

    python -m benchmarks.clips [--clips 200] [--figure clip.png]
    python -m benchmarks.clips --train FILE --minutes 25
    python -m benchmarks.clips --video FILE [--clips 200] [--method gae] [--figure clip.png]

Each drawn clip has eight frames of one scene. The named object is only in frames a to b, other objects are in all of
them. A clip counts as right if every frame with the object has a larger share than every other frame. The same clips
with shuffled frames must give the same shares, shuffled. For comparison: the sums of the unscaled maps of the frames.

The second command trains a small VideoMAE to name all objects of a drawn clip, of which each is in two to eight of its
frames. The third asks the same of its maps, whose tubelets cover two frames each; the object is in one to three
tubelets. The frames are shuffled by tubelets.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import vitflow
from benchmarks.localisation import train
from vitflow.demo import CLASS_NAMES, FIRST_TRAINING_SEED, draw_ground, draw_image
from vitflow.evaluation.measures.localisation import localise

FRAMES, FIRST_SEED = 8, 700_000


def drawn_clip(seed: int) -> tuple[np.ndarray, int, slice] | None:
    """Frames, the class of the object, and the frames that show it; None if the scene has a single object."""
    drawn, random = draw_image(seed), np.random.default_rng(seed)
    if len(drawn.labels) < 2:
        return None
    label = int(random.choice(drawn.labels))
    start = int(random.integers(0, FRAMES - 2))
    shown = slice(start, min(start + int(random.integers(2, 5)), FRAMES))
    without = drawn.image.copy()
    mask = drawn.mask_of(label).astype(bool)
    without[mask] = draw_ground(seed)[mask]
    frames = np.stack([without] * FRAMES)
    frames[shown] = drawn.image
    return frames, label, shown


def separates(shares: np.ndarray, shown: slice) -> bool:
    """Return True if every frame with the object has a larger share than every other frame."""
    return bool(shares[shown].min() > np.delete(shares, np.r_[shown]).max())


class DrawnClips(Dataset):
    """Clips, normalised, and the classes of their objects."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed, classes = FIRST_TRAINING_SEED + 5_000_000 + index, torch.zeros(len(CLASS_NAMES))
        drawn, random = draw_image(seed, 64), np.random.default_rng(seed)
        frames = np.stack([draw_ground(seed, 64)] * FRAMES)
        for label in drawn.labels:
            mask, length = drawn.mask_of(label).astype(bool), int(random.integers(2, FRAMES + 1))
            start = int(random.integers(0, FRAMES - length + 1))
            frames[start : start + length][:, mask] = drawn.image[mask]
            classes[label] = 1.0
        return torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 127.5 - 1, classes


def video_model(weights: Path | None = None) -> torch.nn.Module:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    clips = {"image_size": 64, "patch_size": 8, "num_frames": FRAMES, "tubelet_size": 2}
    config = VideoMAEConfig(**sizes, **clips, num_labels=8, problem_type="multi_label_classification")
    model = VideoMAEForVideoClassification(config)
    if weights is not None:
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


def class_loss(output: Any, classes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(output.logits, classes)


def drawn_video(seed: int) -> tuple[np.ndarray, int, slice, np.ndarray] | None:
    """Frames, the class of the object, the tubelets that show it along time, and those patches that it covers."""
    drawn, random = draw_image(seed, 64), np.random.default_rng(seed)
    if len(drawn.labels) < 2:
        return None
    label, start = int(random.choice(drawn.labels)), int(random.integers(0, FRAMES // 2 - 1))
    shown = slice(start, int(random.integers(start + 1, min(start + 3, FRAMES // 2 - (start == 0)) + 1)))
    mask, without = drawn.mask_of(label).astype(bool), drawn.image.copy()
    without[mask] = draw_ground(seed, 64)[mask]
    frames = np.stack([without] * FRAMES)
    frames[2 * shown.start : 2 * shown.stop] = drawn.image
    return frames, label, shown, mask.reshape(8, 8, 8, 8).mean(axis=(1, 3)) > 0.3


def measure_video(file: Path, count: int, method: str, figure: Path | None) -> None:
    config = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    explainer = vitflow.Explainer(video_model(file), data_config=config, class_names=list(CLASS_NAMES))
    rows, areas, seed = [], [], FIRST_SEED + 30_000
    while len(rows) < count:
        made, seed = drawn_video(seed), seed + 1
        if made is None or not made[3].any():
            continue
        frames, label, shown, covered = made
        clip = vitflow.explain_clip(frames, model=explainer, method=method, target=label)
        order = np.random.default_rng(seed).permutation(FRAMES // 2)
        moved = frames.reshape(FRAMES // 2, 2, *frames.shape[1:])[order].reshape(frames.shape)
        shuffled = vitflow.explain_clip(moved, model=explainer, method=method, target=label)
        rows.append([separates(clip.shares, shown), separates(shuffled.shares[np.argsort(order)], shown)])
        truth = np.zeros(clip.grid.shape, dtype=bool)
        truth[shown] = covered
        areas.append(localise(clip.grid.reshape(-1, 8), truth.reshape(-1, 8)).roc_auc)
        if figure is not None and len(rows) == 1:
            clip.figure(figure)
    right, followed = np.mean(rows, axis=0)
    print(f"{count} clips, {method}: shares find the tubelets in {right:.1%}, in shuffled clips in {followed:.1%}")
    print(f"ROC-AUC of the object's tubelets {np.mean(areas):.3f}")


def measure(count: int) -> None:
    explainer, rows, seed = vitflow.Explainer("demo"), [], FIRST_SEED
    while len(rows) < count:
        made, seed = drawn_clip(seed), seed + 1
        if made is None:
            continue
        frames, label, shown = made
        clip = vitflow.explain_clip(frames, model=explainer, target=label)
        order = np.random.default_rng(seed).permutation(FRAMES)
        shuffled = vitflow.explain_clip(frames[order], model=explainer, target=label).shares
        sums = np.array([np.maximum(frame.grid, 0).sum() for frame in clip.frames])
        followed = np.allclose(shuffled, clip.shares[order], atol=1e-5)
        rows.append([separates(clip.shares, shown), followed, separates(sums, shown)])
    correct, followed, by_sums = np.mean(rows, axis=0)
    print(f"{count} clips: shares find the frames in {correct:.1%}; they follow shuffled frames in {followed:.1%}")
    print(f"sums of the unscaled GAE maps find them in {by_sums:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--figure", type=Path, help="draw one clip here")
    parser.add_argument("--train", type=Path, help="train the video model, and write its weights here")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--video", type=Path, help="weights of the video model to measure")
    parser.add_argument("--method", default="gae")
    given = parser.parse_args()
    if given.train:
        train(video_model(), DrawnClips(), class_loss, given.train, given.minutes)
    elif given.video:
        measure_video(given.video, given.clips, given.method, given.figure)
    else:
        measure_drawn(given.clips, given.figure)


def measure_drawn(count: int, figure: Path | None) -> None:
    """Measure the image model, and draw a clip."""
    if figure is not None:
        frames, label, _ = drawn_clip(FIRST_SEED + 5) or drawn_clip(FIRST_SEED + 6) or (np.zeros(0), 0, slice(0))
        vitflow.explain_clip(frames, model="demo", target=label).figure(figure)
    measure(count)


if __name__ == "__main__":
    main()
