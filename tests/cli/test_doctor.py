"""`vitflow doctor`: it tells what is there, what is missing, and what does not work."""

import re
from importlib.metadata import PackageNotFoundError, version

import pytest
from click.testing import CliRunner

from vitflow.cli import cli, setup
from vitflow.explaining.explainer import Explainer


@pytest.fixture
def reported():
    """Return its checks."""

    def run(code: int = 0) -> dict[str, str]:
        result = CliRunner().invoke(cli, ["doctor"])
        assert result.exit_code == code, result.output
        lines = [re.split(" {2,}|(?<=^.{24}) ", line, maxsplit=1) for line in result.output.splitlines()]
        return {name.strip(): result for name, result in lines}

    return run


def test_it_reports_versions_the_device_and_that_a_model_runs(reported):
    actual = reported()
    assert actual["torch"] == version("torch")
    assert actual["device"].startswith(("cpu", "cuda"))
    assert actual["demo model"].startswith("works: orange disc")
    assert not any(name.startswith("extra test") for name in actual)


def test_an_extra_that_is_not_there_is_reported_with_the_line_that_installs_it(reported, monkeypatch):
    def without_captum(name: str) -> str:
        if name == "captum":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(setup, "version", without_captum)
    actual = reported()
    assert actual["extra captum"] == "not installed (pip install 'vitflow[captum]')"
    assert actual["extra parquet"] == "pyarrow 1.0"


def test_a_model_that_does_not_run_is_reported_and_the_exit_code_is_1(reported, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(Explainer, "explain", broken)
    assert reported(code=1)["demo model"] == "FAILS: RuntimeError: no kernel image is available"
