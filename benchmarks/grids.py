"""Time of reading the maps of a run, and of drawing some of them.

    python -m benchmarks.grids [--grids 10000] [--draw 100]

The run is made up: random maps of 14 × 14 patches for JPEGs of about 500 × 375 pixels, of which as many are there as
are drawn. Drawing is held against its parts, one after the other: reading the rows and the grids, and for the same
images reading and decoding the file, the overlay, encoding it, and writing it. CPU seconds are of this process, over
all threads.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.folder import draw_photographs
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Score
from vitflow.folder.decoders import Decoded, decode_file
from vitflow.folder.draw import draw_run, read_grids, write_overlay
from vitflow.folder.plan import Input
from vitflow.folder.saved import FILE
from vitflow.folder.store import Run
from vitflow.folder.work import Job, explained_row, make_job
from vitflow.images.geometry import place


def make_run(source: Path, output: Path, count: int, drawn: int) -> None:
    """Return the output of a run with --no-overlays."""
    job, dice = make_job(["rollout"], {}, overlays=False), np.random.default_rng(0)
    run = {"root": str(source), "model": "m", "weights_sha256": "", "fit": "crop", "methods": {"rollout": "rollout"}}
    run |= {"options": {"rollout": {}}, "drawing": {}, "format": "jpg", "kind": "folder"}
    with Run(output, run) as store:
        store.missing([f"{number:05}.jpg" for number in range(count)], lambda row: True)
        for first in range(0, count, 16):
            store.put(made_up(source, number, count, drawn, dice, job) for number in range(first, first + 16))


def made_up(source: Path, number: int, count: int, drawn: int, dice: np.random.Generator, job: Job) -> tuple:
    """A row and its map."""
    name = f"{number:05}.jpg"
    decoded = decode_file(str(source / name)) if number < drawn else None
    pixels = np.broadcast_to(np.uint8(0), (375, 500, 3)) if decoded is None else decoded.image
    placement = place(pixels.shape[:2], (224, 224), crop_pct=0.875)
    grid = dice.random((14, 14), np.float32)
    answer = Score("class 1", number / count, index=1, named=False)
    saliency = Saliency(grid, placement, pixels, name, "m", "rollout", {}, score=answer)
    image = (decoded or Decoded(pixels, {"size": 1, "mtime_ns": 1})).named(Input(name, "", name[:-4]).known)
    return image.row | explained_row({"rollout": saliency}, job) | {"seconds": 0.0}, {"rollout": grid}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def parts_of(source: Path, output: Path, drawn: int) -> dict[str, tuple[float, float]]:
    """Return the time of each part of drawing, over all images."""
    every = list(islice(read_grids(output), drawn))
    decoded: list = []
    target = output.parent / "written"

    def draw() -> None:
        for number, ((row, maps), entry) in enumerate(zip(every, decoded, strict=True)):
            placement = place(entry.image.shape[:2], (224, 224), crop_pct=0.875)
            saliency = Saliency(maps["rollout"], placement, entry.image, row["input"], "m", "rollout", {})
            write_overlay(target, f"{number}.jpg", saliency)

    return {
        "decode": timed(lambda: decoded.extend(decode_file(str(source / row["input"])) for row, _ in every)),
        "overlay, encode and write": timed(draw),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grids", type=int, default=10_000)
    parser.add_argument("--draw", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place_:
        source, output = Path(place_) / "photographs", Path(place_) / "run"
        draw_photographs(source, given.draw)
        make_run(source, output, given.grids, given.draw)
        print(f"{given.grids} maps: {(output / FILE).stat().st_size / given.grids:.0f} bytes each, with their rows")
        timed(lambda: list(read_grids(output)))
        wall, cpu = timed(lambda: list(read_grids(output)))
        print(f"read back: {wall:.2f} s, {cpu:.2f} s of CPU")
        for number in range(2):  # loads and compiles what draws
            parts_of(source, output, given.draw)
            draw_run(output, Path(place_) / f"drawn-{number}", limit=given.draw)
        parts = {"read the rows and the grids": timed(lambda: list(islice(read_grids(output), given.draw)))}
        parts |= parts_of(source, output, given.draw)
        reported = ", ".join(
            f"{name} {1000 * wall:.0f} ms ({1000 * cpu:.0f} of CPU)" for name, (wall, cpu) in parts.items()
        )
        walls, cpus = (sum(one[index] for one in parts.values()) for index in (0, 1))
        wall, cpu = timed(lambda: draw_run(output, Path(place_) / "drawn", limit=given.draw))
        print(f"{given.draw} drawn: {1000 * wall:.0f} ms ({1000 * cpu:.0f} of CPU) on {os.cpu_count()} cores")
        print(f"their parts, one after the other: {1000 * walls:.0f} ms ({1000 * cpus:.0f} of CPU): {reported}")
        print(f"ratio: {wall / walls:.2f}, of CPU {cpu / cpus:.2f}")


if __name__ == "__main__":
    main()
