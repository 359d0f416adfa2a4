"""Mutate annotations and masks, read each as an evaluation would, and print as JSON what came of it.

    python tests/evaluation/fuzz_data.py FOLDER [ANNOTATIONS MASKS]

In a process of its own, so that its peak memory is that of the reading, and so that every file that it opens and every
program that it starts can be watched.
"""

import copy
import io
import json
import os
import random
import sys
import traceback
from pathlib import Path

import numpy as np
from PIL import Image

from vitflow.errors import VitflowError
from vitflow.evaluation.datasets import open_dataset
from vitflow.evaluation.targets import choose_target

WIDTH, HEIGHT = 40, 30
NAMES = ["tabby", "dog", "tiger cat"]
# JSON text that is put in place of a value, and text in place of bytes.
VALUES = [
    *("-1", "0", "1e999", "NaN", "99999999999999999999", "1e308", "0.5", "1" * 5000, "null", "true", "[]", "{}"),
    *('"' + text + '"' for text in ("x" * 100_000, "\\u0000", "..", "²", "\\udcff", "Ω" * 300, "tabby", "cat.jpg")),
    *("[" * 900 + "1" + "]" * 900, "[" * 100_000, '{"a":' * 100_000 + "1"),
]
COCO = {
    "images": [
        {"id": 1, "file_name": "cat.jpg", "width": WIDTH, "height": HEIGHT},
        {"id": 2, "file_name": "dog.jpg", "width": WIDTH, "height": HEIGHT},
    ],
    "annotations": [
        {"image_id": 1, "category_id": 1, "bbox": [5, 4, 15, 8]},
        {"image_id": 1, "category_id": 2, "segmentation": [[20, 10, 30, 10, 30, 20, 20, 20], [1, 1, 5, 1, 5, 5]]},
        {"image_id": 1, "category_id": 2, "segmentation": {"size": [HEIGHT, WIDTH], "counts": [305, 4, 26, 4, 861]}},
        {"image_id": 2, "category_id": 1, "segmentation": {"size": [HEIGHT, WIDTH], "counts": "a94j00Sj0"}},
    ],
    "categories": [{"id": 1, "name": "tabby"}, {"id": 2, "name": "dog"}],
}
BOXES = [
    {"file": "cat.jpg", "label_index": 1, "size": [WIDTH, HEIGHT], "boxes": [[5, 4, 20, 12], [0, 0, 2, 3]]},
    {"file": "dog.jpg", "boxes": [{"box": [0, 0, 5, 5], "label": "dog"}, {"box": [9, 9, 12, 12]}]},
]
ANNOTATIONS = [("a.json", COCO), ("boxes.json", BOXES), ("labels.csv", "file,label_index,label\ncat.jpg,1,tabby\n")]


def photos(place: Path) -> Path:
    """A folder with three images, and links that lead to a fourth outside."""
    data, outside = place / "data", place / "outside"
    for folder in (data, outside):
        folder.mkdir(parents=True)
    for number, name in enumerate(("cat.jpg", "dog.jpg", "bird.png")):
        Image.new("RGB", (WIDTH, HEIGHT), (80 * number, 90, 100)).save(data / name)
    Image.new("RGB", (WIDTH, HEIGHT), (255, 0, 255)).save(outside / "secret.png")
    (data / "more").mkdir()
    (data / "more" / "link.png").symlink_to(outside / "secret.png")
    (data / "links").symlink_to(outside)
    return data


def mutate(chance: random.Random, content, out: list[str]) -> bytes:
    """Replace, remove or repeat some values of JSON, or some bytes."""
    if isinstance(content, str) or chance.random() < 0.3:
        text = content if isinstance(content, str) else json.dumps(content)
        return mutate_bytes(chance, text.encode())
    content, raw = copy.deepcopy(content), {}
    for _ in range(chance.choice([1, 1, 2, 5])):
        parent, key = content, chance.choice(keys_of(content) or [None])
        while key is not None and keys_of(parent[key]) and chance.random() < 0.8:
            parent = parent[key]
            key = chance.choice(keys_of(parent))
        kind = chance.choice(["value", "value", "value", "path", "lost", "long"])
        if key is None:
            break
        if kind == "value":
            parent[key] = mark = f"@{len(raw)}@"
            raw[f'"{mark}"'] = chance.choice(VALUES)
        elif kind == "long":
            parent[key] = [
                copy.deepcopy(parent[key]) for _ in range(3000 if len(json.dumps(parent[key])) < 1000 else 2)
            ]
        elif kind == "path":
            parent[key] = chance.choice(out)
        else:
            del parent[key]
    text = json.dumps(content)
    for mark, value in raw.items():
        text = text.replace(mark, value, 3)
    return text.encode("utf-8", "surrogateescape")


def keys_of(value) -> list:
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat or overwrite bytes, or cut off the rest."""
    actual = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        if not actual:
            break
        start, length = chance.randrange(len(actual)), chance.choice([1, 1, 4, 40])
        kind = chance.choice(["flip", "flip", "cut", "repeat", "random", "end", "value"])
        if kind == "flip":
            actual[start] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del actual[start : start + length]
        elif kind == "repeat":
            actual[start:start] = actual[start : start + length] * chance.choice([1, 1, 2000])
        elif kind == "random":
            actual[start : start + length] = chance.randbytes(length)
        elif kind == "end":
            del actual[start:]
        else:
            actual[start : start + length] = chance.choice(VALUES).encode()
    return bytes(actual)


def mask(chance: random.Random) -> bytes:
    """A mask in some mode and format, mostly damaged."""
    mode = chance.choice(["1", "L", "P", "LA", "RGB", "RGBA", "F", "I"])
    values = np.random.default_rng(chance.randrange(99)).integers(0, 5, (HEIGHT, WIDTH)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).convert(mode).save(file, "TIFF" if mode in ("F", "I") else "PNG")
    return file.getvalue() if chance.random() < 0.2 else mutate_bytes(chance, file.getvalue())


class Watch:
    """Record what is opened, listed or started outside of the data and of Python."""

    def __init__(self, inside: list[Path]) -> None:
        self.roots = (*map(os.path.realpath, inside), "/proc/self", "/dev/null", "/sys/devices")
        self.actual: set[str] = set()
        self.active = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        if not self.active:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
            self.actual.add(f"{event} {arguments[0]}")
        elif event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | bytes):
            self.active = False
            path = os.path.realpath(os.fsdecode(arguments[0]))
            self.active = True
            if not path.startswith(self.roots):
                self.actual.add(f"{event} {path}")


def read(data: Path, images: Path | None, counts: dict[str, int]) -> None:
    """Read as an evaluation does: any other error than one of vitflow would end it with a traceback."""
    try:
        dataset = open_dataset(data, images=images)
    except VitflowError as error:
        counts["refused"] += 1
        assert len(str(error)) < 10_000
        return
    assert len({sample.name for sample in dataset.samples}) == len(dataset)
    for sample in dataset.samples:
        sample.stamp()
        try:
            image = sample.read()
            choose_target(image, len(NAMES), NAMES)
        except (VitflowError, OSError) as error:
            counts["rows with an error"] += 1
            assert len(str(error)) < 10_000
        else:
            counts["rows"] += 1
            assert tuple(image.image[0, 0]) != (255, 0, 255), "an image outside was read"


def run(place: Path, annotations: int, masks: int) -> dict:
    data = photos(place)
    there = place / "outside" / "secret.png"
    out = [str(there), "../outside/secret.png", "more/link.png", "links/secret.png", there.as_uri()]
    os.chdir(data)
    failures: list[str] = []
    counts = {kind: {"refused": 0, "rows": 0, "rows with an error": 0} for kind in ("annotations", "masks")}
    watch = Watch([data, Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]])

    def attempt(kind: str, number: int, path: Path, content: bytes, source: Path, images: Path | None) -> None:
        path.write_bytes(content)
        watch.active = True
        try:
            read(source, images, counts[kind])
        except Exception:
            failures.append(f"{kind} {number} {path.name} {content[:300]!r}\n{traceback.format_exc()[-1500:]}")
        watch.active = False
        path.unlink()

    for name, content in ANNOTATIONS:  # sound ones, so that everything is loaded
        (data / name).write_text(content if isinstance(content, str) else json.dumps(content))
        assert all(sample.read() for sample in open_dataset(data if name == "labels.csv" else data / name).samples)
        (data / name).unlink()
    before = peak()
    for number in range(annotations):
        name, content = ANNOTATIONS[number % len(ANNOTATIONS)]
        path = data / name
        source, images = (data, None) if name == "labels.csv" else (path, data)
        attempt("annotations", number, path, mutate(random.Random(number), content, out), source, images)
    for number in range(masks):
        chance = random.Random(number)
        if chance.random() < 0.5:
            (data / "classes.txt").write_bytes(mutate(chance, "\n".join(NAMES * 2), out))
        attempt("masks", number, data / chance.choice(["cat_mask.png", "dog.mask.png"]), mask(chance), data, None)
        (data / "classes.txt").unlink(missing_ok=True)
    return counts | {"failures": failures, "outside": sorted(watch.actual), "MiB": peak() - before}


def peak() -> int:
    """Peak memory of this process, in MiB; unlike getrusage, without that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 2**10


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]).resolve(), *[int(argument) for argument in sys.argv[2:]]), indent=1))
