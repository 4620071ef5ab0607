"""Programs for tests, started from a warm process.

A start of minirl.py costs 18 seconds of CPU time before its first line of work, nearly all of it
imports. So one process imports torch, vLLM and the rest once; every program is a fork of it that
runs the script as `__main__`. Where the start itself is what a test is about, use subprocess.
"""
import io
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ("--batch-prompts 8 --max-tokens 24 --eval-questions 6 --eval-k 2 "
         "--eval-every 3").split()  # of the real program
NO_CURVES = "import explorer.panels; explorer.panels.draw_run = lambda folder: None"
HANG = 1800  # seconds: the limit of every wait. Only what hangs meets it, whatever the load


def lines(log) -> list[dict]:
    """The rows of a log, each of which must be whole."""
    return [json.loads(line) for line in Path(log).read_text().splitlines()]


def contents(folder: Path) -> dict:
    """Folder or file -> when it was written; what only locks is left out."""
    return {file: file.is_file() and file.stat().st_mtime_ns for file in folder.rglob("*")
            if file.name != ".lock"}


def run_program(script: str, *flags, code: int = 0, **how) -> str:
    """What `python script *flags` prints, stderr too, until it ends with `code`."""
    process, out = start(script, *flags, **how)
    process.join(HANG)
    ended, said = process.exitcode, out.read_text(errors="replace")
    process.kill()  # if it hangs
    assert ended == code and "Traceback" not in said, f"{script} {flags}: {ended}\n{said}"
    return said


def start(script: str, *flags, cwd=".", env: dict = {}, before: str = "", curves: bool = False):
    """`python script *flags`, running: (its process, the file with what it prints, stderr too).

    script: a file of the project, or a module ("recipes.export"). env: None takes a variable away.
    before: Python that it executes first. curves: whether a training draws them, which takes long.
    """
    out = Path(tempfile.mkdtemp()) / "out"
    out.touch()
    variables = {name: str(value) for name, value in (os.environ | env).items()
                 if value is not None}
    before = before if curves else f"{NO_CURVES}\n{before}"
    process = warm().Process(
        target=become, args=([script, *map(str, flags)], str(cwd), variables, before, out))
    with pytest.MonkeyPatch.context() as patch:  # the program must not import the tests' own
        patch.setitem(sys.modules, "__main__", ModuleType("__main__"))
        process.start()
    return process, out


def warm():
    """The context whose server has imported everything. It starts with the first program."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))  # for the server alone
        forkserver.ensure_running()
    return context


def become(args, cwd, environment, before, out) -> None:
    """In the new process: take on folder, environment and output, and run the script."""
    with open(out, "wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdin = open(os.devnull)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(stream, "wb", 0), write_through=True) for stream in (1, 2))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    script, sys.argv = args[0], list(args)
    exec(before, {"__name__": "before"})
    try:
        if script.endswith(".py"):
            sys.argv[0] = str(ROOT / script)
            sys.path.insert(0, os.path.dirname(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    finally:
        import atexit
        atexit._run_exitfuncs()  # a process of multiprocessing ends without
