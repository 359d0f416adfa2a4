"""Data as people have it: each format written down by hand, each fault caused, and the question that is asked of it."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from vitflow.demo import CLASS_NAMES, draw_image
from vitflow.errors import ImageError, OptionError, ShapeError, VitflowError, VitflowWarning
from vitflow.evaluation import Region, open_dataset
from vitflow.evaluation.samples import Labelled
from vitflow.evaluation.targets import choose_target

SIZE = (30, 40)  # height, width


@pytest.fixture
def folder(tmp_path):
    """Three images, of 30 × 40 pixels each."""
    for name in ("cat.jpg", "dog.jpg", "two birds.png"):
        values = np.random.default_rng(len(name)).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
        Image.fromarray(values).save(tmp_path / name)
    return tmp_path


def by_name(dataset):
    return {sample.name: sample.read() for sample in dataset.samples}


def painted(*boxes) -> np.ndarray:
    mask = np.zeros(SIZE, bool)
    for left, top, right, bottom in boxes:
        mask[top:bottom, left:right] = True
    return mask


def union_of(image: Labelled) -> np.ndarray:
    return image.union(image.regions)


def test_drawn_images_have_their_exact_masks():
    dataset = open_dataset("demo:3:7")
    assert (len(dataset), dataset.has_regions) == (3, True)
    for sample, seed in zip(dataset.samples, (7, 8, 9), strict=True):
        actual, truth = sample.read(), draw_image(seed)
        assert (actual.image == truth.image).all()
        assert [region.label for region in actual.regions] == [CLASS_NAMES[label] for label in truth.labels]
        assert all((r.mask(truth.image.shape[:2]) == m).all() for r, m in zip(actual.regions, truth.masks, strict=True))


@pytest.mark.parametrize("place", ["cat_mask.png", "cat-mask.png", "cat.mask.png", "masks/cat.png"])
def test_masks_stand_next_to_their_images(folder, place):
    mask = painted((5, 4, 20, 12))
    (folder / "masks").mkdir()
    Image.fromarray(mask.astype(np.uint8) * 255).save(folder / place)
    dataset = open_dataset(folder)
    assert [sample.name for sample in dataset.samples] == ["cat.jpg", "dog.jpg", "two birds.png"]
    assert dataset.has_regions
    images = by_name(dataset)
    assert (union_of(images["cat.jpg"]) == mask).all()
    assert images["dog.jpg"].regions is None


def test_classes_alone(folder):
    (folder / "labels.csv").write_text("file,label_index,label\ncat.jpg,281,tabby\ntwo birds.png,,hen\n")
    dataset = open_dataset(folder)
    assert not dataset.has_regions
    assert {name: image.label for name, image in by_name(dataset).items()} == {
        "cat.jpg": 281,
        "dog.jpg": None,
        "two birds.png": "hen",
    }


def test_images_alone(folder):
    dataset = open_dataset(folder)
    assert not dataset.has_regions
    assert (len(dataset), len(open_dataset(folder, limit=2))) == (3, 2)
    assert by_name(open_dataset([folder / "dog.jpg"]))["dog.jpg"].regions is None
    assert len(open_dataset(folder / "dog.jpg")) == 1
    in_memory = open_dataset([np.zeros((20, 30, 3), np.uint8), folder / "dog.jpg"])
    assert [sample.read().image.shape for sample in in_memory.samples] == [(20, 30, 3), (30, 40, 3)]
    with pytest.raises(OptionError, match="at least one image"):
        open_dataset([])


def test_images_in_subfolders_are_counted(folder):
    for name in ("more/deep/one.png", "more/masks/one.png", ".hidden/one.png", "more/.two.png", "more/notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name, format="PNG")
    with pytest.warns(VitflowWarning, match="^1 image in .*more/deep/one.png"):
        assert set(by_name(open_dataset(folder))) == {"cat.jpg", "dog.jpg", "two birds.png"}
    (folder / "classes" / "pug" / "more").mkdir(parents=True)
    (folder / "cat.jpg").rename(folder / "classes" / "pug" / "cat.jpg")
    (folder / "dog.jpg").rename(folder / "classes" / "pug" / "more" / "dog.jpg")
    with pytest.warns(VitflowWarning, match="^1 image in .*pug/more/dog.jpg"):
        assert set(by_name(open_dataset(folder / "classes"))) == {"cat.jpg"}


@pytest.mark.parametrize("key", ["boxes", "boxes_xyxy"])
def test_json_of_boxes(folder, key):
    entry = {"file": "cat.jpg", "label_index": 281, "size": [40, 30], key: [[5, 4, 20, 12], [0, 0, 2, 3]]}
    (folder / "boxes.json").write_text(json.dumps([entry]))
    for data in (folder, folder / "boxes.json", str(folder)):
        images = by_name(open_dataset(data))
        assert list(images) == ["cat.jpg"]
        assert (union_of(images["cat.jpg"]) == painted((5, 4, 20, 12), (0, 0, 2, 3))).all()
        assert images["cat.jpg"].label == 281


def test_a_box_owns_the_pixels_whose_centres_it_holds():
    assert Region(None, (0.4, 0.0, 2.6, 1.0)).mask((1, 4)).tolist() == [[True, True, True, False]]
    assert Region(None, (0.6, 0.0, 2.4, 1.0)).mask((1, 4)).tolist() == [[False, True, False, False]]
    assert Region(None, (-0.5, -1, 4, 3)).mask((2, 3)).all()  # a pixel of rounding, or of counting from 1


@pytest.fixture
def turned(folder):
    """An image of 40 × 30 pixels as displayed, which is 30 × 40 in its file."""
    exif = Image.Exif()
    exif[274] = 6
    image = Image.open(folder / "cat.jpg").transpose(Image.Transpose.ROTATE_90)
    assert image.size == (30, 40)
    image.save(folder / "cat.jpg", exif=exif)
    return folder


NO_OBJECTS: dict[str, list] = {"annotations": []}
RUNS = {"size": [40, 30], "counts": [0, 1200]}
TURNED = {
    "a box": {"boxes.json": [{"file": "cat.jpg", "boxes": [[5, 6, 20, 38]]}]},
    "the size of boxes": {"boxes.json": [{"file": "cat.jpg", "size": [30, 40], "boxes": [[1, 1, 5, 5]]}]},
    "COCO's size": {
        "a.json": {"images": [{"id": 1, "file_name": "cat.jpg", "width": 30, "height": 40}], "annotations": []}
    },
    "COCO's polygon": {"a.json": {"segmentation": [[2, 2, 9, 2, 9, 38]]}},
    "COCO's runs": {"a.json": {"segmentation": RUNS}},
    "COCO's bbox": {"a.json": {"bbox": [5, 6, 10, 33]}},
}


def write_annotations(folder, files) -> None:
    for name, content in files.items():
        if isinstance(content, dict) and "images" not in content:
            content = coco([content])
        (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("kind", TURNED)
def test_annotations_before_the_exif_turn_name_it(turned, kind):
    write_annotations(turned, TURNED[kind])
    with pytest.raises(ShapeError, match="EXIF"):
        choose_target(by_name(open_dataset(turned))["cat.jpg"], 0, None)


def test_a_mask_and_boxes_in_python_before_the_exif_turn_name_it(turned):
    path = turned / "cat.jpg"
    with Image.open(path) as opened:
        opened.load()
        for source in (path, opened):
            labelled = open_dataset([(source, [[5, 6, 20, 38]])]).samples[0].read()
            with pytest.raises(ShapeError, match="EXIF"):
                choose_target(labelled, 0, None)
    Image.fromarray(np.ones((40, 30), np.uint8)).save(turned / "cat_mask.png")
    with pytest.raises(ShapeError, match="EXIF"):
        by_name(open_dataset(turned))


@pytest.mark.parametrize("shape", [(5, 6, 20, 32), (-3, 0, 4, 4), [[2, 2, 9, 2, 9, 33]], (0, 0, 42, 10)])
def test_what_reaches_out_of_the_image_is_refused_with_its_size(folder, shape):
    labelled = open_dataset([(folder / "cat.jpg", {"boxes": [[1, 1, 2, 2]]})]).samples[0].read()
    labelled = Labelled(labelled.image, (Region(None, shape),), source=folder / "cat.jpg")
    with pytest.raises(ShapeError, match="40 × 30") as caught:
        choose_target(labelled, 0, None)
    assert "EXIF" not in str(caught.value)


@pytest.mark.parametrize(
    ("boxes", "keyword"),
    [
        ([[1, 1, 4, 4], [20, 10, 15, 8]], "width"),  # [left, top, width, height]
        ([[0.1, 0.2, 0.5, 1.0], [0, 0, 1, 1]], "Multiply"),
        ([[0.5, 0.5, 0.25, 0.3]], "width"),  # YOLO's
    ],
)
def test_boxes_of_another_format_are_refused(folder, boxes, keyword):
    (folder / "boxes.json").write_text(json.dumps([{"file": "cat.jpg", "boxes": boxes}]))
    for data in (folder, [(folder / "cat.jpg", np.array(boxes))], [(folder / "cat.jpg", {"boxes": boxes})]):
        with pytest.raises(OptionError, match=keyword):
            by_name(open_dataset(data))


def test_boxes_of_torchvision_say_their_format(folder):
    from torchvision.tv_tensors import BoundingBoxes

    boxes = BoundingBoxes([[1, 1, 5, 5]], format="XYXY", canvas_size=SIZE)
    assert open_dataset([(folder / "cat.jpg", {"boxes": boxes})]).has_regions
    with pytest.raises(OptionError, match="XYWH"):
        open_dataset([(folder / "cat.jpg", BoundingBoxes([[1, 1, 5, 5]], format="XYWH", canvas_size=SIZE))])


def test_a_folder_for_each_class(folder):
    for name, label in (("cat.jpg", "tabby"), ("dog.jpg", "pug"), ("two birds.png", "7")):
        (folder / "data" / label).mkdir(parents=True)
        (folder / name).rename(folder / "data" / label / name)
    dataset = open_dataset(folder / "data")
    assert {name: image.label for name, image in by_name(dataset).items()} == {
        "7/two birds.png": 7,
        "pug/dog.jpg": "pug",
        "tabby/cat.jpg": "tabby",
    }
    assert not dataset.has_regions and "3 folders" in dataset.kind
    with pytest.raises(ImageError, match="pass .*data"):
        open_dataset(folder)


def test_a_folder_images_is_not_a_class(folder):
    (folder / "set" / "images").mkdir(parents=True)
    (folder / "set" / "masks").mkdir()
    (folder / "cat.jpg").rename(folder / "set" / "images" / "cat.jpg")
    Image.fromarray(painted((5, 4, 20, 12)).astype(np.uint8)).save(folder / "set" / "masks" / "cat.png")
    images = by_name(open_dataset(folder / "set"))
    assert (union_of(images["cat.jpg"]) == painted((5, 4, 20, 12))).all()


def coco(annotations, names=((1, "tabby"), (18, "dog"))):
    return {
        "images": [{"id": 7, "file_name": "cat.jpg", "width": 40, "height": 30}],
        "annotations": [{"image_id": 7, "category_id": 1, "bbox": [0, 0, 1, 1]} | one for one in annotations],
        "categories": [{"id": number, "name": name} for number, name in names],
    }


def test_coco_boxes_polygons_and_runs(folder):
    runs = [30 * 10 + 5, 4, 26, 4, 30 * 40 - 30 * 10 - 39]  # columns 10 and 11, rows 5 to 8
    annotations = [
        {"bbox": [5, 4, 15, 8]},
        {"segmentation": [[20, 10, 30, 10, 30, 20, 20, 20]], "category_id": 18},
        {"segmentation": {"size": [30, 40], "counts": runs}},
        {"segmentation": {"size": [30, 40], "counts": runs}, "iscrowd": 1},
    ]
    (folder / "annotations.json").write_text(json.dumps(coco(annotations)))
    box, polygon, run, crowd = by_name(open_dataset(folder))["cat.jpg"].regions
    assert (box.mask(SIZE) == painted((5, 4, 20, 12))).all()
    assert (run.mask(SIZE) == painted((10, 5, 12, 9))).all()
    assert [region.label for region in (box, polygon, run)] == ["tabby", "dog", "tabby"]
    assert crowd.unknown
    square = polygon.mask(SIZE)
    assert square[10:20, 20:30].all()
    # The outline is drawn, so a pixel that the edge only touches may be in; none further out is.
    assert not (square & ~painted((19, 9, 31, 21))).any()


FAULTS = {
    "a.json": ["{", "[]", "3", '[{"boxes": [[1, 2, 3, 4]]}]', '{"images": [{"id": 1}], "annotations": []}'],
    "cat_mask.png": [b"no image", np.ones((10, 10), np.uint8)],  # damaged; of another size
    "boxes.json": ['[{"file": "cat.jpg", "size": [30, 40], "boxes": []}]'],
    "labels.csv": ["file,label_index\ncat.jpg,1e999\n", "name\ncat.jpg\n"],
}


@pytest.mark.parametrize(("name", "content"), [(name, each) for name in FAULTS for each in FAULTS[name]])
def test_faults_are_errors_that_name_their_file_or_size(folder, name, content):
    if isinstance(content, np.ndarray):
        Image.fromarray(content).save(folder / name)
    else:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(VitflowError, match=rf"{name}|file name|\(10, 10\)|\(40, 30\)"):
        by_name(open_dataset(folder))


def test_data_that_is_not_there_or_not_unique(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    for name in ("a.json", "b.json"):
        (folder / name).write_text("[]")
    faults = [
        (folder, OptionError, "Pass one of"),
        (empty / "photos", OptionError, "No data at"),
        (empty, ImageError, "at least one image"),
        *((data, OptionError, "training set") for data in ("demo:0", "demo:2000000", "demo:10:999995")),
    ]
    for data, error, keyword in faults:
        with pytest.raises(error, match=keyword):
            open_dataset(data)
    with pytest.raises(OptionError, match="limit of at least 1"):
        open_dataset("demo:3", limit=0)


def test_images_that_are_nowhere_are_reported(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "boxes.json"
    path.write_text(json.dumps([{"file": "cow.jpg", "boxes": []}]))
    with pytest.raises(OptionError, match=r"None of the 1 images .* --images"):
        open_dataset(path)
    path.write_text(json.dumps([{"file": "cat.jpg", "boxes": []}, {"file": "cow.jpg", "boxes": []}]))
    actual, missing = open_dataset(path, images=folder).samples
    assert actual.read().regions == ()
    with pytest.raises(ImageError, match="no such file"):
        missing.read()


def test_a_changed_file_has_another_stamp(folder):
    [sample, *_] = open_dataset(folder).samples
    before = sample.stamp()
    assert before == sample.stamp()
    Image.new("RGB", (5, 5)).save(folder / "cat.jpg")
    assert sample.stamp() != before
    (folder / "cat.jpg").unlink()
    assert sample.stamp() == [[]]


def photo(*regions: Region, label=None) -> Labelled:
    return Labelled(np.zeros((*SIZE, 3), np.uint8), regions, label)


NAMES = ["tabby", "pug", "hen"]


def test_the_class_that_covers_most_is_requested_with_all_its_objects():
    regions = [Region("pug", (0, 0, 9, 9)), Region("tabby", (20, 0, 28, 8)), Region("tabby", (20, 10, 28, 18))]
    question = choose_target(photo(*regions), 3, NAMES)
    assert question.target == 0  # 128 pixels in two objects against 81 in one
    assert (question.region == painted((20, 0, 28, 8), (20, 10, 28, 18))).all()


def test_the_images_class_goes_first():
    regions = [Region("pug", (0, 0, 9, 9)), Region("tabby", (20, 0, 23, 3))]
    question = choose_target(photo(*regions, label="tabby"), 3, NAMES)
    assert question.target == 0
    assert (question.region == painted((20, 0, 23, 3))).all()
    question = choose_target(photo(Region(None, (1, 1, 4, 4)), label=2), 3, None)
    assert (question.target, int(question.region.sum())) == (2, 9)


def test_classes_that_the_model_does_not_have_leave_the_question_to_its_answer():
    regions = [Region("zebra", (0, 0, 9, 9)), Region("tram", (20, 0, 23, 3))]
    question = choose_target(photo(*regions), 3, NAMES)
    assert question.target is None
    assert (question.region == painted((0, 0, 9, 9), (20, 0, 23, 3))).all()
    assert choose_target(photo(*regions, label=99), 3, NAMES).target is None
    assert choose_target(photo(*regions), 0, None).target is None


def test_unknown_pixels_are_those_that_no_object_claims():
    entry, crowd = np.zeros(SIZE, bool), np.zeros(SIZE, bool)
    entry[:10], crowd[5:20] = True, True
    question = choose_target(photo(Region("hen", entry), Region(None, crowd, unknown=True)), 3, NAMES)
    assert (question.unknown == (crowd & ~entry)).all()


def test_an_image_without_objects_asks_for_the_answer_and_nothing_is_right():
    question = choose_target(photo(), 3, NAMES)
    assert question.target is None
    assert not question.region.any()
    assert choose_target(Labelled(np.zeros((*SIZE, 3), np.uint8), None, "pug"), 3, NAMES).region is None


@pytest.mark.shared
def test_the_boxed_photographs(shared_data):
    dataset = open_dataset(shared_data / "boxes")
    assert (len(dataset), dataset.has_regions) == (60, True)
    question = choose_target(dataset.samples[0].read(), 1000, None)
    assert question.target == 993
    assert question.region.sum() == (282 - 28) * (294 - 82)
    labels = open_dataset(shared_data / "photos")
    assert (len(labels), labels.has_regions) == (40, False)
    assert all(isinstance(sample.read().label, int) for sample in labels.samples[:3])


@pytest.mark.parametrize("kind", [lambda items: torch.utils.data.Subset(items, range(3)), iter])
def test_an_iterable_gives_masks_boxes_and_classes(folder, kind):
    """A dataset of torch, or any iterable, of a path, an image of Pillow and an array, each with another truth."""
    with Image.open(folder / "dog.jpg") as dog:
        second = dog.copy()
    mask = torch.from_numpy(painted((5, 4, 20, 12)))
    objects = {"boxes": torch.tensor([[0, 0, 2, 3], [5, 4, 20, 12]]), "labels": torch.tensor([1, 2])}
    items = [(folder / "cat.jpg", mask), (second, objects), (np.zeros((*SIZE, 3), np.uint8), 2)]
    dataset = open_dataset(kind(items))
    assert (len(dataset), dataset.has_regions) == (3, True)
    first, second, third = (sample.read() for sample in dataset.samples)
    assert (union_of(first) == painted((5, 4, 20, 12))).all()
    assert [region.label for region in second.regions] == [1, 2]
    assert choose_target(second, 3, None).target == 2
    assert (choose_target(second, 3, None).region == painted((5, 4, 20, 12))).all()
    assert (third.regions, third.label) == (None, 2)


@pytest.mark.parametrize(
    "truth", [np.ones((3, 3)), {"boxes": [[0, 0, 1]]}, {"boxes": [[0, 0, 1, 1]], "labels": []}, 0.5]
)
def test_a_wrong_truth_is_its_images_error(truth):
    [sample] = open_dataset([(np.zeros((*SIZE, 3), np.uint8), truth)]).samples
    with pytest.raises(ShapeError, match="Expected"):
        choose_target(sample.read(), 3, None)
