"""Tests marked `engine` start the real vLLM; the others need no engine: pytest -m "not engine"."""
import gc
import os
import random
import signal
import sys
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from helpers import ROOT

# The same examples at every run, and as long as they need: a test must not fail by chance.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None,
                          max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # what a test finds does not depend on whether a hub answers
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and what the tests start inherits
signal.signal(signal.SIGINT, signal.default_int_handler)  # and the & of a shell this one
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]


def pytest_collection_modifyitems(items):
    """The longest files first, so that two workers end at about the same time."""
    names = ("real faults second_evening training make course routing_replay walkthrough "
             "agreement rewards explore_page probe eval trl_recipe engine own_reward "
             "combinations bench export").split()
    place = {f"test_{name}.py": i for i, name in enumerate(names)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_runtest_setup(item):
    """Each test finds the same random states, whatever ran before."""
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
    """Variables that a test or the code under test sets are gone after it."""
    with mock.patch.dict(os.environ):
        yield
