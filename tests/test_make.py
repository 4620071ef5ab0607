"""The recipe of the built-in models: its demonstrations and its tokens."""
import random
import shutil

import pytest

from models import make
from models.problems import chains
from parts.models import TINY, find_model, MODELS


def test_demonstrations_are_right_and_unseen_in_the_test_split():
    test, rng = {row["problem"] for row in chains("test", 500)}, random.Random(1)
    for i in range(1000):
        text, completion = make.worked_chain(rng, lazy=i % 2 == 0)
        *lines, last = completion.split("\n")
        assert text not in test and last == f"\\boxed{{{eval(text.removesuffix('=?'))}}}"
        assert all(eval(line.replace("=", "==")) for line in lines)


@pytest.mark.parametrize("name", TINY)
def test_prompts_are_cut_into_the_tokens_of_the_warm_start(name, tmp_path):
    """AutoTokenizer would not: it gives a Qwen2 its family's, which knows no two-digit token."""
    folder = shutil.copytree(str(MODELS / name), tmp_path / "copy")  # elsewhere, as an export is
    loaded, built = find_model(str(folder)).tokenizer, make.build_tokenizer()
    for text in ("7+15-4=?\n\\boxed{18}", "1230 apples, 5½ each", "x<|user|>10<|endoftext|>",
                 "Zoë paid 3½ € for π\t\x00"):
        assert loaded.encode(text) == built.encode(text)
        assert built.decode(built.encode(text)) == text
    assert len(built.encode("10+99")) == 3 and len(built) <= 384
    for tokenizer in (loaded, built):
        assert tokenizer.apply_chat_template(
            [dict(role="user", content="1+2=?")], add_generation_prompt=True,
            tokenize=False) == "<|user|>1+2=?<|assistant|>"
        assert (tokenizer.eos_token, tokenizer.pad_token) == (make.END, make.PAD)
