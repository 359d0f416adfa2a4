"""Do the shares of frames find the frames that show an object?

    python -m tests.benchmarks.clips [--clips 200] [--figure clip.png]

Each drawn clip has eight frames of one scene. The named object is only in frames a to b, other objects are in all of
them. A clip counts as right if every frame with the object has a larger share than every other frame. The same clips
with shuffled frames must give the same shares, shuffled. For comparison: the sums of the unscaled maps of the frames.
"""

import argparse
from pathlib import Path

import numpy as np

import vitflow
from vitflow.demo import draw_ground, draw_image

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
    given = parser.parse_args()
    if given.figure:
        frames, label, _ = drawn_clip(FIRST_SEED + 5) or drawn_clip(FIRST_SEED + 6) or (np.zeros(0), 0, slice(0))
        vitflow.explain_clip(frames, model="demo", target=label).figure(given.figure)
    measure(given.clips)


if __name__ == "__main__":
    main()
