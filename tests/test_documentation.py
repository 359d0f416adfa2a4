"""Examples of the documentation run: docstring examples, Python blocks and command lines."""

import ast
import doctest
import importlib
import importlib.util
import io
import pkgutil
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image

import vitflow
from tests.models.vision_language import family
from tests.text.test_reading import wordpiece_tokenizer
from vitflow.cli import cli
from vitflow.demo import sample_images
from vitflow.errors import VitflowWarning
from vitflow.registry.method_table import get_method

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SITE]


def place(page: Path) -> str:
    """Return the path of a page in the project, as the name of its tests."""
    return page.relative_to(ROOT).as_posix()


def has_examples(name: str) -> bool:
    """Return True if the source of a module has a docstring's prompt, without parsing it."""
    return ">>> " in Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")


def count_examples(name: str) -> int:
    """Count the examples in the docstrings of a module."""
    source = Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return sum(len(doctest.DocTestParser().get_examples(text)) for text in texts)


MODULES = [module.name for module in pkgutil.walk_packages(vitflow.__path__, "vitflow.")]


@pytest.mark.parametrize("name", [*filter(has_examples, MODULES)])
def test_the_examples_of_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, reported = doctest.DocTestRunner(verbose=False), io.StringIO()
    for test in doctest.DocTestFinder().find(importlib.import_module(name), name):
        runner.run(test, out=reported.write)
    assert not runner.failures, reported.getvalue()
    assert runner.tries == count_examples(name) > 0, "an example stands where nobody finds it"


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, each with the line that it begins on."""
    text = page.read_text(encoding="utf-8")
    actual = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in actual]


def command_lines(page: Path) -> Iterator[tuple[int, list[str]]]:
    """The words of each line that is typed into a shell, without its comment."""
    for first, block in blocks(page, "sh"):
        for number, line in enumerate(block.splitlines(), start=first):
            if words := shlex.split(line, comments=True):
                yield number, words


def by_page(actual) -> list:
    """A test parameter for each page and line that something stands on."""
    return [pytest.param(what, id=f"{place(page)}:{number}") for page in PAGES for number, what in actual(page)]


def test_what_readers_search_for_is_the_name_of_one_page():
    """The site makes main entries of the index of these names, which its search lists first."""
    pages: dict[str, list[str]] = {}
    for page in SITE:
        for names in re.findall(r"<!-- also known as: (.*?)\s-->", page.read_text(encoding="utf-8"), re.DOTALL):
            for name in " ".join(names.split()).lower().split(", "):
                pages.setdefault(name, []).append(page.stem)
    expected = {"gpu": "costs", "speed": "costs", "which method": "methods", "colour map": "drawing"}
    expected |= {"save without frame": "publish-a-figure", "regression": "regression"}
    assert {name: pages.get(name) for name in expected} == {name: [page] for name, page in expected.items()}


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    """The folder that a reader types in: some images, and weights of their own."""
    monkeypatch.chdir(tmp_path)
    images = sample_images()
    (tmp_path / "photographs").mkdir()
    names = ("cat.jpg", "photo.jpg", "drawn.png", "photographs/1.jpg", "photographs/2.jpg")
    for name, image in zip(names, images, strict=False):
        Image.open(image).convert("RGB").save(name)
    writer = cv2.VideoWriter("clip.mp4", cv2.VideoWriter.fourcc(*"mp4v"), 8.0, (64, 48))
    for shade in range(16):
        writer.write(np.full((48, 64, 3), 10 * shade, np.uint8))
    writer.release()
    (tmp_path / "labels.csv").write_text("file,label_index\n1.jpg,0\n2.jpg,1\n")
    (tmp_path / "names.txt").write_text("tabby\ntiger cat\nPersian cat\n")
    return tmp_path


@pytest.fixture
def hub(monkeypatch) -> None:
    """Small models with random weights in the place of those that would be downloaded."""
    create = timm.create_model

    def small(name: str, pretrained: bool = False, **options):
        if not pretrained and name != "vit_small_patch16_224":
            return create(name, **options)
        return create("vit_tiny_patch16_224", **({"num_classes": 1000, "depth": 2} | options))

    theirs = transformers.PreTrainedModel.from_pretrained.__func__
    images = transformers.AutoImageProcessor.from_pretrained

    def no_weights(kind, name: str, **options):
        if Path(name).is_dir():  # random weights of another family's own size may be more than the machine holds
            return theirs(kind, name, **options)
        configuration = kind.config_class(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, num_labels=1000)
        return kind(configuration)

    def random_vit(weights=None):
        model = torchvision.models.VisionTransformer(224, 16, num_layers=2, num_heads=2, hidden_dim=24, mlp_dim=48)
        torch.nn.init.normal_(model.heads.head.weight)  # a head of zeros has no gradient
        return model

    monkeypatch.setattr(timm, "create_model", small)
    monkeypatch.setattr(torchvision.models, "vit_b_16", random_vit)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(no_weights))

    def language_model(name: str, **options: object):
        tokenizer = wordpiece_tokenizer()
        size = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": len(tokenizer)}
        return transformers.BertForMaskedLM(transformers.BertConfig(**size)).eval(), tokenizer

    monkeypatch.setattr(importlib.import_module("vitflow.text.reading"), "load_language_model", language_model)
    generating = importlib.import_module("vitflow.text.generating")

    def seeing(name: str):
        return family("qwen2_vl" if "Qwen" in str(name) else "llava")

    monkeypatch.setattr(
        generating, "load_language_model", lambda name, **_: (seeing(name).model, seeing(name).processor.tokenizer)
    )
    monkeypatch.setattr(generating, "load_processor", lambda name, **_: seeing(name).processor)
    monkeypatch.setattr(
        transformers.AutoImageProcessor,
        "from_pretrained",
        lambda name, **entry: images(name, **entry) if Path(name).is_dir() else transformers.ViTImageProcessor(),
    )


@pytest.fixture
def known_methods() -> Iterator[None]:
    """Methods that a page registers are forgotten after it."""
    before = [method.name for method in vitflow.list_methods()]
    yield
    table = importlib.import_module(vitflow.register_method.__module__).METHODS
    for name in set(table) - set(before):
        del table[name]


@pytest.fixture
def logged(monkeypatch) -> dict[tuple[str, int], object]:
    """Values that TensorBoard gets, by name and epoch, from modules that stand for the loggers."""
    values: dict[tuple[str, int], object] = {}

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            self.add_scalar = self.add_image

        def add_image(self, name: str, value: object, epoch: int, dataformats: str = "HWC") -> None:
            assert dataformats == "HWC" and (name, epoch) not in values
            values[name, epoch] = value

    wandb = SimpleNamespace(Image=lambda image, caption: (image, caption), log=lambda entries: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(Callback=object))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return values


@pytest.mark.usefixtures("hub", "desk")
def test_maps_are_logged_without_a_trace_in_the_training(logged):
    (_, loop), (_, callback), _ = blocks(ROOT / "docs" / "how-to" / "training.md", "python")
    names, silent = {}, {}
    for code, space in ((loop.replace("    log_maps(writer,", "    (writer,"), silent), (loop, names)):
        torch.manual_seed(0)
        exec(code, space)
        space["random"] = torch.rand(3)
    assert torch.equal(names["random"], silent["random"]) and names["model"].training
    for name, weight in names["model"].state_dict().items():
        assert torch.equal(weight, silent["model"].state_dict()[name]), name
    assert len(logged) == 8 and not np.array_equal(logged["maps/cat.jpg", 0], logged["maps/cat.jpg", 1])
    expected = vitflow.explain("cat.jpg", model=names["model"], method="gae", target=0)
    np.testing.assert_array_equal(logged["maps/cat.jpg", 1], expected.overlay())
    assert logged["probabilities/cat.jpg", 1] == expected.score.probability
    exec(callback, names)
    trainer = SimpleNamespace(
        is_global_zero=True, sanity_checking=False, current_epoch=7, logger=SimpleNamespace(experiment=names["writer"])
    )
    names["LogMaps"]().on_validation_epoch_end(trainer, SimpleNamespace(model=names["model"]))
    np.testing.assert_array_equal(logged["maps/cat.jpg", 7], logged["maps/cat.jpg", 1])


def test_a_map_has_the_georeference_of_its_scene(desk):
    rasterio = pytest.importorskip("rasterio", reason="rasterio is not in the test extra")
    scene = {"crs": "EPSG:32632", "transform": rasterio.Affine(10.0, 0.0, 6e5, 0.0, -10.0, 5.3e6)}
    form = {"driver": "GTiff", "height": 48, "width": 64, "count": 3, "dtype": "uint8"}
    with rasterio.open(desk / "field.tif", "w", **form, **scene) as file:
        file.write(np.random.default_rng(0).integers(0, 256, (3, 48, 64), dtype=np.uint8))
    names: dict[str, object] = {}
    [(_, block)] = blocks(ROOT / "docs" / "how-to" / "geotiff.md", "python")
    exec(block, names)
    with rasterio.open(desk / "field-gae.tif") as file:
        assert file.crs.to_epsg() == 32632 and file.transform == scene["transform"] and np.isnan(file.nodata)
        np.testing.assert_array_equal(file.read(1), names["saliency"].heatmap)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page.stem != "geotiff"], ids=place
)
@pytest.mark.usefixtures("hub", "known_methods", "logged")
def test_the_python_of_a_page_runs(page, desk):
    if page.stem == "fiftyone":
        pytest.importorskip("fiftyone", reason="fiftyone, which starts a database, is not in the test extra")
    weights = timm.create_model("vit_small_patch16_224", num_classes=3).state_dict()
    torch.save(weights, desk / "mine.pth")
    names: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VitflowWarning)  # random weights are worth a note
        for number, block in blocks(page, "python"):
            # Lines are counted as on the page, for the traceback.
            exec(compile("\n" * (number - 1) + block, str(page), "exec"), names)


@pytest.mark.parametrize("words", by_page(command_lines))
def test_a_command_line_of_a_page_is_understood(words, desk):
    program, *arguments = words
    if program == "make":
        assert all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in arguments)
    if program != "vitflow":
        return
    for word in arguments:
        path = Path(word)
        if word.endswith("/"):
            path.mkdir(exist_ok=True)
        elif path.suffix in (".pth", ".json"):
            path.touch()
    arguments = [name for word in arguments for name in (sorted(map(str, desk.glob(word))) if "*" in word else [word])]
    with cli.commands[arguments[0]].make_context(arguments[0], arguments[1:]) as context:
        names = [context.params.get("method"), *(context.params.get("method_names") or ())]
    for name in filter(None, names):
        get_method(name)


def links(page: Path) -> Iterator[tuple[int, str]]:
    """The files that a page points to or shows."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        yield from ((number, target) for target in re.findall(r"\]\(([^)#:]+)\)", line))


@pytest.mark.parametrize("page", [*PAGES, *DOCS.glob("*/*.ipynb"), *DOCS.glob("*.ipynb")], ids=place)
def test_what_a_page_points_to_is_there(page):
    assert [target for _, target in links(page) if not (page.parent / target).exists()] == []


def test_the_programs_and_files_that_pages_name_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    modules = {f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m ((?:tests|benchmarks)\.[\w.]+)", text)}
    named = {*re.findall(r"examples/\w+\.py|(?<![\w/.])(?:vitflow|tests)/[a-z_/]+(?:\.py)?", text)}
    assert len(modules) >= 5 and len(named) > 10
    assert [name for name in sorted(modules | named) if not (ROOT / name).exists()] == []
    assert f"\nversion: {vitflow.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_options_that_pages_name_exist():
    known = {name for command in cli.commands.values() for option in command.params for name in option.opts}
    known |= {name for command in cli.commands.values() for option in command.params for name in option.secondary_opts}
    spans = [span for page in PAGES for span in re.findall(r"`(--[^`]*)`", page.read_text(encoding="utf-8"))]
    named = {name for span in spans for name in re.findall(r"--[a-z-]+", span)}
    assert len(named) > 20
    assert named - known == set()


def test_every_page_has_its_place_in_the_contents_of_the_site():
    start = DOCS / "index.md"
    trees = re.findall(r"^```{toctree}\n(?::[^\n]*\n)*\n(.*?)^```$", start.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    listed = [entry for tree in trees for entry in tree.split()]
    pages = [*SITE, *DOCS.glob("*.ipynb"), *DOCS.glob("[!_]*/*.ipynb")]
    assert sorted(listed) == sorted(
        page.relative_to(DOCS).with_suffix("").as_posix() for page in pages if page != start
    )


def test_the_map_of_the_documentation_names_every_page_of_how_to_and_none_that_is_not_there():
    named = re.findall(r"\(([\w/-]+)\.html\)", (DOCS / "llms.txt").read_text(encoding="utf-8"))
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in [*SITE, *DOCS.rglob("*.ipynb")]}
    assert set(named) <= pages and len(named) == len(set(named))
    assert {page for page in pages if page.startswith("how-to/")} <= set(named)


ROOMS = ["vitflow", *(f"vitflow.{room}" for room in ("text", "folder", "methods", "evaluation", "demo"))]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_its_place_in_the_reference(room):
    stub = Path(*room.split("."), "__init__.pyi")
    made_in = [node for node in ast.parse((ROOT / stub).read_text()).body if isinstance(node, ast.ImportFrom)]
    # `from . import text` is a namespace.
    names = {alias.name for node in made_in if node.module for alias in node.names}
    reported = {text for page in (DOCS / "api").glob("*.md") for text in re.findall(r":: ([\w.]+)", page.read_text())}
    known = {
        name for name in names if f"{room}.{name}" in reported or (room != "vitflow" and f"vitflow.{name}" in reported)
    }
    assert len(names) >= 5
    assert names - known == set()


def test_what_the_reference_names_exists():
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    named = re.findall(r"^\.\. (?:auto|py:)\w+:: vitflow\.([\w.]+)", pages, re.MULTILINE)
    assert len(named) == len(set(named)) > 100
    for name in named:
        module, _, last = f"vitflow.{name}".rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


def texts(node: ast.AST) -> Iterator[str]:
    """Every text in a piece of code, with … for what is filled in."""
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            yield "".join(str(piece.value) if isinstance(piece, ast.Constant) else "…" for piece in part.values)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def headings() -> list[str]:
    """The messages that the page on troubles is headed by, other libraries' left out."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    lines = re.findall(r"^### (.*)$", page, re.MULTILINE)
    return [text for line in lines for text in re.findall(r"`([^`]+)`", line) if not text.startswith("RuntimeError")]


@pytest.fixture(scope="module")
def custom_texts() -> set[str]:
    sources = Path(vitflow.__file__).parent.rglob("*.py")
    return {text for file in sources for text in texts(ast.parse(file.read_text(encoding="utf-8")))}


@pytest.mark.parametrize("heading", headings())
def test_the_messages_that_troubleshooting_explains_are_those_of_the_code(heading, custom_texts):
    pieces = [piece.strip() for piece in heading.split("…") if piece.strip()]
    assert any(all(piece in text for piece in pieces) for text in custom_texts)
