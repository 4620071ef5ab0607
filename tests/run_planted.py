"""Each bug of the hunt in a copy of the project: does an update still run, does its test fail?

test_course.py runs `python tests/run_planted.py`, which prints a line of JSON for each bug.
"""
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import mutate  # noqa: E402
from course import bugs  # noqa: E402

UPDATE = "tests/test_course.py::test_an_update_is_finite"

if __name__ == "__main__":
    mutate.warm_up()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        place = mutate.copy(Path(folder, "copy"))
        for number, bug in bugs.bugs().items():
            before, found = mutate.mutate(place, bug), {}
            for name, test in (("update", UPDATE), ("test", bug["test"])):
                code, _ = mutate.run(place, [test])
                found[name] = code, place.with_suffix(".out").read_text(errors="replace")[-2000:]
            (place / bug["file"]).write_text(before, encoding="utf-8")
            print(json.dumps(dict(number=number) | found), flush=True)
