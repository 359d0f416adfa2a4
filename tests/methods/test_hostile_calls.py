"""Calls that make no sense: each is an error that says what was expected, or gives a sensible empty result."""

import numpy as np
import pytest
import torch

from tests.recording.test_recorder import tiny
from vitflow import Explainer, attention_flow, attention_rollout, record_attention
from vitflow.errors import ModelError, OptionError, ShapeError, UnsupportedModelError, VitflowError, VitflowWarning
from vitflow.methods import TokenLayout, attention_graph

ONE = torch.full((1, 2, 5, 5), 0.2)
DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
IMAGE = np.zeros((32, 32, 3), np.uint8)

FUNCTIONS = {
    "rollout": attention_rollout,
    "rollout of a readout": lambda layers, **options: attention_rollout(layers, readout=torch.ones(5) / 5, **options),
    "flow": attention_flow,
    "graph": attention_graph,
}
ATTENTIONS = {
    "no images": ([ONE[:0]] * 2, "at least one image"),
    "no tokens": ([ONE[..., :0, :0]] * 2, "token"),
    "complex": ([ONE.to(torch.complex64)] * 2, "real numbers.*complex64"),
    "numpy": ([ONE.numpy()] * 2, r"numpy.ndarray in layer 1.*torch.as_tensor"),
    "None": (None, "got NoneType"),
    "meta": ([ONE.to("meta")], "a meta tensor"),
    "sparse": ([ONE.to_sparse()], "a sparse tensor"),
    "no layers": ([], "at least one layer"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("given", ATTENTIONS)
def test_what_is_no_attention_is_refused(function, given):
    attentions, words = ATTENTIONS[given]
    with pytest.raises(ShapeError, match=f"Expected .*{words}"):
        FUNCTIONS[function](attentions)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "options",
    [
        *({"discard_ratio": value} for value in ("a", float("nan"))),
        *({"residual": value} for value in (1, torch.ones(2))),
        *({"num_prefix_tokens": value} for value in (-1, 6, 1.5)),
    ],
    ids=str,
)
def test_options_that_are_no_such_numbers_are_refused(function, options):
    with pytest.raises(OptionError, match=f"Expected .*{next(iter(options))}"):
        FUNCTIONS[function]([ONE, ONE], **options)


def test_layers_of_two_precisions_are_taken_in_the_wider():
    actual = attention_rollout([ONE, ONE.double()])
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, attention_rollout([ONE.double()] * 2))


@pytest.mark.parametrize("sinks", [[2.7], [-1], "ab"])
def test_sinks_that_are_no_tokens_are_refused(sinks):
    with pytest.raises(OptionError, match="sinks"):
        attention_flow([ONE, ONE], sinks=sinks)
    assert attention_flow([ONE, ONE], sinks=[]).values.shape == (1, 0)


@pytest.mark.parametrize("source", ["cls", torch.ones(5) * 1j, 2.7])
def test_sources_that_are_none_are_refused(source):
    with pytest.raises(VitflowError, match="source"):
        attention_flow([ONE, ONE], source=source)


@pytest.mark.parametrize("readout", [np.ones(5), "cls", torch.full((5,), np.nan)])
def test_readouts_that_are_none_are_refused(readout):
    with pytest.raises(ShapeError, match="Expected a readout"):
        attention_rollout([ONE, ONE], readout=readout)


@pytest.mark.parametrize("numbers", [(1.5, 2, 2), ("a", 2, 2), (1, float("nan"), 2)])
def test_layouts_are_whole_numbers(numbers):
    with pytest.raises(OptionError, match="whole number"):
        TokenLayout(*numbers)
    assert TokenLayout(np.int64(1), torch.tensor(2), 2) == TokenLayout(1, 2, 2)


def test_patches_and_vectors_of_a_layout_are_checked():
    layout = TokenLayout(1, 2, 2)
    for row in (0.5, "a", None):
        with pytest.raises(OptionError, match="row"):
            layout.token_of_patch(row, 1)
    for tokens in ([1, 2, 3, 4, 5], None, torch.tensor(1.0)):
        with pytest.raises(ShapeError, match="Expected 5 tokens"):
            layout.to_grid(tokens)
    assert layout.to_grid(torch.ones(0, 5)).shape == (0, 2, 2)


@pytest.mark.parametrize("model", [None, "vit", torch.nn.Linear], ids=str)
def test_what_is_no_model_cannot_be_recorded(model):
    with pytest.raises(UnsupportedModelError, match="Expected a model"):
        record_attention(model)


def test_an_explainer_is_no_model_but_has_one():
    with pytest.raises(UnsupportedModelError, match=r"\.model"):
        record_attention(Explainer(tiny(), data_config=DATA))


@pytest.mark.parametrize(
    "options",
    [{"head_fusion": ["max"]}, {"fusions": ["max"]}, {"layout": (1, 4, 4)}],
    ids=str,
)
def test_options_of_a_recording_are_checked(options):
    with pytest.raises(OptionError):
        record_attention(tiny(), **options)


@pytest.mark.parametrize("options", [{}, {"head_fusion": "max", "value_weighted": "output"}, {"attention": False}])
def test_a_batch_of_no_images_is_refused(options):
    with pytest.raises(ShapeError, match="at least one image"), torch.no_grad():
        with record_attention(model := tiny(), **options):
            model(torch.zeros(0, 3, 32, 32))


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    return Explainer(tiny(), data_config=DATA)


def test_no_images_give_no_maps(explainer):
    assert explainer.explain_batch([]) == []
    assert explainer.explain_batch([], methods=["gae"], targets=np.array([], int)) == []
    assert len(explainer.explain_batch(image for image in [IMAGE] * 2)) == 2


def test_a_model_without_weights_is_refused_before_it_runs():
    lazy = tiny()
    lazy.head = torch.nn.LazyLinear(5)
    with pytest.raises(ModelError, match=r"head\.weight has no shape yet: run it on an input"):
        Explainer(lazy, data_config=DATA)
    lazy(torch.zeros(1, 3, *DATA["input_size"][1:]))
    assert Explainer(lazy, data_config=DATA).num_classes == 5
    with pytest.raises(ModelError, match=r"has a shape and no values \(meta\): load its weights first"):
        Explainer(tiny().to("meta"), data_config=DATA)
    with pytest.raises(OptionError, match=r"The device 'meta' cannot be used: it computes shapes"):
        Explainer(tiny(), data_config=DATA, device="meta")
    with pytest.raises(OptionError, match="Unknown device 'gpu': expected cpu, cuda"):
        Explainer(tiny(), data_config=DATA, device="gpu")
    with pytest.raises(OptionError, match="entry of data_config 'crop'.*'crop_pct'"):
        Explainer(tiny(), data_config=DATA | {"crop": 0.9})
    with pytest.warns(VitflowWarning, match="divide mean and std"):
        Explainer(tiny(), data_config=DATA | {"mean": (127.5, 127.5, 127.5)})
