# make demo   set everything up and train the built-in tiny model (no GPU, no model hub)
# make real   train a real language model of 135 M parameters on word problems (SEED=1 for another run)
# make check  set everything up, lint, and run the tests that need no engine
# make test   the tests of make check, and an end-to-end run of the main features
# make test-all  every test (CONTRIBUTING.md has the durations)
# make test-rest  the tests that make test leaves out, but for those that take minutes
# make bench  set everything up and measure rollouts (a few minutes)
# make extras packages for the tests of notebook, page, trackers and TRL, which are skipped without them
# make notebook  the extras and JupyterLab, which opens walkthrough.ipynb
# make book   course/book.html, one page with all notes of the course (downloads pandoc, 34 MB, once)
# make setup  only the virtual environment .venv, from the lock in requirements-cpu.txt, with uv if installed
#
# With an NVIDIA GPU no target is needed: docs/gpu.md has the three commands.

unexport PYTHONDONTWRITEBYTECODE  # if it is set, every start compiles 8,000 modules again
PYTHON ?= python3
UV := $(shell command -v uv)
LOCK := --quiet --no-deps -r requirements-cpu.txt
OPTIONAL := --quiet --no-deps -r requirements-optional.txt
TORCH_CPU := https://download.pytorch.org/whl/cpu
PYTEST := .venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
QUICK := not engine and not slow and not long
BOOK_STYLE := <style>math { font-family: STIX Two Math, Cambria Math, DejaVu Math TeX Gyre, math } \
	math[display=block] { overflow-x: auto; overflow-y: hidden } \
	code { overflow-wrap: anywhere }</style>

ifeq ($(UV),)
VENV := $(PYTHON) -m venv .venv
INSTALL := .venv/bin/pip --disable-pip-version-check install --no-compile
ELSEWHERE := --extra-index-url $(TORCH_CPU)
else
VENV := $(UV) venv --quiet --allow-existing --python $(PYTHON) .venv
INSTALL := $(UV) pip install --python .venv/bin/python
ELSEWHERE := --extra-index-url $(TORCH_CPU) --index-strategy unsafe-best-match
endif

.PHONY: setup extras notebook book demo real check test test-all test-rest bench
setup: .venv/installed

.venv/installed: requirements-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(VENV)
	@echo "installing about 120 packages (2.2 GB) into .venv, a few minutes ..."
	$(INSTALL) $(LOCK) || $(INSTALL) $(LOCK) $(ELSEWHERE)
	@touch $@

extras: setup
	$(INSTALL) $(OPTIONAL)

notebook: extras
	$(INSTALL) jupyterlab
	.venv/bin/jupyter lab walkthrough.ipynb

# The first sed expression makes links into links within the book, the second adds a space after log.
book:
	test -d .venv || $(VENV)
	$(INSTALL) --quiet pypandoc_binary==1.17
	cd course && $$(../.venv/bin/python -c 'import pypandoc; print(pypandoc.get_pandoc_path())') \
		notes/*.md exercises.md symbols.md --from gfm+rebase_relative_paths --standalone \
		--mathml --embed-resources --toc --toc-depth 2 --output book.part.html \
		--metadata title="Reinforcement learning for language models" --metadata lang=en \
		--variable maxwidth=44em --variable header-includes='$(BOOK_STYLE)'
	cd course && sed -e 's|notes/\.\./symbols\.md||' \
		-e 's|<mi mathvariant="normal">log</mi>|&<mspace width="0.17em"></mspace>|g' \
		book.part.html > book.html && rm book.part.html

demo: setup
	.venv/bin/python minirl.py --name demo --steps 20 --eval-every 10 --log-groups all --resume

SEED ?= 0
real: setup
	.venv/bin/python minirl.py --model SmolLM2-135M-Instruct --seed $(SEED) --name real-$(SEED) --log-groups all --resume
	.venv/bin/python explore.py runs/real-$(SEED)
	@echo "On problems that people wrote (from the hub, or a file of yours), before and after:"
	@echo "  .venv/bin/python eval.py --adapter runs/real-$(SEED) --base --data svamp --k 2"

check: setup
	.venv/bin/ruff check .
	$(PYTEST) -m "$(QUICK)"

test: setup
	$(PYTEST) -m "$(QUICK) or core"

test-all: setup
	$(PYTEST)

test-rest: setup
	$(PYTEST) -m "not ($(QUICK) or core or long)"

bench: setup
	.venv/bin/python bench/measure.py rollouts
