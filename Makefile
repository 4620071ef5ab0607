# make demo   set everything up and train the built-in tiny model (no GPU, no model hub)
# make test   set everything up and run all tests
# make bench  set everything up, measure speed and memory and print the table of targets (about 13 minutes)
# make setup  only the virtual environment .venv, from the lock in requirements-cpu.txt
#
# With an NVIDIA GPU: python3 -m venv .venv && .venv/bin/pip install -r requirements.txt

PYTHON ?= python3
PIP := .venv/bin/pip --disable-pip-version-check

.PHONY: setup demo test bench
setup: .venv/installed

.venv/installed: requirements-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	@echo "installing about 120 packages (2.2 GB) into .venv, a few minutes ..."
	$(PIP) install --quiet --no-deps -r requirements-cpu.txt || \
	$(PIP) install --quiet --no-deps -r requirements-cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu
	@touch $@

demo: setup
	.venv/bin/python minirl.py --name demo --resume

test: setup
	.venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

bench: setup  # the second line needs TRL; without it the table shows the stored comparison
	.venv/bin/python bench/scaling.py
	-.venv/bin/python bench/trl_baseline.py
	.venv/bin/python bench/speed.py
