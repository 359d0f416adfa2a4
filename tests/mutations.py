"""Damage to files: bits flipped, parts cut out, repeated or overwritten, or the end cut off."""

import random

VALUES = [b"-1", b"0", b"1e999", b"NaN", b"null", b"[]", b"{}", b'"link.png"', b'"../secret.png"', b"[" * 900]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return a file with one to eight of its parts changed; half of them among the first bytes, where headers are."""
    actual = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        start = chance.randrange(min(len(actual), chance.choice([400, len(actual)])) or 1)
        part = slice(start, start + chance.choice([1, 1, 2, 4, 60]))
        kind = chance.choice(["flip", "flip", "cut", "repeat", "random", "value", "end"])
        if kind == "flip" and actual:
            actual[start] ^= 1 << chance.randrange(8)
        elif kind == "end":
            del actual[max(chance.randrange(len(actual) or 1), 20) :]
        else:
            piece = {"repeat": 2 * actual[part], "random": chance.randbytes(4), "value": chance.choice(VALUES)}
            actual[part] = piece.get(kind, b"")
    return bytes(actual)
