"""Tests marked `engine` start the real vLLM; everything else needs no engine: pytest -m "not engine"."""
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def pytest_collection_modifyitems(items):
    """The longest files first, so that two workers end at about the same time."""
    slow = ["test_training.py", "test_faults.py", "test_eval.py", "test_engine.py", "test_rewards.py"]
    items.sort(key=lambda item: slow.index(item.path.name) if item.path.name in slow else len(slow))


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory):
    """Environment with a cache that holds a barely trained tiny model: enough where its answers do not matter."""
    from parts import tiny

    cache = tmp_path_factory.mktemp("cache")
    os.environ["MINIRL_CACHE"], before = str(cache), os.environ.get("MINIRL_CACHE")
    try:
        tiny.build(tiny.cached("tiny"), progress=False, steps=20, batch=8)
    finally:
        os.environ.pop("MINIRL_CACHE") if before is None else os.environ.update(MINIRL_CACHE=before)
    return {"MINIRL_CACHE": str(cache)}
