"""Results of other settings never share a folder: everything that they depend on changes the fingerprint."""

import inspect
import json
from functools import partial

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tests.folder.test_run import fill, tiny_model
from tests.folder.test_run import run as run_folder
from tests.pairs import DATA, Words, pair
from tests.small import Custom, custom_model
from vitflow import Explainer, explain_folder, prompts, similarity_to
from vitflow.demo import draw_image
from vitflow.errors import OptionError
from vitflow.evaluation import Labelled, Sample, evaluate, results
from vitflow.evaluation.datasets import open_dataset
from vitflow.evaluation.measuring import Protocol
from vitflow.evaluation.run import choose
from vitflow.evaluation.samples import Dataset
from vitflow.folder.saved import fingerprint_difference, run_fingerprint
from vitflow.folder.work import make_job
from vitflow.images.preprocessing import InputSpec
from vitflow.methods.tokens import TokenLayout
from vitflow.models.identity import state_sha256, weights_sha256
from vitflow.registry.method_table import list_methods
from vitflow.registry.options import METHOD_OPTIONS

CONFIG = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}


def explainer(**changed) -> Explainer:
    model = changed.pop("model", None)
    return Explainer(custom_model(dynamic_img_size=True) if model is None else model, data_config=CONFIG, **changed)


# One other value, at least, for each argument of Explainer.
OTHERS = {
    "model": [custom_model(num_classes=4), custom_model(num_heads=4), custom_model(global_pool="avg", fc_norm=False)],
    "device": ["meta"],
    "dtype": ["bfloat16", "float16"],
    "fit": ["squash", "pad", "native"],
    "class_names": [["a", "b", "c", "d", "e"]],
    "data_config": [
        CONFIG | {name: value}
        for name, value in {
            "mean": (0.4,) * 3,
            "std": (0.4,) * 3,
            "input_size": (3, 24, 24),
            "crop_pct": 0.5,
            "crop_mode": "squash",
            "interpolation": "bilinear",
        }.items()
    ],
    "layout": [TokenLayout(1, 4, 4)],
    "activation": ["sigmoid"],
    "name": ["mine"],
    "outputs": [
        similarity_to(np.zeros((8, 8, 3), np.uint8)),
        similarity_to(np.full((8, 8, 3), 200, np.uint8)),
        lambda output: output,
        lambda output: output * 2,
    ],
}
PROMPTS = [
    {},
    {"texts": ["a", "b"]},
    {"texts": ["b", "a"]},
    {"templates": ["the {}"]},
    {"processor": lambda texts, **options: Words()([text[::-1] for text in texts], **options)},
    {"raw": True},
]


def test_every_argument_of_the_explainer_changes_its_fingerprint(monkeypatch):
    arguments = [name for name in inspect.signature(Explainer.__init__).parameters if name != "self"]
    assert sorted(arguments) == sorted([*OTHERS, "checkpoint", "num_classes"]), (
        "an argument of Explainer without a case here"
    )
    usual = explainer().fingerprint()
    assert usual == explainer().fingerprint() == json.loads(json.dumps(usual)) | {"input": usual["input"]}
    seen = [json.dumps(usual)]
    for name, values in OTHERS.items():
        for value in values:
            if name == "device":  # there may be no other device here: as if there were
                other = explainer()
                other.device = torch.device(value)
            elif name == "data_config":
                other = Explainer(custom_model(dynamic_img_size=True), data_config=value)
            else:
                other = explainer(**{name: value})
            seen.append(json.dumps(other.fingerprint()))
    for options in PROMPTS:
        outputs = prompts(**{"texts": ["a dog", "red"], "processor": Words(), **options})
        seen.append(json.dumps(Explainer(pair("clip"), outputs=outputs, data_config=DATA).fingerprint()))
    assert len(set(seen)) == len(seen)
    assert set(usual["input"]) == {*InputSpec.__dataclass_fields__}


def test_explaining_leaves_the_fingerprint_as_it_is():
    for name, sizes in (
        ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2}),
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 2, "depths": (1, 1, 1, 1)}),
    ):
        model = timm.create_model(name, num_classes=3, **sizes)
        entry = Explainer(model, data_config={"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3})
        before = entry.fingerprint()
        entry.explain(np.zeros((64, 64, 3), np.uint8), method="rollout")
        assert fingerprint_difference(entry.fingerprint(), before) == []


def other_value(option, method):
    """A value of an option that is not its default."""
    default = method.defaults.get(option.name)
    if option.kind is bool:
        return not default
    if option.choices and option.name != "start_layer":  # a number, or "middle" for rollout alone
        return next(choice for choice in option.choices if choice != default)
    return (0, 1) if option.kind == tuple[int, int] else 2 if default != 2 else 1


@pytest.mark.parametrize("name", METHOD_OPTIONS)
def test_every_option_of_a_method_changes_both_fingerprints(name):
    entry = explainer()
    known = entry.fingerprint()
    for method in (method for method in list_methods() if method.accepts(name) and name in method.defaults):
        options = [{}, {name: other_value(METHOD_OPTIONS[name], method)}]
        methods = [make_job([(method.name, given)], {}).methods for given in options]
        folders = [run_fingerprint("folder", {}, known, each, {}) for each in methods]
        assert folders[0] != folders[1], method.name
        dataset = open_dataset("demo:2")
        protocols = [Protocol(tuple(choose([(method.name, given)], {})[:1]), ("faithfulness",)) for given in options]
        settings = [protocol.settings(dataset, entry) for protocol in protocols]
        assert settings[0]["options"] != settings[1]["options"]


# What may differ between two runs over one folder, for it changes no result of an image.
FREE = {"source", "output", "recursive", "limit", "batch_size", "workers", "overwrite", "report"}
FREE |= {"progress", "engine", "address", "actors", "manifest"}


def test_every_option_of_a_folder_run_changes_its_fingerprint(tmp_path):
    source = fill(tmp_path / "in", 1)
    others = {
        "model": explainer(),
        "methods": ["rollout", "centre"],
        "target": 2,
        "drawing": {"alpha": 0.3},
        "format": "png",
        "overlays": False,
        "options": {"residual": 0.3},
    }
    assert set(inspect.signature(explain_folder).parameters) == FREE | set(others)
    run_folder(source, tmp_path / "out")
    for name, value in others.items():
        with pytest.raises(OptionError, match="contains a run with other options"):
            run_folder(source, tmp_path / "out", **(value if name == "options" else {name: value}))


FREE_OF_EVALUATIONS = {"output", "card", "images", "limit", "batch_size", "overwrite", "progress"}


def test_every_option_of_an_evaluation_changes_its_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "draw_charts", lambda *_: {})
    usual = {"data": "demo:1", "model": explainer(), "methods": ["rollout"], "metrics": ["faithfulness", "sanity"]}
    usual |= {"points": 3, "sanity_images": 0}
    others = {
        "data": "demo:1:5",
        "model": explainer(activation="sigmoid"),
        "methods": ["centre"],
        "metrics": ["faithfulness"],
        "replace_by": "blank",
        "points": 4,
        "blurred_control": True,
        "sanity_images": 1,
        "seed": 1,
        "options": {"residual": 0.3},
    }
    assert set(inspect.signature(evaluate).parameters) == FREE_OF_EVALUATIONS | set(others)
    first = evaluate(**usual, output=tmp_path / "out").to_csv()
    for name, value in others.items():
        changed = usual | (value if name == "options" else {name: value})
        with pytest.raises(OptionError, match="contains a run with other options"):
            evaluate(**changed, output=tmp_path / "out")
    second = evaluate(**usual | {"methods": ["centre"]}, output=tmp_path / "out", overwrite=True).to_csv()
    assert "rollout" in first and "rollout" not in second


class Holding(timm.models.VisionTransformer):
    """Sees its images brighter by what it holds."""

    read = staticmethod(lambda model: 1.0)

    def forward(self, x, **options):
        return super().forward(x * self.read(self), **options)


def holding(value, read) -> torch.nn.Module:
    model = tiny_model(Holding)
    vars(model).update(held=value, read=read)
    if isinstance(value, float):
        model.register_buffer("tensor", torch.tensor(vars(model).pop("held")), persistent=False)
    return model


def hooked(turned: bool) -> torch.nn.Module:
    """Turned, its patches change places after the first block, of which its answer tells nothing."""
    model = tiny_model()
    flip = lambda module, x, y: torch.cat([y[:, :1], y[:, 1:].flip(1)], 1) if turned else y  # noqa: E731
    model.blocks[0].register_forward_hook(flip)
    return model


def forwarding(value: float) -> torch.nn.Module:
    model = tiny_model()
    plain = model.blocks[0].attn.qkv.forward
    model.blocks[0].attn.qkv.forward = lambda x: plain(x) * value
    return model


PAIRS = {
    "a list": [partial(holding, [value], lambda model: model.held[0]) for value in (1.0, 1.3)],
    "a dict": [partial(holding, {"all": value}, lambda model: model.held["all"]) for value in (1.0, 1.3)],
    "a number": [partial(holding, np.float32(value), lambda model: float(model.held)) for value in (1.0, 1.3)],
    "a function": [partial(holding, lambda value=value: value, lambda model: model.held()) for value in (1.0, 1.3)],
    "a tensor": [partial(holding, torch.tensor(value), lambda model: model.held) for value in (1.0, 1.3)],
    "a buffer": [partial(holding, value, lambda model: model.tensor) for value in (1.0, 1.3)],
    "a hook": [partial(hooked, turned) for turned in (False, True)],
    "a forward": [partial(forwarding, value) for value in (1.0, 1.3)],
}


@pytest.mark.parametrize("kind", PAIRS)
def test_models_of_the_same_weights_that_compute_something_else_have_other_fingerprints(kind):
    make, make_other = PAIRS[kind]
    first, again, other = (Explainer(each).fingerprint() for each in (make(), make(), make_other()))
    assert fingerprint_difference(again, first) == []
    assert "the model has other code, attributes or hooks" in fingerprint_difference(other, first)[0]


def headed(head) -> torch.nn.Module:
    """A model with a function of its features."""
    return Custom(lambda self, x: self.head(self.model(x)), model=tiny_model(), head=head)


def local_model(factor: int) -> torch.nn.Module:
    class Local(Custom):
        def forward(self, x):
            return super().forward(x) * factor

    return Local(lambda self, x: self.model(x), model=tiny_model())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: local_model(1), lambda: local_model(2)),
        (lambda: headed(lambda x: x + 1), lambda: headed(lambda x: x + 2)),
        (lambda: headed(partial(torch.roll, shifts=1)), lambda: headed(partial(torch.roll, shifts=2))),
        (lambda: headed(torch.nn.GELU()), lambda: headed(torch.nn.GELU("tanh"))),
        (lambda: headed(torch.sigmoid), lambda: headed(torch.tanh)),
        (lambda: headed({"a": [{1, 2}]}.get), lambda: headed(len)),
    ],
)
def test_other_code_or_settings_are_another_model(one, other):
    assert state_sha256(one()) == state_sha256(one()) != state_sha256(other())


def test_code_is_its_source_file_and_without_one_no_model_is_the_same(tmp_path):
    def module_of(text: str | None, number: float) -> torch.nn.Module:
        code = f"import torch\nFACTOR = {number}\nclass Scale(torch.nn.Module):\n"
        code += "    def forward(self, x):\n        return FACTOR * x\n"
        path, names = tmp_path / f"own{number}.py", {"__name__": "own"}
        if text is not None:
            path.write_text(code + text)
        exec(compile(code, str(path) if text is not None else "<unknown>", "exec"), names)
        return names["Scale"]()

    assert state_sha256(module_of("", 2)) == state_sha256(module_of("", 2)) != state_sha256(module_of("", 3))
    unknown = module_of(None, 2)
    assert state_sha256(unknown) != state_sha256(unknown)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization", "ignore:torch.quantize_per")
def test_quantised_models_are_identified():
    def quantised(scale: float) -> torch.nn.Module:
        model = tiny_model()
        model.head.weight.data *= scale
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    hashes = [weights_sha256(quantised(scale)) for scale in (1.0, 1.0, 2.0)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_images_in_memory_are_distinguished_by_their_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "draw_charts", lambda *_: {})
    options = {"model": tiny_model(), "methods": ["rollout"], "metrics": ["faithfulness"], "points": 3}
    images = [draw_image(seed).image for seed in range(4)]
    first = evaluate(images[:2], output=tmp_path / "out", **options)
    assert (evaluate(images[:2], output=tmp_path / "out", **options).values["gap"] == first.values["gap"]).all()
    others = evaluate(images[2:], output=tmp_path / "out", **options)
    assert (others.values["gap"] == evaluate(images[2:], **options).values["gap"]).all()
    assert (others.values["gap"] != first.values["gap"]).any()
    as_pillow = evaluate([Image.fromarray(image) for image in images[:2]], output=tmp_path / "out", **options)
    assert (as_pillow.values["gap"] == first.values["gap"]).all()


def test_a_sample_is_distinguished_by_its_pixels_and_its_truth():
    images = [draw_image(seed).image for seed in (0, 1)]
    drawn = open_dataset("demo:2").samples
    photos = [Labelled(images[0]), Labelled(images[1]), Labelled(images[0], None, 3), drawn[0].read()]
    stamps = [Sample("own", lambda image=image: image).stamp() for image in photos]
    assert len({json.dumps(stamp) for stamp in stamps}) == 4
    assert Dataset("d", "d", [Sample("own", lambda: photos[0])], False).samples[0].stamp() == stamps[0]
