"""`vitflow read` as a user meets it: words in the terminal, pages, images, JSON, and errors that say what to do."""

import json
import re
import shutil
import sys

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTModel,
)

from vitflow.cli import cli, main
from vitflow.errors import printable

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS += ["the", "key", "to", "cabinets", "is", "here", "on", "a", "table", "<b>", "."]


def keep(model, folder, template: str, words=WORDS):
    """Save a model with a tokenizer that takes words between spaces."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = [(word, WORDS.index(word)) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **names).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return keep(BertModel(config), tmp_path_factory.mktemp("encoder"), "[CLS] $A [SEP]")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    torch.manual_seed(0)
    ends = {"bos_token_id": 2, "eos_token_id": 0, "pad_token_id": 0}
    config = GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=64, **ends)
    return keep(GPT2LMHeadModel(config), tmp_path_factory.mktemp("decoder"), "[CLS] $A")


def read(*arguments, env=None):
    return CliRunner().invoke(cli, ["read", *map(str, arguments)], env={"COLUMNS": "90", **(env or {})})


TEXT = "the key to the cabinets is here"


def test_words_of_a_command_line_that_fit_nowhere_are_shown_as_text(monkeypatch, capsys):
    for words in (
        ["read", "--\x1b[31m\u202e"],
        ["a\x9b31m"],
        ["read", "a", "b\u202e", "--model", "m"],
        ["read", "--view", "\x9b"],
    ):
        monkeypatch.setattr(sys, "argv", ["vitflow", *words])
        with pytest.raises(SystemExit):
            main()
        reported = capsys.readouterr().err
        assert printable(reported, lines=True) == reported and "Error" in reported


def test_a_user_reads_a_word(encoder, tmp_path):
    done = read(TEXT, "--model", encoder, "--token", "is", "--png", tmp_path / "o.png")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Attribution of “is”" and re.fullmatch(r" +[\d.]+ %  \S+  \(\d+\)", lines[1])
    assert re.search(r"special tokens \d+ % · first token \d+ % · query token \d+ % · .* \(entropy", done.stdout)
    assert done.stderr.splitlines() == [f"written: {tmp_path / 'o.png'}"]
    with Image.open(tmp_path / "o.png") as image:
        assert image.width > 500


def test_numbers_come_as_json(encoder):
    done = read(TEXT, "--model", encoder, "--token", 6, "--method", "attention", "--json")
    actual = json.loads(done.stdout)
    assert actual["tokens"][6].strip() == "is" and actual["selected"] == [6]
    assert actual["method"] == "attention" and len(actual["weights"]) == 9
    assert sum(actual["weights"]) == pytest.approx(1, abs=1e-5)
    assert actual["summary"]["special"] == pytest.approx(actual["weights"][0] + actual["weights"][-1], abs=1e-5)


def test_a_terminal_without_unicode_gets_what_it_can_show(encoder):
    done = CliRunner(charset="ascii").invoke(cli, ["read", TEXT, "--model", str(encoder)])
    assert done.exit_code == 0 and done.stdout.isascii() and " %  here  (7)" in done.stdout


def test_a_user_sees_what_each_written_word_rests_on(decoder, tmp_path):
    drawn = ("--html", tmp_path / "o.html", "--png", tmp_path / "o.png", "--token", 0)
    done = read("--prompt", "the key to the", "--generate", 3, "--model", decoder, *drawn)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("[CLS] the key to the") and (tmp_path / "o.png").is_file()
    lines = done.stdout.split("Attribution of each generated token\n")[1].splitlines()
    assert all(re.fullmatch(r"  \S+: \S+ \d+ %.* · .*(uninformative|words.*)", line) for line in lines[:3]), lines
    assert re.search(r'"written": \d+\}', (tmp_path / "o.html").read_text())
    chosen = ("--generate", 2, "--causal", "raw", "--name", "n", "--json")
    actual = json.loads(read("--prompt", "the key", "--model", decoder, *chosen).stdout)
    assert actual["model"] == "n" and len(actual["values"]) == len(actual["generated_tokens"]) == 2
    rows = [sum(layer[-1] for layer in row) for row in actual["values"]]
    assert rows[0] == pytest.approx(1, abs=1e-5) and rows[1] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got neither"),
        (["a", "--generate", 3], "--generate requires --prompt"),
        (["--prompt", "a", "--target", "a"], "--target cannot be used with --prompt, .*: omit it"),
        (["a", "--png", "a.bmp"], "Expected an output that ends in .png, .pdf, .svg, got 'a.bmp'"),
        (["a", "--method", "attention", "--residual", 0.1], "Unknown attention option 'residual'"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_loaded(arguments, message):
    done = read(*arguments, "--model", "no/such")
    assert done.exit_code == 2
    assert re.search(message, done.stderr)


def test_a_missing_model_and_a_page_that_cannot_be_written_are_reported(encoder):
    for arguments, model in ((["a"], "bert"), (["--prompt", "a"], "gpt2")):
        done = read(*arguments)
        assert done.exit_code == 2 and re.search(f"Expected --model, .*{model}", done.stderr)
    for name in ("", "x" * 300):
        done = read("the key", "--model", encoder, "--html", name)
        assert done.exit_code == 1 and "Cannot write" in done.stderr, done.exception


def test_models_for_images_are_refused_with_a_remedy(tmp_path):
    ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)).save_pretrained(
        tmp_path
    )
    assert "Expected a tokenizer" in read("a", "--model", tmp_path).stderr
    for name in ("vit_tiny_patch16_224", "demo", "demo-caption"):
        done, command = read("a", "--model", name), "caption" if name == "demo-caption" else "explain"
        assert done.exit_code == 2
        assert f"got the image model {name}. Use vitflow {command} IMAGE --model {name}." in done.stderr


def with_code(folder, place):
    """Make a saved model one that brings code, which leaves a file when it runs."""
    config = json.loads((folder / "config.json").read_text())
    entry = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    config |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": entry}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import BertConfig, BertModel\n"
        f"Path({str(place)!r}).touch()\n"
        'class OwnConfig(BertConfig):\n    model_type = "own"\n'
        "class OwnModel(BertModel):\n    config_class = OwnConfig\n"
    )
    return folder


def test_code_of_a_model_runs_when_its_option_says_so_and_never_by_stdin(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which transformers adds that folder
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    folder, ran = keep(BertModel(config), tmp_path / "model", "[CLS] $A [SEP]"), tmp_path / "ran"
    words = ["read", TEXT, "--model", str(with_code(folder, ran))]
    done = CliRunner().invoke(cli, words, input="y\n" * 9)
    assert (done.exit_code, ran.exists()) == (2, False), done.stderr
    assert "requires custom Python code" in done.stderr and "--trust-remote-code" in done.stderr
    done = CliRunner().invoke(cli, [*words, "--trust-remote-code"])
    assert (done.exit_code, ran.exists()) == (0, True), done.stderr


class _Hostile:
    def __reduce__(self):
        return print, ("code of a file ran",)


def _without_weights(folder):
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


DAMAGE = {
    "config of nothing": (lambda place: (place / "config.json").write_text("null"), "as the model, got"),
    "no heads": (lambda place: _set(place, num_attention_heads=0), "as the model, got"),
    "cut weights": (lambda place: (place / "model.safetensors").write_bytes(b"\0" * 100), "as the model, got"),
    "pickle": (lambda place: torch.save([_Hostile()], _without_weights(place)), "could run code when loaded"),
    "tokenizer": (lambda place: (place / "tokenizer.json").write_text("null"), "Expected a tokenizer saved"),
}


def _set(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_model_of_a_language_is_reported_in_one_line(case, encoder, tmp_path):
    place = shutil.copytree(encoder, tmp_path / "model")
    damage, message = DAMAGE[case]
    damage(place)
    done = CliRunner().invoke(cli, ["read", "the key", "--model", str(place)])
    assert isinstance(done.exception, SystemExit) and done.exit_code == 2, done.exception
    assert message in done.stderr.splitlines()[-1] and done.stdout == "" and "code of a file ran" not in done.output
