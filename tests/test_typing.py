"""Type checkers flag a misspelt option in a user's script, and accept the options of a registered method."""

import re

import pytest

ACCEPTED = """
import vitflow
from vitflow.registry.method_table import Method

vitflow.explain("cat.jpg", model="demo", method="rollout", head_fusion="max", discard_ratio=0.9, patch=(3, 7))
mine: Method = vitflow.register_method("mine", lambda trace: trace)
vitflow.explain("cat.jpg", model="demo", method=("mine", {"strength": 3}))
vitflow.Explainer("demo").explain_batch(["cat.jpg"], methods=["gae", ("rollout", {"residual": 0.3})], refine=1)
vitflow.layer_maps("cat.jpg", model="demo", layer=2, residual=0.3)
vitflow.text.explain_text("a text", model="bert-base-uncased", causal="raw")
"""
REFUSED = """
import vitflow

vitflow.explain("cat.jpg", model="demo", head_fusoin="max")
vitflow.explain("cat.jpg", model="demo", head_fusion="median")
vitflow.Explainer("demo").explain_batch(["cat.jpg"], discard=0.9)
vitflow.compare(["cat.jpg"], model="demo", maks=8)
vitflow.layer_maps("cat.jpg", model="demo", end_layer=3)
vitflow.text.explain_text("a text", model="bert-base-uncased", causl="raw")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # mypy reads torch and timm, too
def test_a_misspelt_option_is_an_error_before_anything_runs(tmp_path):
    api = pytest.importorskip("mypy.api")
    for name, script in (("accepted", ACCEPTED), ("refused", REFUSED)):
        (tmp_path / f"{name}.py").write_text(script.lstrip())
    arguments = ["--config-file=", "--follow-imports=silent", "--ignore-missing-imports", "--no-incremental"]
    report, _, _ = api.run([*arguments, str(tmp_path / "accepted.py"), str(tmp_path / "refused.py")])
    errors = re.findall(r"(\w+)\.py:(\d+): error: ", report)
    assert errors == [("refused", str(line)) for line in range(3, 9)], report
