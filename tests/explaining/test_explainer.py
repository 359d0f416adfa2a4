"""From images to saliency: batches, fits, targets, wrappers, and errors that say what to do."""

import inspect
import io
import json
from collections import UserDict, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.models import ViT_B_16_Weights
from transformers import ViTConfig, ViTForImageClassification

import vitflow
from tests.small import DATA, Custom, custom_model, photo
from vitflow import Contrast, Explainer
from vitflow.errors import ImageError, ModelError, OptionError, UnsupportedModelError
from vitflow.explaining.captions import class_lines
from vitflow.explaining.targets import resolve_targets
from vitflow.models.classes import class_index, imagenet_names
from vitflow.models.names import class_names_of


def explainer(fit: str = "crop", **options) -> Explainer:
    return Explainer(custom_model(**options), fit=fit, data_config=DATA)


IMAGES = [photo(40, 60), photo(80, 35, 1), photo(32, 32, 2), photo(33, 61, 3), photo(9, 7, 4)]


@pytest.mark.parametrize("fit", ["crop", "squash", "pad", "native"])
def test_a_batch_gives_what_single_images_give(fit):
    explaining = explainer(fit, dynamic_img_size=True)
    together = explaining.explain_batch(IMAGES, methods=["rollout", ("attention", {"head": 1})], head_fusion="max")
    assert len(together) == 10
    for index, image in enumerate(IMAGES):
        for offset, (method, options) in enumerate([("rollout", {}), ("attention", {"head": 1})]):
            alone = explaining.explain(image, method=method, head_fusion="max", **options)
            actual = together[2 * index + offset]
            assert actual.method == method
            np.testing.assert_allclose(actual.grid, alone.grid, rtol=1e-4, atol=1e-7)
            assert actual.target == alone.target
            assert actual.image.shape == image.shape == (*actual.heatmap.shape, 3)


def test_a_patch_can_be_requested_instead_of_the_answer():
    explaining, image = explainer(), photo(50, 50)
    with torch.no_grad(), vitflow.record_attention(explaining.model) as trace:
        explaining.model(explaining.pixels(image))
    plain = {"value_weighted": False, "refine": 0}
    actual = explaining.explain(image, method="attention", patch=(1, 2), layer=2, discard_ratio=0.0, **plain)
    expected = trace.attentions[1][0].mean(0)[1 + 1 * 4 + 2, 1:]
    np.testing.assert_allclose(actual.grid.ravel(), expected.numpy(), rtol=1e-5)
    whole = explaining.explain(image, preset="paper", head_fusion="max", discard_ratio=0.5)
    expected = vitflow.attention_rollout(trace.attentions, head_fusion="max", discard_ratio=0.5)[0, 0, 1:]
    np.testing.assert_allclose(whole.grid.ravel(), expected.numpy(), rtol=1e-5)
    passes: list[object] = []
    with explaining.model.register_forward_hook(lambda *_: passes.append(None)):
        explaining.explain(image, method="attention")  # which tests the model on noise, once
        passes.clear()
        explaining.explain(image, method="rollout", patch=(1, 2))
    assert len(passes) == 1  # the readout of the output is not measured
    with pytest.raises(OptionError, match=r"Patch \(4, 0\) is outside the grid of 4 × 4"):
        explaining.explain(image, patch=(4, 0))


def test_images_are_called_by_their_names():
    explaining, images = explainer(), [photo(40, 40), photo(40, 60)]
    assert [actual.source for actual in explaining.explain_batch(images)] == ["image 1", "image 2"]
    assert [actual.source for actual in explaining.explain_batch(images, names=["a", "b"])] == ["a", "b"]
    with pytest.raises(OptionError, match="one name for each of 2 images, got 1"):
        explaining.explain_batch(images, names=["a"])


def test_one_image_is_a_batch_of_one(tmp_path):
    explaining, path = explainer(), tmp_path / "p" / "ünï 写真.png"
    path.parent.mkdir()
    Image.fromarray(photo(40, 60)).save(path)
    expected = explaining.explain(photo(40, 60)).grid
    with Image.open(path) as opened:
        opened.load()
    for one in (str(path), path, path.read_bytes(), io.BytesIO(path.read_bytes()), opened, photo(40, 60)):
        [actual] = explaining.explain_batch(one)
        np.testing.assert_array_equal(actual.grid, expected)
    assert len(explaining.explain_batch(np.stack([photo(40, 60)] * 2))) == 2
    with pytest.raises(ImageError, match=r"got the folder .*\. vitflow\.explain_folder explains all images in it"):
        explaining.explain_batch(path.parent)


def test_a_method_and_a_target_by_the_name_that_another_function_gives_them():
    explaining, image = explainer(), photo(40, 40)
    [one] = explaining.explain_batch([image], method="gae", target=3)
    [same] = explaining.explain_batch([image], methods=["gae"], targets=[3])
    assert (one.method, one.target) == ("gae", 3)
    np.testing.assert_array_equal(one.grid, same.grid)
    for wrong in ({"method": "gae"}, {"target": 3}):
        name = next(iter(wrong))
        if name == "method":
            with pytest.raises(OptionError, match=f"Unknown option '{name}': use {name}s=, which takes"):
                vitflow.compare([image], model=explaining, **wrong)
        with pytest.raises(OptionError, match=f"{name}= or {name}s="):
            explaining.explain_batch([image], **wrong, **{f"{name}s": [wrong[name]]})
    for wrong in ({"methods": ["gae"]}, {"targets": 3}):
        for function in (explaining.explain, partial(vitflow.layer_maps, model=explaining)):
            with pytest.raises(OptionError, match=f"{next(iter(wrong))}.*explain_batch"):
                function(image, **wrong)
    [one] = explaining.explain_batch([image], methods="rollout")
    assert one.method == "rollout"
    with pytest.raises(OptionError, match=r"Unknown option 'against': use target=vitflow\.Contrast"):
        explaining.explain(image, target=1, against=2)
    with pytest.raises(OptionError, match=r"Unknown option 'cmap': .* drawing options of overlay"):
        explaining.explain(image, method="rollout", cmap="jet")
    with pytest.raises(OptionError, match=r"Unknown option 'category': use target= \(targets="):
        explaining.explain_batch([image], category=3)


@pytest.mark.parametrize(
    "images", [[IMAGES[0]] * 2, (IMAGES[0], "b.jpg"), torch.zeros(2, 3, 32, 32), np.stack(IMAGES[2:3] * 3)]
)
def test_explain_names_the_call_that_takes_several(images):
    with pytest.raises(OptionError, match=f"got {len(images)}.*explain_batch"):
        explainer().explain(images)
    with pytest.raises(OptionError, match="explain_batch"):
        explainer().explain(IMAGES[2], method=["gae", "rollout"])


def test_switches_are_on_and_off_as_on_the_command_line():
    explaining, image = explainer(), photo(40, 40)
    for text, value in (("off", False), ("on", True), ("output", "output")):
        one = explaining.explain(image, method=("rollout", {"value_weighted": text}))
        same = explaining.explain(image, method="rollout", value_weighted=value)
        assert one.options == same.options
        assert one.options["value_weighted"] is value
        np.testing.assert_array_equal(one.grid, same.grid)
    with pytest.raises(OptionError, match="on, off, output"):
        explaining.explain(image, value_weighted="yes")


def test_imagenet_classes_by_any_of_their_names():
    libraries = class_names_of(timm.create_model("test_vit")), ViT_B_16_Weights.DEFAULT.meta["categories"]
    for names in libraries:
        for requested, index in (("Egyptian  CAT", 285), ("n02124075", 285), ("Fire_Engine", 555)):
            assert class_index(requested, 1000, names) == index, requested
        # A red panda is called bear cat, too, and spelt more like a cat than a tabby cat is.
        with pytest.raises(OptionError, match="Did you mean .*Egyptian cat.*tabby") as error:
            class_index("cat", 1000, names)
        assert "panda" not in str(error.value) and "Persian cat" in str(error.value)
    with pytest.raises(OptionError, match="Did you mean .*bald eagle"):
        class_index("eagel", 1000, imagenet_names(1000))
    entry = [f"bird_{number}" for number in range(1000)]  # as many as ImageNet's, and others
    assert class_index("Bird 12", 1000, entry) == 12
    with pytest.raises(OptionError, match="Unknown class 'n02124075'"):
        class_index("n02124075", 1000, entry)


def test_targets_by_index_and_by_name():
    explaining = Explainer(custom_model(), data_config=DATA, class_names=["ant", "bee", "cow", "dog", "Emu"])
    image = photo(40, 40)
    predicted = explaining.explain(image)
    with torch.no_grad():
        probabilities = explaining.model(explaining.pixels(image)).softmax(-1)[0]
    assert predicted.target == predicted.score.predicted == int(probabilities.argmax())
    assert predicted.probability == pytest.approx(float(probabilities.max()), rel=1e-5)
    emu = explaining.explain(image, target="emu", method="rollout")
    assert (emu.target, emu.class_name) == (4, "Emu")
    assert emu.probability == pytest.approx(float(probabilities[4]), rel=1e-5)
    assert (emu.grid == predicted.grid).all()  # rollout does not depend on the class
    for target, message in (("bea", "Did you mean 'bee'"), (5, "from 0 to 4, got 5"), ("-1", "from 0 to 4, got -1")):
        with pytest.raises(OptionError, match=message):
            explaining.explain(image, target=target)


NAMES = ["ant", "bee", "cow", "dog", "Emu"]


def test_class_names_come_as_a_file_a_list_or_a_mapping(tmp_path):
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    (tmp_path / "windows.txt").write_text("\r\n".join(NAMES), encoding="utf-8-sig", newline="")
    numbered = dict(enumerate(NAMES))
    for reported in (str(tmp_path / "names.txt"), tmp_path / "windows.txt", tuple(NAMES), np.array(NAMES), numbered):
        assert Explainer(custom_model(), data_config=DATA, class_names=reported).class_names == NAMES
    turned = {str(number): numbered[number] for number in reversed(range(5))}
    assert Explainer(custom_model(), data_config=DATA, class_names=turned).class_names == NAMES


def test_class_names_that_do_not_fit_the_model_are_refused(tmp_path):
    silent = custom_model()
    del silent.num_classes  # a model that does not say how many classes it has: it is tried
    for model in (custom_model(), silent):
        for reported in (NAMES[:2], [*NAMES, "fly"], dict(enumerate(NAMES[:4]))):
            with pytest.raises(ModelError, match=f"Expected 5 class names, .* got {len(reported)}"):
                Explainer(model, data_config=DATA, class_names=reported)
    wrong = (
        {0: "ant", 1: "bee", 2: "cow", 3: "dog", 5: "Emu"},
        {name: n % 4 for n, name in enumerate(NAMES)},
        {*NAMES},
        5,
    )
    for reported in wrong:
        with pytest.raises(ModelError, match="{index: name} or {name: index} with every index"):
            Explainer(custom_model(), data_config=DATA, class_names=reported)


def test_a_model_goes_by_the_name_that_the_user_gives_it():
    model = timm.create_model("test_vit.r160_in1k")
    assert "test_vit, 1000 classes" in repr(Explainer(model))  # random weights, whatever tag timm writes
    explaining = Explainer(model, name="birds,\nepoch 40 ")
    saliency = explaining.explain(photo(40, 40))
    assert saliency.model == saliency.to_dict()["model"] == explaining.model_id == "birds,\\nepoch 40"
    for name in ("", " ", 3):
        with pytest.raises(OptionError, match="Expected a name for the model, such as"):
            Explainer(model, name=name)


def test_the_most_probable_classes_names_of_digits_and_shared_names():
    probabilities = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])
    actual = resolve_targets("top2", probabilities, None)
    assert [t.tolist() for t in actual if t is not None] == [[1, 0], [2, 2]]
    assert [t.tolist() for t in resolve_targets(["top9"], probabilities, None)] == [[1, 0], [2, 2], [0, 1]]
    with pytest.raises(OptionError, match=r"Several classes are called 'crane'.*\(0\).*\(1\)"):
        class_index("crane", 2, ["crane", "crane"])
    assert class_index("killer whale", 2, ["grampus, killer whale", "other"]) == 0
    names = ["0", "1", "10", "2"]  # folders in the order of their names
    assert [class_index(text, 4, names) for text in ("2", "10", "3")] == [3, 2, 3]
    assert [class_index(number, 4, names) for number in (2, np.int64(1))] == [2, 1]


def test_multi_label_probabilities_are_sigmoids():
    model, image = custom_model(), photo(40, 40)
    saliency = Explainer(model, data_config=DATA, activation="sigmoid").explain(image, target=3)
    with torch.no_grad():
        expected = model(Explainer(model, data_config=DATA).pixels(image)).sigmoid()[0, 3]
    assert saliency.probability == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("around", "activation"), [(False, None), (False, "softmax"), (True, None)])
def test_a_single_logit_is_read_by_a_sigmoid(around, activation, tmp_path):
    model = custom_model(num_classes=1)
    if around:  # a module that does not say how many classes it has
        model = Custom(lambda self, pixels: self.inner(pixels), inner=model)
    explaining = Explainer(model, data_config=DATA, activation=activation)
    for image in IMAGES[:2]:
        logit = explaining.logits(explaining.pixels(image))[0, 0].detach().double()
        expected = float(logit.sigmoid())
        assert 0.01 < expected < 0.99
        for target in (None, "top1", 0):
            actual = explaining.explain(image, method="gae", target=target)
            assert actual.to_dict()["probability"] == pytest.approx(expected, rel=1e-5)
            assert actual.to_dict()["value"] == actual.probability
            assert (actual.target, actual.score.predicted, actual.facts.get("note")) == (0, 0, None)
            assert list(class_lines(actual.score)) == [f"class 0, {expected:.1%} (sigmoid)"]
    with pytest.raises(OptionError, match="Expected several outputs for a contrast with the rest, got one"):
        explaining.explain(IMAGES[0], method="gae", target=Contrast(0, against="rest"))
    (tmp_path / "in").mkdir()
    Image.fromarray(IMAGES[1]).save(tmp_path / "in" / "1.png")
    vitflow.explain_folder(tmp_path / "in", tmp_path / "out", model=explaining)
    (row,) = map(json.loads, (tmp_path / "out" / "manifest.jsonl").read_text().splitlines())
    assert (row["probability"], row["predicted_index"]) == (pytest.approx(expected, rel=1e-4), 0)


def test_a_single_logit_is_a_value_if_that_is_requested():
    explaining = Explainer(custom_model(num_classes=1), data_config=DATA, activation="value")
    actual = explaining.explain(photo(40, 40))
    logit = float(explaining.logits(explaining.pixels(photo(40, 40)))[0, 0].detach())
    assert (actual.score.value, actual.probability) == (pytest.approx(logit, rel=1e-5), None)


@pytest.mark.parametrize(("problem", "count"), [(None, 1), ("regression", 1), ("regression", 2)])
def test_a_regression_of_transformers_is_read_as_values(problem, count):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=count, problem_type=problem)
    torch.manual_seed(0)
    explaining = Explainer(ViTForImageClassification(config).eval(), data_config=DATA)
    actual = explaining.explain(photo(40, 40), method="gae", target=0)
    logit = explaining.logits(explaining.pixels(photo(40, 40)))[0, 0].detach().double()
    expected = logit if problem == "regression" else logit.sigmoid()
    assert actual.score.value == pytest.approx(float(expected), rel=1e-5)
    assert (actual.probability is None) is (problem == "regression")


def test_a_model_without_classes_is_explained_without_them():
    saliency = explainer(num_classes=0).explain(photo(40, 40))
    assert (saliency.target, saliency.probability, saliency.label) == (None, None, "")
    with pytest.raises(OptionError, match="outputs=lambda"):
        explainer(num_classes=0).explain(photo(40, 40), target=1)


def two(pack) -> nn.Module:
    """A model with two outputs, in whatever `pack` makes of them."""

    def compute(self, pixels):
        tokens = self.body.forward_features(pixels)
        return pack(self.body.forward_head(tokens), tokens)

    return Custom(compute, body=custom_model())


Named = namedtuple("Named", "tokens logits")


@dataclass(slots=True)
class Fields:
    cls: torch.Tensor
    tokens: torch.Tensor


@pytest.mark.parametrize(
    "pack",
    [
        lambda logits, tokens: UserDict(hidden=tokens.mean(1), logits=logits),
        lambda logits, tokens: SimpleNamespace(hidden=tokens.mean(1), logits=logits),
        lambda logits, tokens: Named(tokens.mean(1), logits),
    ],
    ids=["mapping", "object", "namedtuple"],
)
def test_logits_are_taken_from_any_kind_of_output(pack):
    image = photo(40, 40)
    actual = Explainer(two(pack), data_config=DATA).explain(image, method="gae", target=2)
    expected = explainer().explain(image, method="gae", target=2)
    assert actual.probability == pytest.approx(expected.probability)
    np.testing.assert_allclose(actual.grid, expected.grid, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("pack", "reported", "example"),
    [
        (lambda one, two: (one, one), ["tuple with [0] (1, 5), [1] (1, 5)"], "output[0]"),
        (lambda one, two: Fields(one, two), ["Fields with cls (1, 5), tokens (1, 17, 24)"], "output.cls"),
        (lambda one, two: {"index": one.argmax(1), "age": one[:, 0]}, ['["age"] (1,)'], 'output["age"][:, None]'),
        (lambda one, two: {"map": two[:, 1:].unflatten(1, (4, 4)).movedim(3, 1)}, [], 'output["map"].mean((2, 3))'),
    ],
)
def test_an_output_without_logits_is_answered_with_an_example_that_works(pack, reported, example):
    model, image = two(pack), photo(40, 40)
    with pytest.raises(ModelError, match="one tensor of logits") as caught:
        Explainer(model, data_config=DATA).explain(image)
    assert [words for words in reported if words not in str(caught.value)] == [], str(caught.value)
    assert f"outputs=lambda output: {example}." in str(caught.value)
    outputs = eval(f"lambda output: {example}")
    assert Explainer(model, outputs=outputs, data_config=DATA).explain(image, method="gae").grid.any()


def test_nan_logits_are_an_error_and_no_map():
    model = custom_model()
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN or infinite"):
        Explainer(model, data_config=DATA).explain(photo(40, 40))


def test_wrong_set_ups_are_named():
    for options in ({"fit": "stretch"}, {"device": "cuda:99"}, {"device": "mps"}, {"activation": "tanh"}):
        with pytest.raises(OptionError, match=next(iter(options))):
            Explainer(custom_model(), data_config=DATA, **options)
    with pytest.raises(UnsupportedModelError, match="dynamic_img_size=True"):
        explainer("native")
    for options in ({"method": "rolout"}, {"head_fusoin": "max"}, {"method": "gae", "preset": "papers"}):
        with pytest.raises(OptionError, match="Did you mean|Unknown gae preset"):
            explainer().explain(photo(40, 40), **options)


def test_a_saved_map_holds_all_that_made_it(tmp_path):
    saliency = explainer().explain(photo(40, 60), head_fusion="max")
    with np.load(saliency.save(tmp_path / "deep" / "map.npz")) as saved:
        np.testing.assert_array_equal(saved["grid"], saliency.grid)
        np.testing.assert_array_equal(saved["heatmap"], saliency.heatmap)
        metadata = json.loads(str(saved["metadata"]))
    assert metadata == json.loads(json.dumps(saliency.to_dict()))
    assert metadata["options"]["head_fusion"] == "max"
    assert metadata["method"] == "rollout"
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["map.npz"]


@pytest.mark.shared
def test_the_trained_vit_tiny_knows_the_photographs(shared_data):
    """Top-1 agrees with the label on at least 30 of 40 photographs: the preprocessing is the model's own."""
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    explaining = Explainer(vitflow.load_model(name, checkpoint=shared_data / f"{name}.safetensors"))
    rows = [line.split(",")[:2] for line in (shared_data / "photos/labels.csv").read_text().splitlines()[1:]]
    files = [shared_data / "photos" / file for file, _ in rows]
    actual = [
        saliency.score.predicted
        for start in range(0, 40, 10)
        for saliency in explaining.explain_batch(files[start : start + 10])
    ]
    assert sum(target == int(label) for target, (_, label) in zip(actual, rows, strict=True)) >= 30


def test_the_model_is_the_second_argument():
    for function in (vitflow.explain, vitflow.compare, vitflow.layer_maps, vitflow.feature_maps, vitflow.explore):
        assert list(inspect.signature(function).parameters)[1] == "model"
    for wrong in ("cat.jpg", IMAGES[0], IMAGES, torch.zeros(3, 8, 8)):
        with pytest.raises(OptionError, match="image first"):
            vitflow.explain("demo", wrong)


def test_signatures_fit_a_screen():
    for function in (Explainer.explain, vitflow.explain):
        signature = str(inspect.signature(function))
        assert len(signature) < 10 * 110 and "head_fusion" not in signature
