"""Prompts from JSON lines, and what is refused about them."""

import json

import pytest

from specsim.drafters.prompts import prompt_tokens, read_prompts
from specsim.types import SpecsimError


@pytest.fixture
def read(tmp_path):
    """Read prompts from these lines, objects or text."""

    def call(*lines):
        path = tmp_path / "asked.jsonl"
        text = "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
        path.write_text(text, encoding="utf-8")
        return read_prompts(path)

    return call


def test_three_ways_to_ask_and_names_of_ones_own(read):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "why?"}]
    one, two, three = read(
        {"prompt": "what is 2+2?", "domain": "math", "id": 7},
        "",
        {"turns": ["first", "second"]},
        {"messages": messages},
    )
    assert (one.id, one.domain, one.messages) == ("7", "math", ({"role": "user", "content": "what is 2+2?"},))
    assert (two.id, two.domain, two.messages[0]["content"]) == ("asked-3", "asked", "first")
    assert list(three.messages) == messages


def test_a_line_may_hold_any_character(read):
    text = "one\u2028two\u0085three\x0bfour"
    assert read({"prompt": text}, {"prompt": "next"})[0].messages[0]["content"].startswith("one\u2028two\u0085three")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: expected a JSON object"),
        ("[1]", "line 1: expected a JSON object, got list"),
        ("[" * 100_000, "line 1: expected a JSON object"),
        ('{"prompt": ' + "1" * 5000 + "}", "line 1: expected a JSON object"),
        ({"prompt": " "}, "line 1: expected messages, turns or prompt with text"),
        ({"messages": [{"role": "user", "content": ""}]}, "line 1: messages: expected one with text"),
        ({"messages": [{"role": "user"}]}, "line 1: messages: expected a list"),
        ({"prompt": "a", "domain": 3}, "line 1: domain: expected text, got 3"),
        ({"prompt": "a", "domain": "all"}, "line 1: domain: 'all' is the name of the total"),
        ({"prompt": "a", "id": None}, "line 1: id: expected text or a number, got None"),
        ({"prompt": "a", "id": {}}, "line 1: id: expected text or a number, got {}"),
        ('{"prompt": "a\\ud800"}', "line 1: expected Unicode text"),
    ],
)
def test_mistakes_name_the_line(read, line, words):
    with pytest.raises(SpecsimError, match=r"asked\.jsonl") as caught:
        read(line)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_id_stands_once_and_a_file_is_not_empty(read):
    with pytest.raises(SpecsimError, match="'x' twice"):
        read({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"})
    with pytest.raises(SpecsimError, match="at least one prompt"):
        read("")


class Template:
    """A tokenizer with a chat template that wants a user to speak first."""

    chat_template = "strict"

    def apply_chat_template(self, messages, **_):
        if messages[0]["role"] != "user":
            raise ValueError("user first")
        return "".join(m["content"] for m in messages)

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": [ord(c) for c in text if c.isalpha()]})


def test_tokens_and_what_a_template_refuses(read):
    fine, system, nothing = read(
        {"prompt": "ab"}, {"messages": [{"role": "system", "content": "s"}], "id": "sys"}, {"prompt": "1", "id": "one"}
    )
    assert prompt_tokens(Template(), fine) == [97, 98]
    with pytest.raises(SpecsimError, match="prompt sys: the target's chat template refuses it: user first"):
        prompt_tokens(Template(), system)
    with pytest.raises(SpecsimError, match=r"prompt one: .* got no token"):
        prompt_tokens(Template(), nothing)
