"""--template FILE and --system: the prompt is what the file says, or a sentence says why not."""

import json
import time

import pytest

from parts import prompts
from parts.data import Problem
from parts.prompts import add_prompts, needs_start, show_prompts

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer():
    from parts import tiny

    return tiny.build_tokenizer()  # its own chat template leaves system turns out


@pytest.fixture
def qwen(tokenizer):
    tokenizer.chat_template = QWEN
    return tokenizer


def prompt(tokenizer, template, system="", text="1+1=?"):
    (made,) = add_prompts([Problem(text, "2", "i", "s")], tokenizer, str(template), 700, system)
    assert tokenizer.decode(made.prompt_ids) == made.prompt
    return made.prompt


def file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_jinja_file_makes_the_whole_prompt(tokenizer, tmp_path):
    made = file(tmp_path, "mine.jinja", "Question: {{ problem }}\nAnswer:\n")
    assert prompt(tokenizer, made) == "Question: 1+1=?\nAnswer:"
    assert (
        prompt(tokenizer, made, text="{{ 7 * 7 }} {problem}")
        == "Question: {{ 7 * 7 }} {problem}\nAnswer:"
    )
    made = file(tmp_path, "both.j2", "{{ system }}|{{ problem }}")
    assert prompt(tokenizer, made, "Be brief.") == "Be brief.|1+1=?"


def test_a_chat_template_from_a_file_takes_the_place_of_the_models_own(tokenizer, tmp_path):
    made = file(tmp_path, "chat.jinja", QWEN)
    assert prompt(tokenizer, made, "Be brief.") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt(tokenizer, made).startswith("<|im_start|>user\n1+1=?")


def test_turns_from_a_file_go_through_the_models_chat_template(qwen, tmp_path):
    turns = [
        dict(role="system", content="Be kind."),
        dict(role="user", content="Q"),
        dict(role="assistant", content="A"),
        dict(role="user", content="Now {problem}"),
    ]
    made = file(tmp_path, "turns.json", json.dumps(turns))
    body = (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nNow 1+1=?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt(qwen, made) == "<|im_start|>system\nBe kind.<|im_end|>\n" + body
    assert prompt(qwen, made, "Be brief.") == "<|im_start|>system\nBe brief.<|im_end|>\n" + body


@pytest.mark.parametrize("template", [name for name in prompts.TEMPLATES if name != "none"])
def test_a_system_turn_takes_the_place_of_every_named_templates_own(qwen, template):
    without = prompt(qwen, template).partition("<|im_start|>user")
    assert prompt(qwen, template, "Be brief.") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user" + without[2]
    )


def test_the_start_token_is_written_once(tokenizer, tmp_path):
    tokenizer.bos_token = "<|pad|>"
    assert needs_start(tokenizer, "none", "1") and not needs_start(tokenizer, "chat", "1")
    assert needs_start(tokenizer, "a.jinja", "1") and not needs_start(
        tokenizer, "a.jinja", "<|pad|>1"
    )
    assert not needs_start(tokenizer, "a.json", "1")
    tokenizer.bos_token = None
    assert needs_start(tokenizer, "a.jinja", "1")


@pytest.mark.parametrize(
    "name, text, system, sentence",
    [
        ("a.jinja", "{{ problem }", "", "a.jinja, line 1 cannot be rendered (TemplateSyntaxError"),
        ("a.jinja", "x\n{% for %}", "", "a.jinja, line 2 cannot be rendered"),
        ("a.jinja", "{{ problem.x.y }}", "", "UndefinedError"),
        ("a.jinja", "{{ raise_exception('no\x1b[2J') }}", "", "cannot be rendered"),
        ("a.jinja", "{{ question }}", "", "does not show the problem: write {{ problem }} in it"),
        ("a.jinja", "{{ problem }}", "Be brief.", "--system has no effect: template"),
        ("none", None, "Be brief.", "--system has no effect: template none leaves it out"),
        (
            "chat",
            None,
            "Be brief.",
            "--system has no effect: the model's chat template leaves it out",
        ),
        ("missing.jinja", None, "", "cannot read"),
        ("missing.json", None, "", "cannot read"),
        ("missing", None, "", "no prompt template 'missing'; choose one of reinforce-ada"),
        ("a.txt", "{problem}", "", "or give a .jinja or .json file"),
        ("a.json", "{", "", "must be a list of turns"),
        ("a.json", "[1]", "", "must be a list of turns"),
        ("a.json", '[{"role": "user"}]', "", "must be a list of turns"),
        ("a.json", '[{"role": "user", "content": 3}]', "", "must be a list of turns"),
        ("a.json", '[{"role": "user", "content": "{question}"}]', "", "must be a list of turns"),
        ("a.json", "[" * 100_000, "", "must be a list of turns"),
        ("a.json", "{}", "", "must be a list of turns"),
    ],
)
def test_a_template_that_cannot_be_used_gets_one_sentence(
    tokenizer, tmp_path, monkeypatch, name, text, system, sentence
):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        file(tmp_path, name, text)
    with pytest.raises(SystemExit) as end:
        prompt(tokenizer, name, system)
    assert sentence in str(end.value) and str(end.value).isprintable()


def test_a_file_that_is_no_text_gets_one_sentence(tokenizer, tmp_path):
    (tmp_path / "a.jinja").write_bytes(b"\xff\xfe{{ problem }}")
    with pytest.raises(SystemExit, match="no text in UTF-8"):
        prompt(tokenizer, tmp_path / "a.jinja")


def test_a_file_cannot_run_code_and_must_end(tokenizer, tmp_path, monkeypatch):
    sly = file(tmp_path, "sly.jinja", "{{ problem }}{{ ''.__class__.__mro__ }}")
    with pytest.raises(SystemExit, match="cannot be rendered"):
        prompt(tokenizer, sly)
    monkeypatch.setattr(prompts, "RENDERING_SECONDS", (0.3, 0))
    loops = "".join(f"{{% for a{i} in range(99999) %}}" for i in range(3)) + "{% endfor %}" * 3
    start = time.monotonic()
    with pytest.raises(SystemExit, match="TimeoutError"):
        prompt(tokenizer, file(tmp_path, "long.jinja", "{{ problem }}" + loops))
    assert time.monotonic() - start < 10


def test_three_prompts_are_shown_and_a_long_one_without_its_middle(capsys):
    asked = [
        Problem("", "", str(i), "s", prompt=text)
        for i, text in enumerate(["a\nb", "x" * 300 + "y" * 700, "c", "d"])
    ]
    show_prompts(asked)
    head, first, second, third = capsys.readouterr().out.splitlines()
    assert (
        head == "3 of 4 prompts, as the model sees them:"
        and first == r"  'a\nb'"
        and third == "  'c'"
    )
    assert second == "  '" + "x" * 199 + " [... 602 characters ...] " + "y" * 199 + "'"
    show_prompts(asked[:1])
    assert "1 of 1 prompts" in capsys.readouterr().out
