"""A prompt is exactly what the template says, or one sentence says why there is none."""
import json
import shutil
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from models import make
from parts import prompts
from parts.data import Problem
from parts.models import find_model, MODELS

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
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


def asked(tokenizer, template, *texts, longest=700):
    """The problems with these texts and their prompts."""
    problems = [Problem(text, "2", text, f"s{len(text) % 2}") for text in texts]
    model = SimpleNamespace(tokenizer=tokenizer, embedded=384)
    return prompts.add_prompts(problems, model, str(template), longest)


def file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def chat(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + (
        "<|im_start|>assistant\n")


# -------------------------------------------------------------------------------- named templates
Q = " {x} Q:\nA: "  # white space reaches the model, too
EXPECTED = {
    "reinforce-ada": chat(("system", BOXED), ("user", Q + " " + STEPS)),
    "qwen25-math-cot": chat(("system", BOXED), ("user", Q)),
    "qwen-boxed": chat(("system", "You are a helpful assistant."), ("user", Q + "\n" + BOXED)),
    "llama": chat(("user", Q + "\n" + BOXED + "\n\n")),
    "three-examples": chat(*prompts.TEMPLATES["three-examples"][:-1], ("user", Q)),
    "chat": chat(("user", Q)),
    "none": Q,
}


@pytest.mark.parametrize("template", prompts.TEMPLATES)
def test_templates_to_the_letter(qwen, template):
    (made,) = asked(qwen, template, Q)
    assert made.prompt == EXPECTED[template] == qwen.decode(made.prompt_ids)


@pytest.mark.parametrize("template, content, starts", [
    ("none", "", 1), ("chat", "", 0), ("a.json", '[{"role": "user", "content": "{problem}"}]', 0),
    ("a.jinja", "{{ problem }}", 1), ("a.jinja", "<|pad|>{{ problem }}", 1)])
def test_the_start_token_is_written_once(tokenizer, tmp_path, template, content, starts):
    """By the tokenizer, unless a template does; a chat template may want none. A tokenizer that
    also appends its end token, as after fine-tuning, must not end the prompt with it."""
    tokenizer.bos_token, first = "<|pad|>", tokenizer.convert_tokens_to_ids("<|pad|>")
    template = str(file(tmp_path, template, content)) if content else template
    for single in ("<|pad|> $A", "<|pad|> $A <|endoftext|>"):  # the second: add_eos_token
        tokenizer._tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[
            ("<|pad|>", first), ("<|endoftext|>", tokenizer.eos_token_id)])
        (made,) = asked(tokenizer, template, "1+1=?")
        assert made.prompt_ids.count(first) == starts == (made.prompt_ids[0] == first)
        assert tokenizer.eos_token_id not in made.prompt_ids


# ------------------------------------------------------------------------------------------ files
@pytest.mark.parametrize("name, source, expected", [
    ("mine.jinja", "Question: {{ problem }}\nAnswer:\n", "Question: {}\nAnswer:\n"),
    ("ends.jinja", "{{ problem }}\n<think>\n\n", "{}\n<think>\n\n"),  # models were trained on it
    ("block.jinja", "{% if problem %}{{ problem }}{% endif %}\n", "{}"),  # as after every block
    ("cut.jinja", "{{ problem }}\n{#- no newline #}\n", "{}"),
    ("marked.jinja", "\ufeff{{ problem }}", "{}"),  # as some editors save it
    # docs/data.md puts such a line before a chat template, which may look for it
    ("off.jinja", "{% set enable_thinking = false %}{{ problem }}"
     "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
     "{}<think></think>"),
    ("dated.jinja", "{{ strftime_now('%d %b') }}: {{ problem }}", "01 Jan: {}"),  # on any day
    ("chat.jinja", QWEN, chat(("user", "{}")))])  # instead of the model's own
def test_a_jinja_file_makes_the_whole_prompt(tokenizer, tmp_path, name, source, expected):
    template = file(tmp_path, name, source)
    texts = ["1+1=?", "{{ 7 * 7 }} {problem}"]
    prompts = [made.prompt for made in asked(tokenizer, template, *texts)]
    assert prompts == [expected.replace("{}", text) for text in texts]


def test_a_file_without_turns_gets_one_sentence(tmp_path):
    for content in ("{", '{"role": "user"}', '[{"role": "user"}]', "[1]"):
        with pytest.raises(SystemExit, match="^--template cannot read .*a.json .*: it takes reinf"):
            prompts.read_template(str(file(tmp_path, "a.json", content)))


# ------------------------------------------------------------------------ the model's chat template
@pytest.mark.parametrize("template, words", [
    ("{{ raise_exception('" + ESCAPE + "') }}", "owned"),
    ("{{ question }}", "does not show the problem")])
def test_a_chat_template_that_fails_or_hides_the_problem_gets_one_sentence(
        tokenizer, template, words):
    tokenizer.chat_template = template
    with pytest.raises(SystemExit, match=f"--template chat .*{words}") as stop:
        asked(tokenizer, "chat", "1+1=?", "1+2=?")
    assert str(stop.value).isprintable()


# ------------------------------------------------------------------------------ counted and shown
def test_prompts_are_tokenized_in_slices_and_are_the_same(tokenizer, monkeypatch):
    """A tokenizer needs 12 kB for each prompt of one call, and 300,000 of them took 4.7 GB."""
    texts, calls, call = [f"{i}+1=?" for i in range(10)], [], type(tokenizer).__call__
    whole = asked(tokenizer, "chat", *texts)
    monkeypatch.setattr(type(tokenizer), "__call__", lambda self, some, **how: (
        calls.append(len(some)) or call(self, some, **how)))
    for size, sizes in ((3, [3, 3, 3, 1]), (5, [5, 5])):
        calls.clear()
        monkeypatch.setattr(prompts, "SLICE", size)
        assert asked(tokenizer, "chat", *texts) == whole and calls == sizes


def test_control_tokens_of_the_model_are_counted(tokenizer, capsys):
    texts = "1+1=?", "1<|endoftext|>", "<|im_end|>", "<|pad|>?" + ESCAPE
    asked(tokenizer, "chat", *texts)  # <|im_end|> is none of this model
    said = capsys.readouterr().out
    assert "WARNING: 2 problems with control tokens of the model, such as '1<|endoftext|>'" in said
    assert said.replace("\n", "").isprintable()


def test_over_long_prompts_are_dropped_and_counted(tokenizer, capsys):
    texts = "x" * 3, "x" * 10, "x" * 11
    assert [len(p.prompt) for p in asked(tokenizer, "none", *texts, longest=10)] == [3, 10]
    assert capsys.readouterr().out == (
        "data: dropped 1 of 3 problems with a prompt over 10 tokens (longest: 11)\n")
    for longest in (2, 5):  # with 5, only one of the two sets is gone
        with pytest.raises(SystemExit, match=f"^Every prompt of s0 is over {longest} tokens: rais"):
            asked(tokenizer, "none", *texts, longest=longest)


# -------------------------------------------------------------------------- the end of an answer
PHI = ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
       "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}")
GEMMA = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
         "{% endif %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
         "{% endfor %}")
MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
           "[/INST]{% else %}{{ m.content }} </s>{% endif %}{% endfor %}")
GRANITE = ("{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
           "<|end_of_turn|>\n{% endfor %}")
# eos_token and pad_token; what generation_config.json and config.json name; all tokens that are
# there; the chat template; the tokens that end an answer
LAYOUTS = {
    "Phi-3.5": ("<|endoftext|>", "<|endoftext|>", ["<|end|>", "<|assistant|>", "<|endoftext|>"],
                "<|endoftext|>", "<unk> <|endoftext|> <|assistant|> <|end|> <|user|>", PHI,
                "<|endoftext|> <|assistant|> <|end|>"),
    "Gemma-it": ("<eos>", "<pad>", ["<eos>", "<end_of_turn>"], "<eos>",
                 "<pad> <eos> <bos> <start_of_turn> <end_of_turn>", GEMMA, "<eos> <end_of_turn>"),
    "Qwen2.5-Math": ("<|endoftext|>", "<|endoftext|>", "<|endoftext|>", "<|endoftext|>",
                     "<|endoftext|> <|im_start|> <|im_end|>", QWEN, "<|endoftext|> <|im_end|>"),
    "Mistral": ("</s>", "[PAD]", None, "</s>", "<s> </s> [INST] [/INST] [PAD]", MISTRAL, "</s>"),
    "Granite, base": ("<|end_of_text|>", "<|pad|>", None, None,  # an end that no file names
                      "<|end_of_text|> <|pad|> <|start_of_role|> <|end_of_role|> <|end_of_turn|> "
                      "<|end",  # with which the end of a turn begins
                      GRANITE, "<|end_of_text|> <|end_of_turn|>"),
    "names of today": ("<|end_of_text|>", "<|pad|>", None, None,
                       "<|end_of_text|> <|pad|> <|im_end|> <|endoftext|> <|eot_id|>",
                       "{{ messages[-1].content }}",  # it writes no end
                       "<|end_of_text|> <|im_end|> <|endoftext|> <|eot_id|>"),
}


def model_with(folder, eos, pad, generation, config, there, chat_template):
    """The built-in model in `folder`, with other special tokens and a chat template."""
    shutil.copytree(str(MODELS / "tiny"), folder)
    stored = json.loads((folder / "tokenizer.json").read_text()) | dict(added_tokens=[])
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    words.add_tokens([AddedToken(token, special=True) for token in there.split()])
    words.eos_token, words.pad_token, words.chat_template = eos, pad, chat_template
    words.save_pretrained(folder)
    for file, ends in (("generation_config.json", generation), ("config.json", config)):
        stored = json.loads((folder / file).read_text()) | dict(
            eos_token_id=words.convert_tokens_to_ids(ends) if ends else None)
        (folder / file).write_text(json.dumps(stored))
    if generation is None:
        (folder / "generation_config.json").unlink()
    return find_model(str(folder))


def ends_of(model, template="chat", more="") -> set[str]:
    ids = prompts.stop_ids(model, template, more)
    assert ids == sorted({*ids})
    return {*model.tokenizer.convert_ids_to_tokens(ids)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_answer_ends_at_every_token_that_a_model_ends_its_turns_with(layout, tmp_path):
    """And at no other, such as the padding token: an answer would be cut off there."""
    *files, ends = LAYOUTS[layout]
    assert ends_of(model_with(tmp_path / "model", *files)) == {*ends.split()}


def test_the_template_in_use_decides_which_turn_is_meant(tmp_path):
    model = model_with(tmp_path / "model", *LAYOUTS["Granite, base"][:-1])
    for template, source, end in (
            ("none", "", ""), ("chat", "", "<|end_of_turn|>"),
            ("1.jinja", "<|pad|>{{ problem }}", ""),  # it has no assistant's turn
            ("2.jinja", "{{ row.choices.first }}{{ messages[0].content }}", ""),  # nor this one
            ("3.jinja", "{% for m in messages %}{{ m.content }}\n<|pad|>{% endfor %}", "<|pad|>"),
            ("4.jinja", "{% for m in messages %}{{ m.content }}\n### {% endfor %}", "")):
        template = str(file(tmp_path, template, source)) if source else template
        assert ends_of(model, template) == {"<|end_of_text|>", *end.split()}, template


def test_stop_adds_tokens_and_names_the_known_ends_where_there_is_no_such_token(tmp_path):
    model = model_with(tmp_path / "model", *LAYOUTS["Gemma-it"][:-1])
    more = "<start_of_turn>,?"
    assert ends_of(model, more=more) == {"<eos>", "<end_of_turn>", *more.split(",")}
    for odd in ("<nothing>", "<eos>,\x1b[2J"):
        with pytest.raises(SystemExit, match="--stop: .* known ends: <eos>, <end_of_turn>") as stop:
            prompts.stop_ids(model, "chat", odd)
        assert str(stop.value).isprintable()


def test_the_known_ends_are_printed(tokenizer, tmp_path, capsys):
    """One that the tokenizer does not have is shown as a number. A model with several modalities
    names the ends of its text model, too."""
    (tmp_path / "config.json").write_text(
        json.dumps(dict(eos_token_id=383, text_config=dict(eos_token_id=[0, 382]))))
    end = tokenizer.eos_token_id
    for rows, ends, words in ((384, [0, end, 382, 383], "!, <|endoftext|>, 382, 383"),
                              (0, [], "no token, so name one with --stop TOKEN")):
        model = SimpleNamespace(tokenizer=tokenizer, embedded=rows, folder=tmp_path)
        assert prompts.stop_ids(model, "none") == ends
        assert capsys.readouterr().out == f"an answer ends at {words}\n"


# -------------------------------------------------------------------------- beyond the embedding
def test_a_prompt_with_a_token_beyond_the_embedding_is_refused(tmp_path):
    """A tokenizer with more tokens than the model is fine, if none of them is in a prompt."""
    model = model_with(tmp_path / "model", *LAYOUTS["Qwen2.5-Math"][:-1])
    words = model.tokenizer
    words.add_tokens([AddedToken(f"<{i}>", special=True) for i in range(40)])
    words.eos_token, first = "<39>", words.convert_ids_to_tokens(384)  # the model has 384 rows
    assert words.convert_tokens_to_ids("<39>") > 384
    assert ends_of(model) == {"<|endoftext|>", "<|im_end|>"}
    asked(words, "chat", "1+1=?")
    with pytest.raises(SystemExit, match=f"token {first} .* has 384 rows") as stop:
        asked(words, "chat", "1+1=?", f"{first}?")
    assert f"'{first}?'" in str(stop.value) and str(stop.value).isprintable()
