"""The words of errors: names that are no text, whole numbers."""

import json
import os
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vitflow.cli.output import say_record
from vitflow.errors import printable


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (os.fsdecode(b"caf\xe9.jpg"), r"caf\xe9.jpg"),
        (Path("two\nlines\ttab"), r"two\nlines\ttab"),
        ("\x1b[31mred\x07\x7f\x9b", r"\x1b[31mred\x07\x7f\x9b"),
        ("gpj.\u202egnp", r"gpj.\u202egnp"),
        ("a\u200eb\u200fc\u061cd\u2066e", r"a\u200eb\u200fc\u061cd\u2066e"),
        ("pay\u200bpal\u2060\ufeff\u00ad\U000e0041", r"pay\u200bpal\u2060\ufeff\xad\U000e0041"),
        ("a\u2028b\ud800\ufffe", r"a\u2028b\ud800\ufffe"),
        ("虎斑猫\u3000 हिन्दी 👩\u200d👧 ภาษา\\x41", "虎斑猫\u3000 हिन्दी 👩\u200d👧 ภาษา\\x41"),
    ],
)
def test_names_are_shown_on_one_line_with_escapes_for_what_is_no_text(name, shown):
    assert printable(name) == shown
    assert printable(name, lines=True) == shown.replace("\\n", "\n").replace("\\t", "\t")


def test_every_character_comes_out_as_one_line_of_utf_8_that_xml_takes():
    shown = [printable(chr(code)) for code in range(0x30000)]
    text = "".join(shown)
    ElementTree.fromstring(f"<a>{text.replace('&', '').replace('<', '').replace('>', '')}</a>")
    assert len(text.splitlines()) == 1 and text.encode()
    kept = [code for code, one in enumerate(shown) if one == chr(code)]
    assert not {unicodedata.category(chr(code)) for code in kept} & {"Cc", "Cs", "Zl", "Zp"}


def test_json_of_every_character_is_printable_and_read_as_it_was(capsys):
    characters = [*map(chr, range(0x30000)), "\U000e0041", os.fsdecode(b"caf\xe9")]
    for record in ({"\x9b\u202e": characters, "numbers": [1.5, None]}, {"name": "虎斑猫"}):
        say_record(record)
        text = capsys.readouterr().out.removesuffix("\n")
        assert json.loads(text) == record
        assert printable(text) == text
    assert "虎斑猫" in text
