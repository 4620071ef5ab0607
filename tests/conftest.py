"""Tests marked `engine` start the real vLLM; the others need no engine: pytest -m "not engine"."""
import gc
import os
import random
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # what a test finds does not depend on whether a hub answers
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and what the tests start inherits
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def pytest_collection_modifyitems(items):
    """The longest files first, so that two workers end at about the same time."""
    slow = ["test_real.py", "test_ranks.py", "test_training.py", "test_faults.py", "test_make.py",
            "test_routing_replay.py", "test_eval.py", "test_course.py", "test_families.py",
            "test_walkthrough.py", "test_probe.py", "test_engine.py", "test_rewards.py"]
    items.sort(key=lambda item: slow.index(item.path.name) if item.path.name in slow else len(slow))


def pytest_runtest_setup(item):
    """Whatever ran before, a test finds the same random states."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if item.get_closest_marker("engine"):
        # What is there before an engine starts need not be looked at each time vLLM collects
        # garbage. vLLM thaws it when the engine ends.
        gc.freeze()


@pytest.fixture(autouse=True)
def environment():
    """What a test, or what it calls, sets in the environment is gone after it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def disk(monkeypatch):
    """What reaches the disk, in order: ("flush", path) and ("rename", path)."""
    seen, fsync = [], os.fsync

    def flushed(handle):
        seen.append(("flush", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    for name in ("rename", "replace"):
        def renamed(source, target, real=getattr(os, name)):
            seen.append(("rename", Path(target)))
            real(source, target)

        monkeypatch.setattr(os, name, renamed)
    monkeypatch.setattr(os, "fsync", flushed)
    return seen
