"""Data that means harm, or is only broken: it costs a row or is refused in a sentence, and touches nothing else."""

import io
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from pycocotools import mask as coco

from vitflow.errors import ImageError, OptionError, VitflowError
from vitflow.evaluation import Region, open_dataset
from vitflow.evaluation.targets import choose_target
from vitflow.folder.decoders import decode_file
from vitflow.images.reading import read_image

HEIGHT, WIDTH = 30, 40
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n%%EOF\n"
BOX = [[5, 4, 20, 12]]


@pytest.fixture
def folder(tmp_path):
    """Two images, and beside their folder a third that no annotation may reach."""
    (tmp_path / "data").mkdir()
    for place in ("data/cat.jpg", "data/dog.jpg", "secret.png"):
        Image.new("RGB", (WIDTH, HEIGHT), (9, 90, 200)).save(tmp_path / place)
    return tmp_path / "data"


def results(dataset) -> dict[str, str | None]:
    """Of each sample, the error that reading and painting it gave, if any."""
    actual: dict[str, str | None] = {}
    for sample in dataset.samples:
        try:
            choose_target(sample.read(), 3, ["tabby", "dog", "hen"])
            actual[sample.name] = None
        except VitflowError as error:
            actual[sample.name] = str(error)
    return actual


def annotate(folder: Path, content, name="boxes.json") -> Path:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / name


def test_no_image_and_no_mask_starts_a_program(folder, monkeypatch):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments: started.append(arguments))
    for name in ("cat.jpg", "dog_mask.png"):
        (folder / name).write_bytes(EPS)
    assert all("to be an image (" in reported for reported in results(open_dataset(folder)).values())
    assert "to be an image" in decode_file(str(folder / "cat.jpg")).row["message"]
    for source in (EPS, Image.open(io.BytesIO(EPS))):
        with pytest.raises(ImageError, match="to be an image"):
            read_image(source)
    assert not started


def test_a_transparent_mask_marks_what_is_neither_black_nor_transparent(folder):
    values = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    values[..., 3] = 255
    values[5:10, 3:9, :3] = 200
    values[20:, :] = (200, 0, 0, 0)
    Image.fromarray(values).save(folder / "cat_mask.png")
    [region] = open_dataset([folder / "cat.jpg"]).samples[0].read().regions
    assert np.argwhere(region.mask((HEIGHT, WIDTH))).tolist() == [[y, x] for y in range(5, 10) for x in range(3, 9)]


def test_names_of_full_length_and_repeated_ones(folder):
    long = folder / ("x" * 251 + ".jpg")  # with "_mask.png" it is no name that a file can have
    Image.new("RGB", (WIDTH, HEIGHT)).save(long)
    assert results(open_dataset(folder)) == {"cat.jpg": None, "dog.jpg": None, long.name: None}
    entries = [{"file": name, "boxes": BOX} for name in ("cat.jpg", "cat.jpg", "cat.jpg (2)")]
    assert len(results(open_dataset(annotate(folder, entries)))) == 3
    assert len(results(open_dataset([folder / "cat.jpg", folder / "cat.jpg"]))) == 2


def test_a_list_of_relative_and_absolute_files(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert results(open_dataset(["cat.jpg", folder / "dog.jpg"])) == {"cat.jpg": None, "dog.jpg": None}
    assert open_dataset(".").identity == open_dataset(folder).identity  # one run, wherever it is resumed


def coco_file(*annotations, **image):
    return {
        "images": [
            {"id": 1, "file_name": "cat.jpg", "width": WIDTH, "height": HEIGHT} | image,
            {"id": 2, "file_name": "dog.jpg", "width": WIDTH, "height": HEIGHT},
        ],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]} | one for one in annotations],
        "categories": [{"id": 1, "name": "tabby"}],
    }


def runs(counts, size=(HEIGHT, WIDTH)):
    return {"segmentation": {"size": list(size), "counts": counts}}


@pytest.mark.parametrize(
    ("annotation", "reported"),
    [
        (runs([10**10], (10**5, 10**5)), "got [100000, 100000]"),
        (runs([10]), "sum to 1200 pixels, got [10]"),
        (runs([0.5, "x"]), "whole numbers"),
        (runs("Ω"), "in COCO's form"),
        ({"segmentation": [[0, 0, 1e9, 0, 1e9, 1e9]]}, "inside the image"),
        ({"segmentation": [[0, 0, float("nan"), 0, 5, 5]]}, "finite numbers"),
        ({"segmentation": [[0, 0, 5, 0, 5]]}, "got 5 numbers"),
        ({"bbox": [0, 0, 1]}, "four finite numbers"),
        ({"category_id": 7}, "no category 7"),
        ({"category_id": [1]}, "unhashable"),
    ],
)
def test_a_hostile_object_costs_its_images_row(folder, annotation, reported):
    actual = results(open_dataset(annotate(folder, coco_file(annotation))))
    assert actual["dog.jpg"] is None
    assert reported in actual["cat.jpg"]


@pytest.mark.parametrize("seed", range(8))
def test_run_lengths_are_read_as_coco_reads_them(seed):
    random = np.random.default_rng(seed)
    mask = random.random((23, 310)) < random.uniform(0.0, 1.0)
    mask[:, 50 : 50 + 30 * (seed % 8)] = seed % 2  # long runs, whose numbers take several characters
    packed = coco.encode(np.asfortranarray(mask, dtype=np.uint8))["counts"]
    assert (Region(None, {"counts": packed}).mask(mask.shape) == mask).all()
    assert (Region(None, {"counts": packed.decode()}).mask(mask.shape) == mask).all()


@pytest.mark.parametrize("seed", range(8))
def test_polygons_are_painted_as_coco_paints_them(seed):
    random = np.random.default_rng(seed)
    polygons = [
        (random.uniform(-0.02, 1.02, (count, 2)) * (WIDTH, HEIGHT)).ravel().tolist()
        for count in random.integers(3, 9, 3)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of pycocotools about numpy
        expected = coco.decode(coco.merge(coco.frPyObjects(polygons, HEIGHT, WIDTH))).astype(bool)
    assert (Region(None, [*polygons, [1, 1, 9, 9]]).mask((HEIGHT, WIDTH)) == expected).all()


def name_in_json(name):
    return "boxes.json", [{"file": "dog.jpg", "boxes": BOX}, {"file": name, "boxes": BOX}]


def name_in_coco(name):
    return "a.json", coco_file(file_name=name)


@pytest.mark.parametrize("write", [name_in_json, name_in_coco])
@pytest.mark.parametrize("way", ["../secret.png", "ABSOLUTE", "link.png", "links/secret.png", "more/../../secret.png"])
def test_a_name_that_leads_out_of_the_folder_is_refused(folder, write, way):
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "links").symlink_to(folder.parent)
    (folder / "more").mkdir()
    name = str(folder.parent / "secret.png") if way == "ABSOLUTE" else way
    file, content = write(name)
    path = annotate(folder, content, file)
    [reported] = filter(None, results(open_dataset(path, images=folder)).values())
    assert f"{name!r}, which is outside the image folders" in reported and "--images" in reported


def test_names_below_a_linked_folder_and_absolute_ones_inside_are_detected(folder, tmp_path):
    (tmp_path / "linked").symlink_to(folder)
    for images in (folder, tmp_path / "linked"):
        entries = [{"file": name, "boxes": BOX} for name in ("cat.jpg", str(folder / "dog.jpg"))]
        assert set(results(open_dataset(annotate(folder, entries), images=images)).values()) == {None}
    with pytest.raises(OptionError, match=r"folder with images, got '.*nowhere'"):
        open_dataset(folder / "boxes.json", images=folder / "nowhere")


@pytest.mark.parametrize(
    "entry",
    [
        {"file": 5, "boxes": BOX},
        {"file": "a\0b.jpg", "boxes": BOX},
        {"file": "cat.jpg", "boxes": [[0, 0, float("inf"), 3]]},
        {"file": "cat.jpg", "boxes": [{"box": BOX[0], "label": ["dog"]}]},
        {"file": "cat.jpg", "boxes": BOX, "label_index": 2.5},
        {"file": "cat.jpg", "boxes": BOX, "size": 7},
        None,
    ],
)
def test_a_hostile_entry_costs_its_row(folder, entry):
    actual = results(open_dataset(annotate(folder, [entry, {"file": "dog.jpg", "boxes": BOX}])))
    assert actual.pop("dog.jpg") is None
    [reported] = actual.values()
    assert "Expected" in reported and len(reported) < 1000


def test_polygons_require_pycocotools(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocotools.mask", None)
    with pytest.raises(OptionError, match=r"vitflow\[evaluate\]"):
        Region(0, [[0, 0, 9, 0, 9, 9]]).mask((10, 10))
