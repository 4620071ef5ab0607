"""The built-in problems are those with which all that is documented was measured."""
import hashlib
import json

import pytest

from models.problems import BUILTIN


@pytest.mark.parametrize("name, train, test", [
    ("builtin", "97505660cc6c", "081b3187f9ea"),
    ("builtin-skills", "f44151dc1a97", "3c28fc0d5298"),
    ("builtin-words", "a2bdd02f385a", "8d5d4ef6d711")])
def test_they_are_the_same_at_every_start_and_with_every_version(name, train, test):
    """Else no figure of the documentation would hold, and no run could be resumed."""
    for split, count, digest in (("train", 6000, train), ("test", 240, test)):
        rows = BUILTIN[name](split, count)
        assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12] == digest
        assert BUILTIN[name](split, 50) == rows[:50]
