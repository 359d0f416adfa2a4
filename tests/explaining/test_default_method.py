"""The method where none is named: rollout without a target, GAE with one."""

from functools import partial

import pytest

import vitflow
from vitflow import prompts, similarity_to
from vitflow.demo import sample_images
from vitflow.errors import OptionError
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.targets import Contrast
from vitflow.folder.batch_explainer import BatchExplainer
from vitflow.registry.choices import choose_methods

IMAGE = sample_images()[0]


TARGETS = [(None, "rollout"), (0, "gae"), ("top1", "gae"), (Contrast(0, against=1), "gae")]


@pytest.mark.parametrize(("target", "method"), TARGETS)
def test_with_a_target_the_default_is_gae_and_without_one_rollout(demo, target, method):
    one = demo.explain(IMAGE, target=target)
    assert one.method == one.to_dict()["method"] == method
    assert (one.grid == demo.explain(IMAGE, target=target, method=method).grid).all()
    assert {actual.method for actual in demo.explain_batch([IMAGE], targets=target)} == {method}
    if not isinstance(target, Contrast):  # a sheet of layers takes none
        assert vitflow.layer_maps(IMAGE, model=demo, target=target).accumulated[-1].method == method


def test_reference_images_prompts_and_functions_are_targets(demo):
    like = Explainer(demo.model, outputs=similarity_to([sample_images()[1]]))
    assert like.explain(IMAGE).method == "gae"
    function = Explainer(demo.model, outputs=lambda output: output[:, :2])
    assert function.explain(IMAGE).method == "gae"
    assert Explainer("demo-text", outputs=prompts(["a disc", "a ring"])).explain(IMAGE).method == "gae"


def test_an_option_that_the_chosen_method_has_not_is_refused_with_the_reason(demo):
    reason = "Method gae, the default with a target, has no option 'discard_ratio'"
    for explain in (demo.explain, partial(vitflow.layer_maps, model=demo)):
        with pytest.raises(OptionError, match=reason + ".*rollout"):
            explain(IMAGE, target=0, discard_ratio=0.5)
    assert demo.explain(IMAGE, discard_ratio=0.5).options["discard_ratio"] == 0.5
    with pytest.raises(OptionError, match="rollout, the default without a target, has no option 'masks'.*sampling"):
        choose_methods(None, {"masks": 8})


@pytest.mark.parametrize(("target", "method"), [(None, "rollout"), (0, "gae")])
def test_a_folder_follows_the_rule_and_resumes(demo, tmp_path, target, method):
    for kept in (0, 1):
        summary = vitflow.explain_folder(IMAGE, tmp_path, model=demo, target=target)
        assert (summary.explained, summary.kept) == (1, kept)
    assert (tmp_path / f"{IMAGE.stem}-{method}.jpg").exists()


def test_a_batch_explainer_follows_the_rule_or_asks_for_the_method(demo):
    assert BatchExplainer("demo").labels == ["rollout"] and BatchExplainer("demo", target=0).labels == ["gae"]
    like = Explainer(demo.model, outputs=similarity_to([sample_images()[1]]))
    batch = {"image": [str(IMAGE)], "id": ["one"]}
    with pytest.raises(OptionError, match=r"requires methods=.*\['gae'\]"):
        BatchExplainer(lambda: like)(batch)
    assert BatchExplainer(lambda: like, ["gae"])(batch)["status"].tolist() == ["explained"]
