"""Calls that make no sense: each is an error that says what was expected, or gives a sensible empty result."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.recording.test_recorder import tiny
from vitflow import Explainer, attention_flow, attention_rollout, record_attention
from vitflow.errors import ModelError, OptionError, ShapeError, UnsupportedModelError, VitflowError, VitflowWarning
from vitflow.methods import TokenLayout, attention_graph
from vitflow.methods.cells import occlusion
from vitflow.methods.staged_rollout import LayerTokens, staged_rollout

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
    "numpy": ([ONE.numpy()] * 2, r"ndarray in layer 1.*torch.as_tensor"),
    "None": (None, "got NoneType"),
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


TWO, ROW, LAYOUT = [ONE, ONE], ONE[0, 0, 0], TokenLayout(1, 2, 2)
PAIR = TokenLayout(0, 1, 2)
STAGED = partial(staged_rollout, [torch.ones(1, 1, 2, 2)], readout=torch.tensor([[0.5, 0.5]]))
BLANKED = partial(occlusion, torch.zeros_like, torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]), cols=2)
MISTAKES = [
    *((lambda one=one: attention_flow(TWO, source=one), VitflowError, "source") for one in ("cls", 2.7)),
    *((lambda one=one: attention_rollout(TWO, readout=one), ShapeError, "readout") for one in (np.ones(5), "cls")),
    (lambda: attention_rollout(TWO, readout=torch.full((5,), np.nan)), ShapeError, "readout"),
    *((lambda one=one: TokenLayout(one, 2, 2), OptionError, "whole number") for one in (1.5, "a", float("nan"))),
    *((lambda one=one: LAYOUT.token_of_patch(one, 1), OptionError, "row") for one in (0.5, "a", None)),
    *((lambda one=one: LAYOUT.to_grid(one), ShapeError, "5 tokens") for one in ([1] * 5, None, torch.tensor(1.0))),
    *(
        (lambda one=one: record_attention(one), UnsupportedModelError, "a model")
        for one in (None, "vit", torch.nn.Linear)
    ),
    (lambda: record_attention(Explainer(tiny(), data_config=DATA)), UnsupportedModelError, r"\.model"),
    (lambda: attention_rollout([torch.rand(2, 1, 3, 4)]), ShapeError, "heads, tokens, tokens"),
    (lambda: attention_rollout([torch.rand(1, 1, n, n) for n in (3, 4)]), ShapeError, "same batch and tokens"),
    (lambda: attention_rollout(torch.rand(2, 4, 3, 3)), ShapeError, r"one tensor .*pass \[attention\] for one layer"),
    (lambda: attention_rollout([torch.full((1, 1, 3, 3), float("nan"))]), ShapeError, "finite"),
    (lambda: attention_rollout([-torch.ones(1, 1, 3, 3)]), ShapeError, "at least 0"),
    (lambda: attention_rollout(TWO, head_fusion="median"), OptionError, "Unknown head fusion 'median'"),
    (lambda: attention_rollout(TWO, discard_ratio=1.0), OptionError, "0 <= discard_ratio < 1, got 1.0"),
    *((lambda one=one: attention_rollout(TWO, start_layer=one), OptionError, "start_layer") for one in (0, 1.5)),
    (lambda: attention_rollout(TWO, causal="relative"), OptionError, "Unknown causal 'relative'.*receptive_field"),
    (lambda: attention_rollout(TWO, attention_mask=torch.ones(1, 4)), ShapeError, r"\[1, 5\].*got \(1, 4\)"),
    *(
        (
            lambda function=function: function(TWO, causal="raw", visible=[torch.ones(1, 5, 5)] * 3),
            ShapeError,
            "2 layers",
        )
        for function in (attention_flow, attention_rollout)
    ),
    (lambda: STAGED([LayerTokens(PAIR, PAIR)], discard_ratio=1.0), OptionError, "discard_ratio"),
    (lambda: STAGED([LayerTokens(PAIR, PAIR)], start_layer=2), OptionError, "start_layer from 1 to 1"),
    (lambda: BLANKED(rows=2, batch_size=0), OptionError, "occlusion_batch of at least 1"),
    (
        lambda: Explainer(tiny(), data_config=DATA).explain(IMAGE, method="occlusion", patch_size=40),
        OptionError,
        "patch_size from 1 to 32",
    ),
    (lambda: Explainer(tiny(), data_config=DATA, outputs=["a dog"]), OptionError, "a function of the model's output"),
    (lambda: Explainer(tiny(), data_config=DATA, activation="logits"), OptionError, "activation"),
    *(
        (lambda one=one: record_attention(tiny(), **one), OptionError, "[Ee]xpected|Unknown")
        for one in ({"head_fusion": ["max"]}, {"fusions": ["max"]}, {"layout": (1, 4, 4)})
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_what_makes_no_sense_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_what_is_empty_or_of_another_type_is_taken():
    assert TokenLayout(np.int64(1), torch.tensor(2), 2) == LAYOUT
    assert LAYOUT.to_grid(torch.ones(0, 5)).shape == (0, 2, 2)
    explainer = Explainer(tiny(), data_config=DATA)
    assert explainer.explain_batch([]) == []
    assert explainer.explain_batch([], methods=["gae"], targets=np.array([], int)) == []
    assert len(explainer.explain_batch(image for image in [IMAGE] * 2)) == 2


def test_layers_of_two_precisions_are_taken_in_the_wider():
    actual = attention_rollout([ONE, ONE.double()])
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, attention_rollout([ONE.double()] * 2))


@pytest.mark.parametrize("options", [{}, {"head_fusion": "max", "value_weighted": "output"}, {"attention": False}])
def test_a_batch_of_no_images_is_refused(options):
    with pytest.raises(ShapeError, match="at least one image"), torch.no_grad():
        with record_attention(model := tiny(), **options):
            model(torch.zeros(0, 3, 32, 32))


def test_a_model_without_weights_is_refused_before_it_runs():
    lazy = tiny()
    lazy.head = torch.nn.LazyLinear(5)
    with pytest.raises(ModelError, match=r"head\.weight has no shape yet: run it on an input"):
        Explainer(lazy, data_config=DATA)
    lazy(torch.zeros(1, 3, *DATA["input_size"][1:]))
    assert Explainer(lazy, data_config=DATA).num_classes == 5
    with pytest.raises(ModelError, match=r"has a shape and no values \(meta\): load its weights first"):
        Explainer(tiny().to("meta"), data_config=DATA)
    with pytest.raises(OptionError, match=r"The device 'meta' cannot be used.*: it computes shapes"):
        Explainer(tiny(), data_config=DATA, device="meta")
    with pytest.raises(OptionError, match="Unknown device 'gpu': expected cpu, cuda"):
        Explainer(tiny(), data_config=DATA, device="gpu")
    with pytest.raises(OptionError, match="entry of data_config 'crop'.*'crop_pct'"):
        Explainer(tiny(), data_config=DATA | {"crop": 0.9})
    with pytest.warns(VitflowWarning, match="divide mean and std"):
        Explainer(tiny(), data_config=DATA | {"mean": (127.5, 127.5, 127.5)})
