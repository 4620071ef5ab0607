"""A small world: a run in which only vLLM, the grader and the probe are mocks."""
import contextlib
import itertools
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

import minirl
from ada_sampler import Estimator
from models_small import one_layer
from parts import config as configuration
from parts import engine as engines
from parts.config import Config, with_defaults
from parts.engine import Rollout
from parts.run_folder import LOGS
from parts.files import read_rows
from parts.grader import Verdict
from parts.machine import GB, Machine
from parts.models import TINY, Model, find_model
from parts.policy import make_optimizer

WORDS = 32  # what the engine writes with
RATES = [0.15, 0.3, 0.5, 0.7, 0.85, 0.5]  # how often prompts are solved
SMALL = dict(batch_prompts=len(RATES), max_tokens=8, data="builtin", lr=0.01)
WHOLE = dict(name="mine", steps=3, max_tokens=12, batch_prompts=4, eval_questions=4, eval_k=2,
             eval_every=2)


class Words:
    """It replaces the tokenizer. Token 7 is the text "<7>"."""

    def decode(self, ids) -> str:
        return "".join(f"<{i}>" for i in ids)


class Engine:
    """In vLLM's place. What it writes follows from the seed, the prompt and the place in the pool.

    At most `slots` samples are written at a time, a token each per step; those that finish in one
    step come back in random order. A prompt is anything with a pass rate `p`, or token ids, which
    decide it. log[i]: keys submitted before step i; asked: what was asked for with each key.
    """

    on_cpu, sleeps, tokenizer = True, False, Words()

    def __init__(self, seed: int | None = 0, slots=10**9, routes=False, events=None,
                 length=lambda rng, correct: rng.randint(1, 12)):
        self.seed, self.slots, self.routes, self.length = seed, slots, routes, length
        self.waiting, self.running, self.shuffle = [], {}, random.Random(seed)
        self.log, self.asked, self.events = [[]], {}, [] if events is None else events

    def submit(self, key, prompt, max_tokens=None, seed=None) -> None:
        self.log[-1].append(key)
        self.asked[key] = SimpleNamespace(max_tokens=max_tokens, seed=seed)
        own = torch.initial_seed() if self.seed is None else self.seed
        rng = random.Random(f"{own if seed is None else seed}/{name_of(prompt)}/{key[-1]}")
        rollout = self.write(prompt, rng, max_tokens)
        self.waiting.append((key, len(rollout.token_ids), rollout))

    def write(self, prompt, rng: random.Random, max_tokens) -> Rollout:
        rate = getattr(prompt, "p", None)
        if rate is None:
            rate = random.Random(name_of(prompt)).choice(RATES)
        correct = rng.random() < rate
        T = self.length(rng, correct)
        T = min(T, max_tokens or T)
        rollout = Rollout(
            token_ids=[rng.randrange(WORDS) for _ in range(T)],
            logprobs=[-math.log(WORDS) + rng.gauss(0, 0.3) for _ in range(T)],
            finish_reason="length" if T == max_tokens else "stop",
            text=f"{'right' if correct else 'wrong'} {rng.randrange(10**6)}",
            routes=torch.tensor([[[0, 1]] * 2] * (len(prompt) + T - 1)) if self.routes else None)
        rollout.prompt, rollout.correct = name_of(prompt), correct  # for the tests alone
        return rollout

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list:
        assert self.busy, "an idle engine was stepped"
        while self.waiting and len(self.running) < self.slots:
            key, left, rollout = self.waiting.pop(0)
            self.running[key] = [left, rollout]
        for entry in self.running.values():
            entry[0] -= 1
        finished = [(key, rollout) for key, (left, rollout) in self.running.items() if left == 0]
        for key, _ in finished:
            del self.running[key]
        self.shuffle.shuffle(finished)
        self.log.append([])
        return finished

    def note(event: str):
        return lambda self, *_: self.events.append(event)

    sleep, wake, sync, clear_cache = map(note, ("sleep", "wake", "sync", "clear"))


def name_of(prompt) -> str:
    """The name of a prompt for engine and grader: its token ids, or a coin's id."""
    return str(getattr(prompt, "prompt_ids", None) or getattr(prompt, "id", prompt))


def by_text(key, problem, rollout) -> float:
    return float(rollout.text.startswith("right"))


class Grader(contextlib.AbstractContextManager):
    """Rewards by `judge(key, problem, rollout)`, at once; one that is NaN has no verdict."""

    def __init__(self, judge=by_text):
        self.judge, self.open, self.styles = judge, {}, {}

    def submit(self, key, problem, rollout, style="") -> None:
        assert key not in self.open and rollout.prompt == name_of(problem)
        reward = self.judge(key, problem, rollout)
        status = "raised" if math.isnan(reward) else "correct" if reward > 0.5 else "wrong"
        parts = {} if math.isnan(reward) else {"reward/half": reward / 2, "reward/rest": reward / 2}
        self.open[key], self.styles[key] = Verdict(status, "because", reward, parts), style

    def result(self, key) -> Verdict:
        return self.open.pop(key)

    def check_golds(self, golds: list) -> list[bool]:
        return [True] * len(golds)

    def __exit__(self, *_):
        pass


def silent(key, problem, rollout) -> float:
    """This judge says that every answer is wrong."""
    return 0.0


CPU = Machine(card="", memory=64 * GB, dtype="float32")
CARD = Machine(card="a card", memory=80 * GB, dtype="bfloat16")
SIZES = dict(  # of models that nobody downloads for a test
    small=dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
               num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    half=dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
              num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True),
    large=dict(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
               num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True))
NAMED = {"SmolLM2-135M-Instruct": "small", "Qwen2.5-0.5B": "half"}


@cache
def known_model(base: str) -> Model:
    """What the model's files would say. A model that is neither built in nor in NAMED has 1.5 B."""
    if base in TINY:
        return find_model(base)
    return Model(base, base, LlamaConfig(**SIZES[NAMED.get(base, "large")]))


def settle_flags(flags: Config, machine: Machine = CPU) -> Config:
    """The settings of a run, as its first lines make them of these flags."""
    model = known_model(flags.model)
    if flags.replay in ("r2", "r3"):
        model = known_model("tiny-moe")
    return with_defaults(replace(flags, name=configuration.name_of(flags)), model, machine)


def settled(machine: Machine = CPU, **flags) -> Config:
    return settle_flags(Config(**flags), machine)


def problem(i: int) -> SimpleNamespace:
    return SimpleNamespace(id=str(i), problem=f"problem {i}", prompt=f"<{i}>", answer="",
                           prompt_ids=[i % WORDS, i // WORDS % WORDS])


def ready(mixture=False, judge=by_text, **flags) -> SimpleNamespace:
    """A run that can take a step; what happens to engine and probe is in `.events`."""
    config = settled(**SMALL | flags)
    trained, events = one_layer(mixture), []
    optimizer, schedule = make_optimizer(trained, config)
    probe = SimpleNamespace(check=lambda: events.append("probe") or dict(probe_gap_max=0.25))
    engine = Engine(seed=None, routes=mixture, events=events)
    new = map(problem, itertools.count())  # no prompt comes twice
    stream = SimpleNamespace(next=lambda: next(new),
                             take=lambda count: list(itertools.islice(new, count)))
    return SimpleNamespace(
        config=config, policy=trained, optimizer=optimizer, schedule=schedule, events=events,
        engine=engine, grader=Grader(judge), stream=stream, estimator=Estimator(), probe=probe,
        state=dict(step=0, samples_total=0, tokens_total=0, seconds_total=0.0),
        folder=Path("mine"))


def stand_in(put=setattr, engine=Engine) -> None:
    """Put the mocks into the program, in a test's process or in one that it starts."""
    put(engines, "Engine", lambda path, *, routes=False, **_: engine(seed=None, routes=routes))
    put(minirl, "start_probe", lambda *_: SimpleNamespace(check=lambda: dict(probe_gap_max=0.0)))
    put(minirl, "draw_run", lambda folder: None)
    for module in ("minirl", "rewards"):
        put(__import__(module), "open_grader", lambda *_: Grader())


def small_run(folder: Path, engine=Engine, **flags) -> Path:
    """minirl's program in `folder`: the run's own folder. With resume=True it goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        stand_in(patch.setattr, engine)
        minirl.main(Config(**WHOLE | flags))
    return folder / "runs" / (WHOLE | flags)["name"]


def rows(log: Path) -> list[dict]:
    """The rows of a run's log, without times and memory."""
    timed = ("seconds", "memory_gb")
    return [{key: value for key, value in row.items() if not key.startswith(timed)}
            for row in read_rows(log)]


def difference(run: Path, reference: Path, step: int, evaluated: bool = True) -> str:
    """The first thing in which two runs differ up to `step`; empty if they are equal."""
    for log in LOGS:
        upto = step if evaluated or log in ("metrics.jsonl", "groups.jsonl") else step - 1
        mine, other = ([row for row in rows(folder / log) if row["step"] <= upto]
                       for folder in (run, reference))
        if mine != other:
            return f"{log} differs"
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        file = f"checkpoints/step-{step:06d}/{name}"
        if (run / file).read_bytes() != (reference / file).read_bytes():
            return f"{file} differs"
    return ""
