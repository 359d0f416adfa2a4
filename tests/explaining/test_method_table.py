"""The table of methods: looked up, completed and added to without torch."""

from dataclasses import replace

import pytest

from vitflow.errors import OptionError
from vitflow.registry import method_table
from vitflow.registry.choices import check_methods
from vitflow.registry.method_table import register_method


@pytest.fixture(autouse=True)
def _custom_table(monkeypatch):
    monkeypatch.setattr(method_table, "METHODS", dict(method_table.METHODS))


def test_needs_may_come_from_any_iterable():
    method = register_method("mine", "module:function", needs=(need for need in ["attention", "heads"]))
    assert method.needs == {"attention", "heads"}
    with pytest.raises(OptionError, match="Unknown need 'atention'"):
        register_method("other", "module:function", needs=iter(["atention"]))
    with pytest.raises(OptionError, match="Unknown method 'other'"):
        method_table.get_method("other")


def test_a_method_of_the_table_is_taken_with_what_is_changed_of_it():
    rollout = method_table.get_method("rollout")
    mine = register_method(replace(rollout, name="mine", defaults={"residual": 0.3}))
    assert method_table.get_method("mine") is mine
    assert mine.defaults == {"residual": 0.3, "refine": 0, "affinity": "attention"}
    assert mine.presets == rollout.presets and mine.needs == {"attention"}
    with pytest.raises(OptionError, match="There is already a method 'mine'"):
        register_method(mine)
    assert register_method(replace(mine, refine_stage="none"), replace=True).refine_stage == "none"
    assert register_method(name="other", function="module:function").name == "other"


def test_a_method_is_called_what_its_author_calls_it():
    assert register_method("mine", "module:function").title == "mine"
    assert register_method("mine", "module:function", title="My own", replace=True).title == "My own"
    assert method_table.get_method("gae").title == "GAE"


def test_one_method_twice_is_refused_unless_its_options_differ():
    check_methods(["rollout", ("rollout", {"residual": 0.3})], {})
    with pytest.raises(OptionError, match="rollout was given twice"):
        check_methods(["rollout", ("rollout", {"residual": 0.3})], {"residual": 0.3})
