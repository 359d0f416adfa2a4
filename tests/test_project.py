"""Workflows, issue forms and placeholders: the parts of the project that no other code runs."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tools import placeholders

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

# The source distribution does not contain .github.
of_the_repository = pytest.mark.skipif(not WORKFLOWS, reason="needs .github, which the source distribution leaves out")


def jobs(name: str) -> dict:
    """Return the jobs of a workflow."""
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))["jobs"]


@of_the_repository
def test_every_action_is_pinned_by_a_commit_and_names_its_version():
    lines = [line for file in WORKFLOWS for line in file.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    foreign = [line.strip() for line in lines if "uses: ./" not in line]
    assert len(foreign) >= 10
    for line in foreign:
        assert re.fullmatch(r"(- )?uses: [\w-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line), line
    pins = {tuple(re.findall(r"uses: ([\w/-]+)@(\S+)", line)[0]) for line in foreign}
    assert len(pins) == len({action for action, _ in pins})  # an action has the same commit everywhere


@of_the_repository
def test_nothing_is_published_that_did_not_pass_the_tests():
    release = jobs("release.yml")
    assert release["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert release["build"]["needs"] == "tests"
    assert release["publish"]["needs"] == "build"
    used = [step.get("uses", step.get("run", "")).partition("@")[0] for step in release["publish"]["steps"]]
    hashes = used.index("sha256sum dist/*")
    assert hashes < used.index("actions/attest-build-provenance") < used.index("pypa/gh-action-pypi-publish")
    # Only the job that publishes may speak for the repository, and it runs no code of the project.
    assert release["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}
    assert not any("permissions" in job for name, job in release.items() if name != "publish")


@of_the_repository
@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_issue_forms_have_what_github_requires(file):
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert form["name"] and form["description"]
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in questions}) == len(questions)
    assert all(part["attributes"]["label"] for part in questions)
    assert any(part.get("validations", {}).get("required") for part in questions)


def test_one_command_fills_in_every_placeholder(tmp_path, capsys):
    for name in placeholders.FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "CODE_OF_CONDUCT.md").write_text("Write to PLACEHOLDER-EMAIL.\n", encoding="utf-8")
    assert placeholders.main([], tmp_path) == 1
    assert "CODE_OF_CONDUCT.md:1: Write to PLACEHOLDER-EMAIL." in capsys.readouterr().out
    given = [word for name in placeholders.VALUES for word in (f"--{name}", f"the-{name}")]
    assert placeholders.main(given[:2], tmp_path) == 1
    assert placeholders.main(given, tmp_path) == 0
    assert (tmp_path / "CODE_OF_CONDUCT.md").read_text(encoding="utf-8") == "Write to the-email.\n"
    assert "PLACEHOLDER" not in "".join(file.read_text(encoding="utf-8") for file in tmp_path.iterdir())


def test_the_paper_cites_each_reference_and_has_the_length_that_joss_requests():
    text, references = ((ROOT / name).read_text(encoding="utf-8") for name in ("paper.md", "paper.bib"))
    _, head, body = text.split("---\n", 2)
    assert {"title", "tags", "authors", "affiliations", "date", "bibliography"} <= yaml.safe_load(head).keys()
    assert 1000 <= len(body.split()) <= 1500
    entries = re.findall(r"^@\w+{(\w+),(.*?)^}", references, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"@(\w+)", body)) == {key for key, _ in entries}
    assert all("doi = {10." in entry or "url = {https://" in entry for _, entry in entries)
    assert [image for image in re.findall(r"\]\((assets/[^)]+)\)", body) if not (ROOT / image).exists()] == []
