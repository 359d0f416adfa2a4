"""Help where one looks for it: sections of --help, `vitflow methods NAME`, signatures, completion."""

import importlib
import inspect

import pytest
from click.testing import CliRunner

from vitflow.cli import cli
from vitflow.registry.method_table import get_method, list_methods
from vitflow.registry.options import METHOD_OPTIONS, OPTIONS
from vitflow.text.method_table import TEXT_METHODS

# Commands that can be told of more than a file or two.
SECTIONED = [name for name, command in cli.commands.items() if "model" in {param.name for param in command.params}]
WITH_OPTIONS = [name for name in SECTIONED if "head_fusion" in {param.name for param in cli.commands[name].params}]


def reported(*arguments: str, columns: int = 80) -> str:
    """Return the output of the command line on a terminal of this width."""
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": str(columns)}, terminal_width=columns)
    assert result.exit_code == 0, result.output
    return result.output


def sections(text: str) -> dict[str, str]:
    """The panels of a help text by their titles, without the paragraphs before them."""
    actual: dict[str, str] = {}
    title = None
    for line in text.splitlines():
        if line.rstrip().endswith(":") and not line.startswith(" "):
            title = line.rstrip()[:-1]
        elif title is not None:
            actual[title] = actual.get(title, "") + f"{line}\n"
    return actual


@pytest.mark.parametrize("name", SECTIONED)
def test_every_option_is_in_a_panel(name):
    actual = sections(reported(name, "--help", columns=120))
    assert "Model" in actual and "Show this message and exit." in " ".join(actual["Options"].split())
    listed = "\n".join(actual.values()).replace("/", " ")
    shown = [param for param in cli.commands[name].params if not getattr(param, "hidden", False)]
    flags = [flag for param in shown for flag in param.opts if flag.startswith("--")]
    assert [flag for flag in flags if listed.count(f" {flag} ") == 0] == []


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_options_of_methods_are_accepted_and_described_elsewhere(name):
    table = TEXT_METHODS if name in ("read", "caption") else {method.name: method for method in list_methods()}
    expected = {name for name in OPTIONS if any(method.accepts(name) for method in table.values())}
    assert expected <= {param.name for param in cli.commands[name].params}
    text = " ".join(reported(name, "--help", columns=110).split())
    assert "vitflow methods NAME" in text and "--discard-ratio" not in text


def test_the_help_of_explain_fits_90_lines_and_the_methods_a_screen():
    assert len(reported("explain", "--help").splitlines()) <= 90
    lines = reported("methods").splitlines()
    assert len(lines) < 24 and lines[0].split() == ["class-specific", "not", "class-specific"]
    assert {method.name for method in list_methods()} <= set(" ".join(lines).split())


def test_the_first_screen_of_explain_has_what_each_call_needs():
    screen = "\n".join(reported("explain", "--help", columns=110).splitlines()[:50])
    assert [title for title in sections(screen) if title] == ["Model", "Target", "Method", "Options", "Drawing"]
    assert not any(word in screen for word in ("--refine", "--affinity", "--head-fusion"))


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in cli.commands), ["methods", "flow"]])
def test_no_line_of_a_help_is_wider_than_the_terminal(arguments, columns=80):
    text = reported(*arguments, columns=columns)
    assert [line for line in text.splitlines() if len(line) > columns and "vit_base" not in line] == []
    assert "..." not in text.partition("Images:")[2]  # no summary is cut off


def test_a_method_reports_its_question_its_options_and_their_source():
    text = reported("methods", "rollout", columns=110)
    assert get_method("rollout").question in " ".join(text.split()) and "Abnar & Zuidema" in text
    for name in get_method("rollout").defaults:
        assert f"--{name.replace('_', '-')} " in text
        assert (
            METHOD_OPTIONS[name].values.removesuffix("|signed_mean") in text
        )  # which attention by itself does not take
    assert "|signed_mean" not in text and "|signed_mean" in reported("methods", "gae", columns=110)
    assert "--preset paper" in text and "--value-weighted off" in text
    assert "rollout (texts)" in text
    assert all(method.question.endswith("?") for method in list_methods())


NAMESPACES = ("demo", "evaluation", "folder", "methods", "text")


@pytest.mark.parametrize("name", ["vitflow", *(f"vitflow.{each}" for each in NAMESPACES)])
def test_a_package_shows_its_public_names_and_nothing_else(name):
    package = importlib.import_module(name)
    everything = [getattr(package, each) for each in package.__all__]  # loads what is behind them
    assert dir(package) == sorted(package.__all__)
    modules = {each.__name__ for each in everything if inspect.ismodule(each)}
    assert modules == ({f"vitflow.{each}" for each in NAMESPACES} if name == "vitflow" else set())
