"""Problems -> the token ids that the model sees, and the ids that end its response.

    problems = add_prompts(problems, tokenizer, "reinforce-ada", max_prompt_tokens=1024)

Training and evaluation both come through here, so a model is evaluated on the prompt it was trained
on. The template is part of every result: it alone moves Qwen2.5-Math-1.5B from about 20 % to about
60 % on MATH-500.
"""
import contextlib
import signal
import statistics
import threading
from dataclasses import replace

from parts.screen import shown

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
STEP_BY_STEP = "Let's think step by step and output the final answer within \\boxed{}."
TEMPLATES = {  # (role, text) turns for the tokenizer's own chat template; None = the bare problem
    "reinforce-ada": [("system", BOXED), ("user", "{problem} " + STEP_BY_STEP)],
    "qwen25-math-cot": [("system", BOXED), ("user", "{problem}")],
    "qwen-boxed": [("system", "You are a helpful assistant."), ("user", "{problem}\n" + BOXED)],
    "llama": [("user", "{problem}\n" + BOXED + "\n\n")],
    "chat": [("user", "{problem}")],
    "none": None,
}
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")
RENDERING_SECONDS = 20, 0.02  # per set, and per problem: a hundred times what templates take


def add_prompts(problems: list, tokenizer, template: str, max_prompt_tokens: int) -> list:
    """The problems with `prompt` and `prompt_ids`; over-long ones are dropped and counted.

    Raises SystemExit for an unknown template, for one that the tokenizer cannot render, and if
    nothing is left.
    """
    if template not in TEMPLATES:
        raise SystemExit(
            f"There is no prompt template '{shown(template, 80)}'; choose one of "
            f"{', '.join(TEMPLATES)}.")
    texts, turns = [problem.problem for problem in problems], TEMPLATES[template]
    prompts = render(tokenizer, template, texts) if turns else texts
    # A chat template writes its own start token; a bare problem gets the tokenizer's, if any.
    ids = tokenizer(prompts, add_special_tokens=not turns)["input_ids"]
    kept = [replace(problem, prompt=prompt, prompt_ids=list(tokens))
            for problem, prompt, tokens in zip(problems, prompts, ids)
            if len(tokens) <= max_prompt_tokens]
    if len(kept) < len(problems):
        lost = len(problems) - len(kept)
        print(f"data: dropped {lost} of {len(problems)} problems with a prompt over "
              f"{max_prompt_tokens} tokens (longest: {max(map(len, ids))})")
    if not kept:
        raise SystemExit(
            f"Every prompt is over {max_prompt_tokens} tokens: raise --max-prompt-tokens.")
    lengths = [len(problem.prompt_ids) for problem in kept]
    print(f"data: {len(kept)} prompts of {min(lengths)} to {max(lengths)} tokens, median "
          f"{statistics.median(lengths):g}")
    return kept


def render(tokenizer, template: str, texts: list[str]) -> list[str]:
    """The tokenizer's own chat template around each problem.

    That template is a program which came with the model: it may refuse (some know no system turn),
    fail, or never end. Each becomes a SystemExit of one sentence.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise SystemExit(f"The tokenizer has no chat template for {template}: use --template none.")
    turns = TEMPLATES[template]
    chats = [[{"role": role, "content": text.replace("{problem}", problem)} for role, text in turns]
             for problem in texts]
    start, each = RENDERING_SECONDS
    try:
        with time_limit(start + each * len(texts)):
            return tokenizer.apply_chat_template(
                chats, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # jinja's own, and whatever Python raises inside a template
        raise SystemExit(
            f"The model's chat template cannot render {template} ({type(error).__name__}: "
            f"{shown(error)}): try --template llama or chat, which have no system turn, or none."
        ) from None


@contextlib.contextmanager
def time_limit(seconds: float):
    """Raises TimeoutError inside after `seconds`; only the main thread can be stopped like this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number, frame):
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stop_ids(tokenizer, names: str = "auto") -> list[int]:
    """Ids of the tokens that end a response: `names`, joined by commas, or all ends that are known.

    Both are needed: a base model's own end is <|endoftext|>, but in a chat it stops with
    <|im_end|>. Raises SystemExit for a token that the vocabulary does not have.
    """
    vocabulary = tokenizer.get_vocab()
    ends = dict.fromkeys((tokenizer.eos_token, *END_TOKENS))
    known = [token for token in ends if token in vocabulary]
    tokens = known if names == "auto" else names.split(",")
    unknown = [token for token in tokens if token not in vocabulary]
    if unknown:
        raise SystemExit(
            f"--stop: the model has no token '{shown(unknown[0])}'; known ends: "
            f"{', '.join(map(shown, known))}.")
    return sorted({vocabulary[token] for token in tokens})
