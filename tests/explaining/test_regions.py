"""Questions about detections and regions: selection, following, place of the maps, errors."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import vitflow
from tests.small import Custom, jitter
from vitflow import Explainer
from vitflow.analysis.strips import columns_of
from vitflow.errors import ModelError, OptionError, OutsideImageError, ShapeError
from vitflow.explaining.regions import _input_shares, _weights
from vitflow.folder.draw import draw_run, read_grids
from vitflow.images.geometry import place
from vitflow.images.reading import write_image

SIZE = 64
CONFIG = {"input_size": (3, SIZE, SIZE), "mean": (0.5,) * 3, "std": (0.5,) * 3}
NAMES = [f"thing {number}" for number in range(5)]


def photo(seed=0, height=80, width=100):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def yolos(**options):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    names = dict(enumerate(NAMES))
    config = transformers.YolosConfig(
        **small, image_size=[SIZE, SIZE], patch_size=16, num_detection_tokens=6, id2label=names, **options
    )
    torch.manual_seed(0)
    return jitter(transformers.YolosForObjectDetection(config), 0.2, by_width=False)


class Cells(nn.Module):
    """A detector with known answers: query q reports how bright quarter q of the image is, as class q % 2."""

    def __init__(self, shift=False):
        super().__init__()
        self.shift, self.weight = shift, nn.Parameter(torch.ones(1))
        edges = [[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]]
        self.register_buffer("boxes", torch.tensor([[*middle, 0.5, 0.5] for middle in edges]))

    def forward(self, pixels):
        bright = self.weight * nn.functional.adaptive_avg_pool2d(pixels.mean(dim=1), 2).flatten(1)  # [batch, 4]
        boxes = self.boxes.expand(len(pixels), -1, -1)
        if self.shift:  # the queries change their places when the first corner is dark
            turned = pixels[:, 0, 0, 0] < 0
            bright = torch.where(turned[:, None], bright.flip(1), bright)
            boxes = torch.where(turned[:, None, None], boxes.flip(1), boxes)
        kinds = torch.tensor([[1.0, 0.0], [0.0, 1.0]] * 2).expand(len(pixels), -1, -1)
        if self.shift:
            kinds = torch.where(turned[:, None, None], kinds.flip(1), kinds)
        logits = torch.cat([4 * bright[..., None] * kinds, torch.zeros(len(pixels), 4, 1)], dim=2)
        return {"pred_logits": logits, "pred_boxes": boxes}


def dense():
    """Logits per patch: the brightness of each cell, for class 0, and its negative, for class 1."""

    def compute(self, pixels):
        bright = self.weight * nn.functional.adaptive_avg_pool2d(pixels.mean(dim=1, keepdim=True), 4)
        return torch.cat([bright, -bright], dim=1)

    return Custom(compute, weight=nn.Parameter(torch.ones(1)))


def bright(*quarters):
    image = np.full((SIZE, SIZE, 3), 60, np.uint8)
    for quarter in quarters:
        row, col = divmod(quarter, 2)
        image[32 * row : 32 * row + 32, 32 * col : 32 * col + 32] = 230
    return image


def literal_iou(a, b):
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    area = lambda box: (box[2] - box[0]) * (box[3] - box[1])  # noqa: E731
    return width * height / (area(a) + area(b) - width * height)


def test_the_selected_query_has_the_best_product_of_iou_and_probability():
    model, box = yolos(), (10.0, 10.0, 60.0, 50.0)
    explainer = Explainer(model, data_config=CONFIG, outputs=vitflow.boxes(box), fit="squash")
    assert explainer.class_names == [*NAMES, "no object"]
    image = photo()
    output = model(explainer.pixels(image))
    probabilities = output.logits[0].detach().double().softmax(dim=-1)
    middles = output.pred_boxes[0].detach().double().numpy()
    scores = []
    for (x, y, width, height), values in zip(middles, probabilities, strict=True):
        corners = (x - width / 2) * 100, (y - height / 2) * 80, (x + width / 2) * 100, (y + height / 2) * 80
        scores.append(literal_iou(corners, box) * float(values[2]))
    saliency = explainer.explain(image, target="thing 2")
    result = saliency.facts["detection"]
    assert result["query"] == int(np.argmax(scores))
    assert saliency.probability == pytest.approx(float(probabilities[result["query"], 2]), abs=1e-6)
    assert saliency.method == "gae" and saliency.class_name == "thing 2"
    assert saliency.patch_box == tuple(result["box"]) and result["requested"] == list(box)
    assert json.dumps(saliency.to_dict())


def test_the_output_is_the_class_logit_of_the_selected_query():
    model = yolos()
    question = Explainer(model, data_config=CONFIG, outputs=vitflow.boxes(), fit="squash").explain(photo(), target=3)
    query = question.facts["detection"]["query"]
    by_hand = Explainer(model, data_config=CONFIG, outputs=lambda output: output.logits[:, query], fit="squash")
    np.testing.assert_allclose(question.grid, by_hand.explain(photo(), target=3, method="gae").grid, rtol=1e-4)


@pytest.mark.parametrize(("quarter", "method"), [(0, "input_gradient"), (1, "occlusion"), (2, "sampling")])
def test_a_detection_is_explained_by_its_place(method, quarter):
    row, col = divmod(quarter, 2)
    box = (32 * col, 32 * row, 32 * col + 32, 32 * row + 32)
    explainer = Explainer(Cells(), data_config=CONFIG, outputs=vitflow.boxes(box), fit="squash")
    options = {} if method == "sampling" else {"patch_size": 16}
    saliency = explainer.explain(bright(quarter), method=method, **options)
    means = saliency.grid.reshape(2, len(saliency.grid) // 2, 2, -1).mean(axis=(1, 3)).flatten()
    assert means.argmax() == quarter and saliency.facts["detection"]["query"] == quarter


def test_perturbation_follows_the_object_when_its_query_changes():
    follow = Explainer(Cells(shift=True), data_config=CONFIG, outputs=vitflow.boxes((32, 32, 64, 64)), fit="squash")
    image = bright(3)
    image[:16, :16] = 255  # where the queries change places if it is hidden
    saliency = follow.explain(image, method="occlusion", patch_size=16)
    assert saliency.facts["detection"]["query"] == 3
    # The detection in the last quarter does not change when the first patch is hidden.
    assert abs(saliency.grid[0, 0]) < 0.2 * saliency.grid[2:, 2:].min()


def test_shares_of_a_box_in_the_model_input():
    placement = place((80, 100), (SIZE, SIZE), fit="squash")
    np.testing.assert_allclose(_input_shares((25.0, 20.0, 50.0, 80.0), placement), [0.25, 0.25, 0.5, 1.0])


def test_the_score_of_a_region_is_the_mean_logit_inside():
    model, image = dense(), photo(3, SIZE, SIZE)
    mask = np.zeros((SIZE, SIZE), bool)
    mask[16:32, 32:64] = True  # the cells (1, 2) and (1, 3)
    explainer = Explainer(model, data_config=CONFIG, outputs=vitflow.masks(mask), fit="squash")
    expected = model(explainer.pixels(image))[0, :, 1, 2:4].mean(dim=1).detach()
    for region in (mask, (32, 16, 64, 32)):
        explainer = Explainer(model, data_config=CONFIG, outputs=vitflow.masks(region), fit="squash")
        saliency = explainer.explain(image, target=1, method="input_gradient", patch_size=16)
        assert saliency.facts["region"]["mean_logit"] == pytest.approx(float(expected[1]), abs=1e-4)
        assert saliency.probability == pytest.approx(float(expected.softmax(0)[1]), abs=1e-5)
        assert (saliency.grid > 0).nonzero()[0].tolist() == [1, 1] and saliency.facts["region"]["pixels"] == 512


def test_a_point_and_the_predicted_region():
    model, image = dense(), bright(1)
    at = Explainer(model, data_config=CONFIG, outputs=vitflow.masks((40.5, 3)), fit="squash")
    saliency = at.explain(image, target=0, method="input_gradient", patch_size=16)
    assert np.argwhere(saliency.grid > 0).tolist() == [[0, 2]]
    predicted = Explainer(model, data_config=CONFIG, outputs=vitflow.masks(), fit="squash")
    saliency = predicted.explain(image, target=0, method="input_gradient", patch_size=16)
    assert np.argwhere(saliency.grid > 0).tolist() == [[0, 2], [0, 3], [1, 2], [1, 3]]
    assert saliency.facts["region"]["pixels"] == 32 * 32
    assert predicted.explain(image, method="input_gradient", patch_size=16).target == 1  # most pixels


def test_weights_of_a_region_against_a_literal_reference():
    outline = np.zeros((80, 100), bool)
    outline[7:33, 41:90] = True
    placement = place((80, 100), (SIZE, SIZE), fit="squash")
    expected = np.zeros((8, 8))
    for row in range(SIZE):
        for col in range(SIZE):
            y, x = placement.to_image(row + 0.5, col + 0.5)
            expected[row // 8, col // 8] += outline[int(y), int(x)] / 64
    np.testing.assert_allclose(_weights(outline, placement, (8, 8)).numpy(), expected, atol=1e-12)


def detected(box=None, **options):
    outputs = vitflow.boxes(box) if box else vitflow.boxes()
    return Explainer(yolos(), data_config=CONFIG, outputs=outputs, fit="squash").explain(photo(), **options)


def segmented(region):
    explainer = Explainer(dense(), data_config=CONFIG, outputs=vitflow.masks(region), fit="squash")
    return explainer.explain(photo(), method="occlusion", patch_size=16)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: vitflow.boxes((5, 5, 5, 9)), OptionError, "left < right"),
        (lambda: vitflow.masks((1, 2, 3)), OptionError, "a mask"),
        (lambda: Explainer("demo", outputs=vitflow.boxes()), ModelError, "DETR or YOLOS"),
        (lambda: Explainer("demo", outputs=vitflow.masks()), ModelError, "semantic segmentation"),
        (lambda: detected(target="no object"), OptionError, "class of an object"),
        (lambda: detected((900, 900, 950, 950)), OptionError, "None of the 6 detections"),
        (lambda: detected(target=vitflow.Contrast(0, against=1)), OptionError, "rest"),
        (lambda: segmented(np.ones((3, 4))), ShapeError, r"\[80, 100\]"),
        (lambda: segmented((300, 5)), OutsideImageError, "100 × 80"),
        (lambda: segmented(np.zeros((80, 100))), OutsideImageError, "no pixel"),
    ],
)
def test_wrong_questions_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_overlays_and_figures_mark_the_detection_and_the_region(tmp_path):
    box = (32, 32, 64, 64)
    detected = Explainer(Cells(), data_config=CONFIG, outputs=vitflow.boxes(box), fit="squash")
    inside = Explainer(dense(), data_config=CONFIG, outputs=vitflow.masks(box), fit="squash")
    for explainer in (detected, inside):
        saliency = explainer.explain(bright(3), method="input_gradient", patch_size=16)
        image = saliency.overlay()
        assert (image[31, 32:] == 255).all() and (image[32:, 31] == 255).all() and (image[30, 32:] == 0).all()
        assert not (image[10, 10] == 255).all()
        saliency.figure(tmp_path / "map.png")
        assert any("outline" in note or "frame" in note for note in saliency._notes())


def test_rows_of_a_comparison_are_the_detections():
    explainer = Explainer(yolos(), data_config=CONFIG, outputs=vitflow.boxes(), fit="squash")
    comparison = vitflow.compare(photo(), model=explainer, methods=["gae", "occlusion"], targets="top2")
    queries = [each.facts["detection"]["query"] for each in comparison.saliencies]
    assert len(queries) == 4 and queries[:2] == queries[2:]
    rows = columns_of(comparison.images[0])
    assert [len(column) for column in rows] == [2, 2]
    first = rows[0][0]
    twin = replace(first, facts=first.facts | {"detection": first.facts["detection"] | {"query": 99}})
    assert len(columns_of([first, twin, first])[0]) == 2  # equal scores of two detections


def test_a_folder_has_a_row_and_a_map_for_the_most_probable_detection(tmp_path):
    (tmp_path / "in").mkdir()
    for seed in range(3):
        write_image(tmp_path / "in" / f"{seed}.png", photo(seed))
    explainer = Explainer(yolos(), data_config=CONFIG, outputs=vitflow.boxes(), fit="squash")
    methods = ["gae", "gradcam"]
    images, out = sorted((tmp_path / "in").glob("*")), tmp_path / "out"
    run = partial(vitflow.explain_folder, tmp_path / "in", out, model=explainer, methods=methods)
    rows, grids = list(run(workers=0)), {row["input"]: maps for row, maps in read_grids(out)}
    maps = explainer.explain_batch(images, methods=methods)
    for row, saliency in zip(rows, maps[::2], strict=True):  # the second method follows
        assert row["facts"]["gae"]["detection"] == saliency.facts["detection"]
        assert row["class_name"] == saliency.class_name
        assert row["probability"] == pytest.approx(saliency.probability, abs=1e-6)
        assert set(row["outputs"]) == set(methods)
        np.testing.assert_allclose(grids[row["input"]]["gae"], saliency.grid, rtol=1e-3)
    assert run().kept == 3
    written = {path.name for drawn in draw_run(out, tmp_path / "again") for path in drawn.paths}
    assert written == {Path(path).name for row in rows for path in row["outputs"].values()}
    with pytest.raises(OptionError, match="one class for all images"):
        run(target="top3")


def test_an_image_without_the_class_fails_alone(tmp_path):
    (tmp_path / "in").mkdir()
    for quarter in range(2):
        write_image(tmp_path / "in" / f"{quarter}.png", bright(quarter))
    explainer = Explainer(Cells(), data_config=CONFIG, outputs=vitflow.boxes((200, 0, 220, 20)), fit="squash")
    write_image(tmp_path / "in" / "wide.png", np.full((64, 400, 3), 230, np.uint8))
    summary = vitflow.explain_folder(tmp_path / "in", tmp_path / "out", model=explainer, methods=["input_gradient"])
    assert (summary.explained, summary.failed) == (1, 2)
    assert all("overlaps the box" in row["message"] for row in summary.failures())
