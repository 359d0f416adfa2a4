"""`vitflow.check` and `vitflow check`: the clauses that a model keeps, and the methods that apply."""

import json
from unittest import mock

import pytest
import timm
import torch
from click.testing import CliRunner

import vitflow
from tests.recording.test_certificate import CONFIG, FAULTS, planted, swap
from tests.small import Custom
from vitflow.cli import cli
from vitflow.errors import OptionError
from vitflow.explaining import sampling

VIT = {"img_size": 64, "depth": 2, "num_classes": 5}


def answers(checked):
    return [clause.holds for clause in checked.clauses]


def test_a_plain_model_keeps_every_clause():
    checked = vitflow.check(timm.create_model("vit_tiny_patch16_224", **VIT).eval())
    assert answers(checked) == [True] * 5 and not checked.refusal and not any(checked.methods.values())
    [stage] = checked.stages
    assert (stage.first, stage.last, stage.grid, stage.other_tokens, stage.windows) == (1, 2, (4, 4), 1, 1)
    assert "rows 0 – 16, columns 0 – 16" in checked.clauses[3].measured and checked.clauses[4].measured == "class token"
    assert json.loads(json.dumps(checked.to_dict()))["clauses"][3]["holds"] is True
    assert len(str(checked).splitlines()) <= 24 and max(map(len, str(checked).splitlines())) <= 100


def test_stages_and_windows_are_listed_and_flow_is_refused():
    size = {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 2)}
    checked = vitflow.check(timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **size).eval())
    assert answers(checked) == [True] * 5
    assert [(stage.grid, stage.windows) for stage in checked.stages] == [((16, 16), 16), ((8, 8), 4)]
    assert {name for name, why in checked.methods.items() if why} == {"flow", "legrad"}


def test_two_swapped_tokens_beside_convolutions_are_refused_as_in_maps():
    with planted("convolutional", swap(3, 9)) as model:
        explainer = vitflow.Explainer(model, data_config=CONFIG)
        checked = vitflow.check(explainer)
        assert answers(checked) == [True, False, True, None, None]
        assert checked.clauses[1].module == "stages.0.blocks.1" and "2 of 256" in checked.clauses[1].measured
        assert checked.methods["rollout"] == checked.refusal and not checked.methods["occlusion"]
        with pytest.raises(vitflow.VitflowError, match="clause 2 of vitflow check"):
            explainer.explain(torch.zeros(3, 64, 64), method="rollout")


def test_features_above_tokens_that_are_chosen_by_values_are_refused():
    with planted("plain", FAULTS["sort"][0]) as model:
        checked = vitflow.check(model, data_config=CONFIG)
    assert checked.clauses[0].holds is False and checked.clauses[0].module == "blocks.1"
    assert all("clause 1" in checked.methods[name] for name in ("rollout", "gradcam", "similarity"))
    assert "NO " in str(checked) and "As rollout, see above" in str(checked)


def test_a_model_that_rejects_noise_is_not_checked():
    model = timm.create_model("vit_tiny_patch16_224", **VIT).eval()

    def forward(self, x):
        if x.std() > 0.9:  # noise of the checks
            raise ValueError("expected an image")
        return self.block(x)

    model.patch_embed.proj = Custom(forward, block=model.patch_embed.proj)
    checked = vitflow.check(model, data_config=CONFIG)
    assert answers(checked)[:3] == [None] * 3 and "expected an image" in checked.clauses[0].measured


XCIT = {"img_size": 64, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: timm.create_model("resnet10t", num_classes=5), "No attention between tokens"),
        (lambda: timm.models.xcit.Xcit(**XCIT), "channels"),
    ],
)
def test_models_without_rollout_have_no_clauses(build, word):
    checked = vitflow.check(build().eval(), data_config=CONFIG)
    assert answers(checked) == [None] * 5 and word in checked.refusal and not checked.stages
    assert checked.methods["rollout"] == checked.refusal
    assert not any(checked.methods[name] for name in ("gradcam", "input_gradient", "occlusion", "sampling"))
    assert "clauses 1, 2, 3, 4, 5: not measured" in str(checked)


def test_the_command_prints_the_check_and_exits_with_1_if_rollout_is_refused(tmp_path):
    done = CliRunner().invoke(cli, ["check", "demo"])
    assert done.exit_code == 0 and "rollout: yes" in done.stdout and "methods that apply: rollout" in done.stdout
    model = timm.create_model("resnet10t", num_classes=2)
    timm.models.save_for_hf(model, tmp_path)
    refused = CliRunner().invoke(cli, ["check", str(tmp_path), "--json"])
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["methods"]["gradcam"] == ""
    assert CliRunner().invoke(cli, ["check"]).exit_code == 2
    assert CliRunner().invoke(cli, ["check", "nonsense"]).exit_code == 2


def test_some_methods_are_tried_besides_rollout():
    assert list(vitflow.check("demo", methods=["flow"]).methods) == ["rollout", "flow"]
    with pytest.raises(OptionError, match="'flaw'"):
        vitflow.check("demo", methods=["flaw"])


def test_methods_are_tried_with_few_masks(monkeypatch):
    drawn = mock.Mock(wraps=sampling.draw_masks)
    monkeypatch.setattr(sampling, "draw_masks", drawn)
    assert vitflow.check("demo").methods["consensus"] == ""
    assert drawn.call_args.kwargs["masks"] < 10
