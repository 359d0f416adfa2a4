"""Classes by name: the names that a file or ImageNet has, and the class that a user's words mean.

This module imports neither torch nor timm, so that a misspelt class is reported at once.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitflow.errors import ModelError, OptionError

# Class names as an argument: a file of names, the names in order, {index: name} or {name: index}.
ClassNames = str | os.PathLike[str] | Sequence[str] | Mapping[int, str] | Mapping[str, int]
# An error about an unknown class lists the names of at most this many classes.
_LISTED_CLASSES = 20
# Files of timm with the WordNet ids of the classes of a model, by their number.
_SYNSETS = {
    1000: "imagenet_synsets.txt",
    11221: "imagenet21k_miil_synsets.txt",
    11821: "imagenet12k_synsets.txt",
    21841: "imagenet22k_synsets.txt",
    21842: "imagenet22k_ms_synsets.txt",
    21843: "imagenet21k_goog_synsets.txt",
}


def top_count(target: Any) -> int | None:
    """Return k of "topk", the k most probable classes, 1 for None, and None for a class.

    >>> top_count("top3"), top_count(None), top_count("tabby")
    (3, 1, None)
    """
    if target is None:
        return 1
    match = re.fullmatch(r"top([1-9]\d*)", target) if isinstance(target, str) else None
    return int(match.group(1)) if match else None


def is_several(target: Any) -> bool:
    """Return True if one target stands for several classes, as "top2" does.

    >>> is_several("top2"), is_several("top1"), is_several(None)
    (True, False, False)
    """
    return (top_count(target) or 1) > 1


def class_index(target: Any, num_classes: int, class_names: Sequence[str] | None) -> int:
    """Return the index of a class given by index or name; ImageNet classes also by any synonym or WordNet id.

    Case and underscores are ignored. A text that is the name of a class is not an index.

    >>> class_index("Egyptian_CAT", 2, ["tabby", "Egyptian cat"])
    1
    """
    text = str(target).strip()
    matches = [i for i, name in enumerate(class_names or ()) if name.lower() == text.lower()]
    if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) and not (matches and isinstance(target, str)):
        index = int(text)
        if not 0 <= index < num_classes:
            raise OptionError(f"Expected a class index from 0 to {num_classes - 1}, got {index}.")
        return index
    if class_names is None:
        raise OptionError(
            f"This model has no class names, got {text!r}: give an index, or pass class_names= (--class-names)."
        )
    query, synonyms = _plain(text), _synonyms(tuple(class_names))
    matches = matches or [i for i, names in enumerate(synonyms) if query == names[0]]
    matches = matches or [i for i, names in enumerate(synonyms) if query in names]
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(f"{class_names[i]!r} ({i})" for i in matches[:5])
        raise OptionError(f"Several classes are called {text!r}: {listed}. Give the index.")
    close = _close(query, synonyms)
    known = wordnet_of(tuple(class_names)) or [("", name) for name in class_names]
    hint = f" Did you mean {', '.join(repr(', '.join(known[i][1:])) for i in close)}?" if close else ""
    if num_classes <= _LISTED_CLASSES:
        raise OptionError(f"Unknown class {text!r}.{hint} Known: {', '.join(class_names)}.")
    raise OptionError(f"Unknown class {text!r}.{hint} Give a name of the model's {num_classes} classes, or an index.")


def _plain(name: str) -> str:
    """Normalise case, underscores and spaces of a name."""
    return " ".join(name.lower().replace("_", " ").split())


@lru_cache(maxsize=8)
def _synonyms(class_names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the normalised names of each class: its name, the parts of it, and its WordNet synonyms."""
    wordnet = wordnet_of(class_names) or ((),) * len(class_names)
    every = ((name, *name.split(", "), *others) for name, others in zip(class_names, wordnet, strict=True))
    return [tuple(map(_plain, names)) for names in every]


def _close(query: str, synonyms: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the classes most similar to a query.

    Names that contain all words of the query, or the most similar words, come first, then names with one of them, then
    similar spellings. Classes
    of which more synonyms contain the words come first: "lesser panda", also called "bear cat", is not a cat.
    """
    vocabulary = {word for names in synonyms for name in names for word in name.split()}
    words = {word for word in query.split() if len(word) > 2}
    words = {match for word in words for match in {word} & vocabulary or get_close_matches(word, vocabulary, n=1)}
    similar = set(get_close_matches(query, {name for names in synonyms for name in names}, n=3))
    ranked = []
    for i, names in enumerate(synonyms):
        shares = any(words & set(name.split()) for name in names)
        if shares or not similar.isdisjoint(names):
            similarity = max(SequenceMatcher(None, query, name).ratio() for name in names)
            different = set(names)
            contain = sum(words <= set(name.split()) for name in different) / len(different) if shares else 0.0
            ranked.append((not shares, -contain, -similarity, i))
    return [i for *_, i in sorted(ranked)[:5]]


@cache
def imagenet_classes(count: int) -> tuple[tuple[str, ...], ...] | None:
    """Return the WordNet id and synonyms of ImageNet's classes, if it has a list of as many; otherwise None."""
    spec = find_spec("timm")
    if count not in _SYNSETS or spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0], "data", "_info")
    rows = (folder / "imagenet_synset_to_lemma.txt").read_text(encoding="utf-8").splitlines()
    lemmas = dict(row.split("\t", 1) for row in rows if "\t" in row)
    ids = (folder / _SYNSETS[count]).read_text(encoding="utf-8").split()
    return tuple((id, *lemmas[id].strip('"').split(", ")) for id in ids)


@cache
def imagenet_names(count: int) -> list[str] | None:
    """Return a short name for each of ImageNet's classes, unique but for homonyms; None if it has no such list."""
    classes = imagenet_classes(count)
    return _shortest_unique([", ".join(names) for _, *names in classes]) if classes else None


@lru_cache(maxsize=8)
def wordnet_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...] | None:
    """Return the WordNet id and synonyms of each class if these are ImageNet's classes; otherwise None.

    More than 90 % of the names must match, as libraries use different cases, synonyms and words.
    """
    known = imagenet_classes(len(names))
    if known is None:
        return None
    pairs = zip(names, known, strict=True)
    matches = sum(name.split(", ")[0].lower() in map(str.lower, synonyms) for name, synonyms in pairs)
    return known if matches > 0.9 * len(names) else None


def _shortest_unique(descriptions: Sequence[str]) -> list[str]:
    """Return the shortest unique prefix of each class's comma-separated names."""
    parts = [text.split(", ") for text in descriptions]
    names = [part[0] for part in parts]
    for length in range(2, 6):
        count = Counter(names)
        names = [", ".join(part[:length]) if count[name] > 1 else name for part, name in zip(parts, names, strict=True)]
    return names


def _names(value: Any) -> list[str] | None:
    """Return class names from a list, a complete mapping with their indices, or either as JSON; otherwise None."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    if isinstance(value, Mapping):
        value = _in_order(value)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Set):
        return None
    names = list(value)
    return [str(name) for name in names] if all(isinstance(name, str | int | float) for name in names) else None


def _in_order(mapping: Mapping[Any, Any]) -> list[Any] | None:
    """Return the names of {index: name}, or of {name: index} for texts and integers; None if an index is missing.

    >>> _in_order({1: "dog", 0: "cat"}), _in_order({"dog": 1, "cat": 0}), _in_order({0: "cat", 2: "dog"})
    (['cat', 'dog'], ['cat', 'dog'], None)
    """
    names = [(index, name) for name, index in mapping.items() if isinstance(name, str) and type(index) is int]
    for pairs in (names, list(mapping.items())):
        with suppress(TypeError, ValueError, KeyError):
            by_index = {int(index): name for index, name in pairs}
            return [by_index[index] for index in range(len(mapping))]
    return None


def checked_class_names(names: ClassNames, count: int | None) -> list[str]:
    """Return class names given as an argument, one for each class of the model; `count` is None if not known yet."""
    checked = read_class_names(names) if isinstance(names, str | os.PathLike) else _names(names)
    if checked is None:
        raise ModelError(
            "Expected class names as a file, a list, {index: name} or {name: index} with every index from 0, got "
            f"{names!r:.80}."
        )
    check_name_count(checked, count)
    return checked


def check_name_count(names: Sequence[str], count: int | None) -> None:
    """Raise ModelError unless there are `count` names."""
    if count is not None and len(names) != count:
        raise ModelError(f"Expected {count} class names, one for each class of the model, got {len(names)}.")


def read_class_names(path: str | os.PathLike[str]) -> list[str]:
    """Read class names from a file: JSON (a list, {index: name} or {name: index}), or text with one name per line."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read class names from {path}: {error}.") from error
    is_json = path.suffix.lower() == ".json"
    names = _names(text) if is_json else [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        expected = "a JSON list of names, or an object of names and indices," if is_json else "one class name per line"
        raise ModelError(f"Expected {expected} in {path}, got {'something else' if is_json else 'none'}.")
    return names
