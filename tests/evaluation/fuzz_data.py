"""Mutate annotations, masks and class names, read each as an evaluation would, and print as JSON what came of it.

    python tests/evaluation/fuzz_data.py FOLDER [ANNOTATIONS MASKS CLASS_NAMES]

In a process of its own, so that its peak memory is that of the reading, and so that every file that it opens and every
program that it starts can be watched.
"""

import copy
import io
import json
import os
import random
import struct
import sys
import time
import traceback
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from vitflow.errors import VitflowError
from vitflow.evaluation.datasets import open_dataset
from vitflow.evaluation.targets import choose_target
from vitflow.models.names import read_class_names

WIDTH, HEIGHT = 40, 30
NAMES = ["tabby", "dog", "tiger cat"]
NUMBERS = [
    "-1",
    "0",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "99999999999999999999",
    "1e308",
    "2147483648",
    "0.5",
    "1" * 5000,
]
TEXTS = ["x" * 100_000, "\0", "..", "", "²", "%s", "a\nb", "=1+1", "\udcff", "Ω" * 300, "tabby", "cat.jpg", "1" * 5000]


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


def leading_out(place: Path) -> list[str]:
    """Names that lead to the image outside."""
    there = place / "outside" / "secret.png"
    return [
        str(there),
        "../outside/secret.png",
        "more/link.png",
        "link.png",
        "links/secret.png",
        "secret",
        there.as_uri(),
    ]


# --- What is mutated -------------------------------------------------------------------------------------------------

RUNS = [305, 4, 26, 4, 861]
COCO = {
    "images": [
        {"id": 1, "file_name": "cat.jpg", "width": WIDTH, "height": HEIGHT},
        {"id": 2, "file_name": "dog.jpg", "width": WIDTH, "height": HEIGHT},
    ],
    "annotations": [
        {"image_id": 1, "category_id": 1, "bbox": [5, 4, 15, 8]},
        {"image_id": 1, "category_id": 2, "segmentation": [[20, 10, 30, 10, 30, 20, 20, 20], [1, 1, 5, 1, 5, 5]]},
        {"image_id": 1, "category_id": 2, "segmentation": {"size": [HEIGHT, WIDTH], "counts": RUNS}},
        {
            "image_id": 2,
            "category_id": 1,
            "segmentation": {"size": [HEIGHT, WIDTH], "counts": "a94j00Sj0"},
            "iscrowd": 1,
        },
    ],
    "categories": [{"id": 1, "name": "tabby"}, {"id": 2, "name": "dog"}],
}
BOXES = [
    {"file": "cat.jpg", "label_index": 1, "size": [WIDTH, HEIGHT], "boxes": [[5, 4, 20, 12], [0, 0, 2, 3]]},
    {"file": "dog.jpg", "boxes": [{"box": [0, 0, 5, 5], "label": "dog"}, {"box": [9, 9, 12, 12]}]},
]
LABELS_CSV = "file,label_index,label\ncat.jpg,1,tabby\nbird.png,,dog\n"
ANNOTATIONS = [("a.json", COCO), ("boxes.json", BOXES), ("labels.csv", LABELS_CSV)]
CLASS_NAMES = [("names.json", NAMES), ("names.json", {"0": "tabby", "1": "dog"}), ("names.txt", "tabby\ndog\nhen\n")]


def nested(chance: random.Random) -> str:
    """Brackets in brackets, open or closed."""
    depth = chance.choice([50, 900, 100_000])
    start, end = chance.choice([("[", "]"), ('{"a":', "}")])
    return start * depth + "1" + end * depth * chance.choice([0, 1])


def mutate_tree(chance: random.Random, content, out: list[str]) -> str:
    """JSON text of the content with some of its values replaced; texts that JSON cannot make stand for themselves."""
    content = copy.deepcopy(content)
    raw: dict[str, str] = {}
    for _ in range(chance.choice([1, 1, 2, 5])):
        if not content:
            break
        parent, key = content, chance.choice(keys_of(content))
        while keys_of(parent[key]) and chance.random() < 0.8:
            parent = parent[key]
            key = chance.choice(keys_of(parent))
        kind = chance.choice(["number", "number", "text", "path", "nested", "wrong", "lost", "twice", "long"])
        if kind == "number":
            mark = f"@{len(raw)}@"
            raw[f'"{mark}"'], parent[key] = chance.choice(NUMBERS), mark
        elif kind == "nested":
            mark = f"@{len(raw)}@"
            raw[f'"{mark}"'], parent[key] = nested(chance), mark
        elif kind == "text":
            parent[key] = chance.choice(TEXTS)
        elif kind == "path":
            parent[key] = chance.choice(out)
        elif kind == "wrong":
            parent[key] = copy.deepcopy(chance.choice([None, True, [], {}, [[]], 3, "3", [1, 2], {"id": {}}, content]))
        elif kind == "long":
            # A mark stands for up to 200,000 characters: thousands of them would fill this program's own memory.
            short = len(plain := json.dumps(parent[key])) < 1000 and "@" not in plain
            # Copies, for a later mutation of one shared object would be in all of them.
            parent[key] = [json.loads(plain) for _ in range(3000 if short else 2)]
        elif kind == "twice" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        else:
            del parent[key]
    text = json.dumps(content)
    for mark, value in raw.items():
        text = text.replace(mark, value)
    return text


def keys_of(value) -> list:
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []


def mutate_bytes(chance: random.Random, data: bytes, out: list[str]) -> bytes:
    """Bytes flipped, cut out, doubled, overwritten or cut off; numbers and words replaced."""
    actual = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        if not actual:
            break
        start, length = chance.randrange(len(actual)), chance.choice([1, 1, 4, 40])
        kind = chance.choice(["flip", "flip", "cut", "repeat", "random", "end", "token", "token", "token"])
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
            end = start + 1
            while end < len(actual) and actual[end : end + 1].isalnum():
                end += 1
            token = chance.choice(
                [*NUMBERS, *TEXTS, *out, "<a>" * 20_000, "<!DOCTYPE a [<!ENTITY b 'c'>]>", "&b;", nested(chance)]
            )
            actual[start:end] = token.encode("utf-8", "surrogateescape")
    return bytes(actual)


def mutate(chance: random.Random, content, out: list[str]) -> bytes:
    if isinstance(content, str):
        return mutate_bytes(chance, content.encode(), out)
    if chance.random() < 0.7:
        return mutate_tree(chance, content, out).encode("utf-8", "surrogateescape")
    return mutate_bytes(chance, json.dumps(content).encode(), out)


def mask(chance: random.Random, out: list[str]) -> bytes:
    """A mask that is damaged, enormous by its header, or another format altogether."""
    mode = chance.choice(["1", "L", "P", "LA", "RGB", "RGBA", "I;16", "F", "I"])
    values = np.random.default_rng(chance.randrange(99)).integers(0, 5, (HEIGHT, WIDTH)).astype(np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(values).convert("L" if mode == "I;16" else mode)
    format = "TIFF" if mode in ("F", "I") else chance.choice(["PNG", "PNG", "TIFF"])
    (image.convert("I;16") if mode == "I;16" else image).save(file, format)
    data = file.getvalue()
    kind = chance.choice(["damage", "damage", "damage", "header", "eps", "whole"])
    if kind == "eps":
        return mutate_bytes(chance, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\n%%EOF\n", out)
    if kind == "header" and format == "PNG":
        size = chance.choice([(50_000, 50_000), (2**31 - 1, 2**31 - 1), (HEIGHT, 2**30), (20_000, 8_000), (0, 0)])
        header = b"IHDR" + struct.pack(">II", *size) + data[24:29]
        return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    return data if kind == "whole" else mutate_bytes(chance, data, out)


# --- How it is read --------------------------------------------------------------------------------------------------


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


class Counts(dict):
    def add(self, name: str) -> None:
        self[name] = self.get(name, 0) + 1


def read(data: Path, images: Path | None, counts: Counts) -> None:
    """As an evaluation reads: what is no VitflowError (or OSError of one image) would end it with a traceback."""
    try:
        dataset = open_dataset(data, images=images)
    except VitflowError as error:
        counts.add("refused")
        assert len(str(error)) < 10_000
        return
    assert len({sample.name for sample in dataset.samples}) == len(dataset)
    for sample in dataset.samples:
        sample.stamp()
        sample.name.encode("utf-8", "surrogateescape")
        try:
            image = sample.read()
            choose_target(image, len(NAMES), NAMES)
        except (VitflowError, OSError) as error:
            counts.add("rows with an error")
            assert len(str(error)) < 10_000
        else:
            counts.add("rows")
            assert tuple(image.image[0, 0]) != (255, 0, 255), "an image outside was read"


def run(place: Path, annotations: int, masks: int, class_names: int) -> dict:
    data, out = photos(place), leading_out(place)
    os.chdir(data)
    failures: list[str] = []
    totals: dict[str, Counts] = {name: Counts() for name in ("annotations", "masks", "class names")}
    watch = Watch([data, Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]])

    def attempt(kind: str, number: int, path: Path, content: bytes, read_it) -> None:
        path.write_bytes(content)
        watch.active = True
        try:
            read_it()
        except Exception:
            failures.append(f"{kind} {number} {path.name} {content[:300]!r}\n{traceback.format_exc()[-1500:]}")
        watch.active = False
        totals[kind].add("files")

    def names(path: Path) -> None:
        try:
            assert all(isinstance(name, str) for name in read_class_names(path))
            totals["class names"].add("read")
        except VitflowError as error:
            totals["class names"].add("refused")
            assert len(str(error)) < 10_000

    for name, content in ANNOTATIONS:  # sound ones, so that everything is loaded
        (data / name).write_text(content if isinstance(content, str) else json.dumps(content))
        assert all(sample.read() for sample in open_dataset(data if name == "labels.csv" else data / name).samples)
        (data / name).unlink()
    started, before = time.perf_counter(), peak()
    for number in range(annotations):
        name, content = ANNOTATIONS[number % len(ANNOTATIONS)]
        path = data / name
        source, images = (data, None) if name == "labels.csv" else (path, data)
        mutated = mutate(random.Random(number), content, out)
        attempt("annotations", number, path, mutated, lambda: read(source, images, totals["annotations"]))  # noqa: B023
        path.unlink()
    for number in range(masks):
        chance = random.Random(number)
        path = data / chance.choice(["cat_mask.png", "dog.mask.png"])
        if chance.random() < 0.5:
            (data / "classes.txt").write_bytes(mutate(chance, "\n".join(NAMES * 2), out))
        attempt("masks", number, path, mask(chance, out), lambda: read(data, None, totals["masks"]))
        path.unlink()
        (data / "classes.txt").unlink(missing_ok=True)
    for number in range(class_names):
        name, content = CLASS_NAMES[number % len(CLASS_NAMES)]
        path = data / name
        mutated = mutate(random.Random(number), content, out)
        attempt("class names", number, path, mutated, lambda: names(path))  # noqa: B023
    return {
        **totals,
        "failures": failures,
        "outside": sorted(watch.actual),
        "memory before, MiB": before,
        "peak, MiB": peak(),
        "seconds": round(time.perf_counter() - started, 1),
    }


def peak() -> int:
    """The most memory that this program has held so far, in MiB; unlike getrusage, without that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 2**10


if __name__ == "__main__":
    counts = [int(argument) for argument in sys.argv[2:]] or [1200, 300, 300]
    print(json.dumps(run(Path(sys.argv[1]).resolve(), *counts), indent=1))
