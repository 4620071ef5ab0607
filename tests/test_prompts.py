"""The prompt is what the template says to the letter, or a sentence says why there is none."""
from types import SimpleNamespace

import pytest

from models import make
from parts import prompts
from parts.data import Problem
from parts.prompts import add_prompts, stop_ids

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
STEPS = "Let's think step by step and output the final answer within \\boxed{}."


@pytest.fixture
def tokenizer():
    return make.build_tokenizer()  # its own chat template leaves system turns out


@pytest.fixture
def qwen(tokenizer):
    tokenizer.chat_template = QWEN
    return tokenizer


def asked(*texts):
    return [Problem(text, "2", text, "s") for text in texts]


def prompt(tokenizer, template, text="1+1=?"):
    (made,) = add_prompts(asked(text), tokenizer, str(template), 700)
    assert tokenizer.decode(made.prompt_ids) == made.prompt
    return made.prompt


def file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def chat(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + (
        "<|im_start|>assistant\n")


# -------------------------------------------------------------------------------- named templates
EXPECTED = {
    "reinforce-ada": chat(("system", BOXED), ("user", "{x} Q? " + STEPS)),
    "qwen25-math-cot": chat(("system", BOXED), ("user", "{x} Q?")),
    "qwen-boxed": chat(("system", "You are a helpful assistant."), ("user", "{x} Q?\n" + BOXED)),
    "llama": chat(("user", "{x} Q?\n" + BOXED + "\n\n")),
    "three-examples": chat(*prompts.TEMPLATES["three-examples"][:-1], ("user", "{x} Q?")),
    "chat": chat(("user", "{x} Q?")),
    "none": "{x} Q?",
}


@pytest.mark.parametrize("template", prompts.TEMPLATES)
def test_templates_to_the_letter(qwen, template):
    assert prompt(qwen, template, "{x} Q?") == EXPECTED[template]


@pytest.mark.parametrize("template, content, starts", [
    ("none", "", 1), ("chat", "", 0), ("a.json", '[{"role": "user", "content": "{problem}"}]', 0),
    ("a.jinja", "{{ problem }}", 1), ("a.jinja", "<|pad|>{{ problem }}", 1)])
def test_the_start_token_is_written_once(tokenizer, tmp_path, template, content, starts):
    """By the tokenizer, unless a template does; a chat template may want none. A tokenizer that
    also appends its end token, as after fine-tuning, must not end the prompt with it."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token, first = "<|pad|>", tokenizer.convert_tokens_to_ids("<|pad|>")
    template = str(file(tmp_path, template, content)) if content else template
    for single in ("<|pad|> $A", "<|pad|> $A <|endoftext|>"):  # the second: add_eos_token
        tokenizer._tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[
            ("<|pad|>", first), ("<|endoftext|>", tokenizer.eos_token_id)])
        (made,) = add_prompts(asked("1+1=?"), tokenizer, template, 50)
        assert made.prompt_ids.count(first) == starts == (made.prompt_ids[0] == first)
        assert tokenizer.eos_token_id not in made.prompt_ids


# ------------------------------------------------------------------------------------------ files
def test_a_jinja_file_makes_the_whole_prompt(tokenizer, tmp_path):
    made = file(tmp_path, "mine.jinja", "Question: {{ problem }}\nAnswer:\n")
    for text in ("1+1=?", "{{ 7 * 7 }} {problem}"):
        assert prompt(tokenizer, made, text) == f"Question: {text}\nAnswer:"
    made = file(tmp_path, "marked.jinja", "\ufeff{{ problem }}")  # as some editors save it
    assert prompt(tokenizer, made) == "1+1=?"
    made = file(tmp_path, "dated.jinja", "{{ strftime_now('%d %b') }}: {{ problem }}")
    assert prompt(tokenizer, made) == "01 Jan: 1+1=?"  # on any day
    made = file(tmp_path, "chat.j2", QWEN)  # in the place of the model's own
    assert prompt(tokenizer, made) == chat(("user", "1+1=?"))


# ------------------------------------------------------------------------ the model's chat template
@pytest.mark.parametrize("template, words", [
    ("{% for x in %}", "TemplateSyntaxError"), ("{{ raise_exception('" + ESCAPE + "') }}", "owned"),
    ("{{ messages[0].content[:5] }}", "prompts of '1+1=?' and '1+1=?+1' are the same"),
    (None, "no chat template for chat: use --template none")])
def test_a_chat_template_that_fails_or_hides_the_problem_gets_one_sentence(
        tokenizer, template, words):
    tokenizer.chat_template = template
    with pytest.raises(SystemExit) as stop:
        add_prompts(asked("1+1=?", "1+1=?+1"), tokenizer, "chat", 50)
    assert words in str(stop.value) and "--template" in str(stop.value)
    assert str(stop.value).isprintable()


def test_a_turn_that_the_chat_template_leaves_out_is_named(qwen, capsys):
    prompt(qwen, "qwen25-math-cot")
    assert "WARNING" not in capsys.readouterr().out
    prompt(make.build_tokenizer(), "qwen25-math-cot")
    assert "leaves out a turn: 'Please reason step by step" in capsys.readouterr().out


def test_problems_that_differ_in_spaces_alone_may_have_one_prompt(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content | trim }}"
    assert len(add_prompts(asked("1+1=?", "1+1=? ", "1+1=?"), tokenizer, "chat", 50)) == 3


# ------------------------------------------------------------------------------ counted and shown
def test_over_long_prompts_are_dropped_and_lengths_reported(tokenizer, capsys):
    problems = asked("x" * 3, "x" * 10, "x" * 11)
    assert [len(p.prompt) for p in add_prompts(problems, tokenizer, "none", 10)] == [3, 10]
    assert capsys.readouterr().out.splitlines() == [
        "data: dropped 1 of 3 problems with a prompt over 10 tokens (longest: 11)",
        "data: 2 prompts of 3 to 10 tokens, median 6.5"]
    with pytest.raises(SystemExit, match="raise --max-prompt-tokens"):
        add_prompts(problems, tokenizer, "none", 2)


def test_stop_ids():
    vocabulary = {"<|endoftext|>": 7, "<|im_end|>": 5, "</s>": 2, "x": 1}
    qwen = SimpleNamespace(get_vocab=lambda: vocabulary, eos_token="</s>")
    assert stop_ids(qwen) == [2, 5, 7]
    assert stop_ids(SimpleNamespace(get_vocab=lambda: {"a": 0}, eos_token=None)) == []
    assert stop_ids(qwen, "</s>,x") == [1, 2]
