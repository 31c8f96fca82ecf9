"""Write train.jsonl and test.jsonl: prompts of three domains, math, code and chat.

    python experiments/smollm2/make_prompts.py --text DIR --out prompts/

DIR holds gsm8k_train.txt ("Q: .." and "A: .." blocks), gsm8k.jsonl, humaneval.jsonl and mt-bench.jsonl
({"turns": [..]} lines) and sgd_dev_dialogues.txt ("User: .." and "System: .." lines, a blank line between
dialogues). Code for training comes from the documented functions of Python's own standard library.
Nothing of the test prompts is among the training prompts.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
from pathlib import Path

import numpy as np

Conversation = list[dict[str, str]]
CHAT_TASKS = (
    "Write a short story about this situation: {}",
    "Give practical advice to someone who says: {}",
    "Write a polite email on behalf of someone who says: {}",
    "List the things to consider for this request: {}",
)


def ask(text: str) -> Conversation:
    return [{"role": "user", "content": text}]


def library_functions() -> list[str]:
    """Signature and docstring of the documented public functions of the standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and not node.name.startswith("_"):
                doc = ast.get_docstring(node) or ""
                head = f"def {node.name}({ast.unparse(node.args)}):"
                if 40 <= len(doc) <= 500:
                    found.append(f'{head}\n    """{doc}"""')
    return found


def dialogues(path: Path) -> list[Conversation]:
    """Each dialogue as messages; the last one is the user's."""
    roles = {"User": "user", "System": "assistant"}
    found = []
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        lines = [line.partition(": ") for line in block.strip().splitlines()]
        messages = [{"role": roles[who], "content": text} for who, _, text in lines if who in roles]
        if len(messages) > 2:
            found.append(messages)
    return found


def cut(dialogue: Conversation, rng: np.random.Generator) -> Conversation:
    """The dialogue up to one of its user's first turns."""
    turns = [i for i, message in enumerate(dialogue[:6]) if message["role"] == "user"]
    return dialogue[: int(rng.choice(turns)) + 1]


def turns(path: Path) -> list[Conversation]:
    return [ask(json.loads(line)["turns"][0]) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, groups: dict[str, list[Conversation]]) -> None:
    rows = [
        {"id": f"{domain}-{i}", "domain": domain, "messages": messages}
        for domain, conversations in groups.items()
        for i, messages in enumerate(conversations)
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=300, help="training prompts a domain")
    parser.add_argument("--test", type=int, default=90, help="test prompts a domain")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    args.out.mkdir(parents=True, exist_ok=True)

    suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    blocks = (args.text / "gsm8k_train.txt").read_text(encoding="utf-8").split("\n\n")
    questions = [b.partition("\nA: ")[0].removeprefix("Q: ") for b in blocks if b.startswith("Q: ")]
    math = [ask(questions[i] + suffix) for i in rng.permutation(len(questions))]

    functions = library_functions()
    shuffled = [functions[i] for i in rng.permutation(len(functions))]
    task = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n\n```"
    code = [ask(task.format(text)) for text in shuffled]
    held = args.test // 3

    talks = dialogues(args.text / "sgd_dev_dialogues.txt")
    talks = [talks[i] for i in rng.permutation(len(talks))]
    chat = [
        cut(talk, rng) if i % 3 == 0 else ask(CHAT_TASKS[i % len(CHAT_TASKS)].format(talk[0]["content"]))
        for i, talk in enumerate(talks[held:])
    ]

    def pick(conversations: list[Conversation], count: int) -> list[Conversation]:
        return [conversations[i] for i in rng.permutation(len(conversations))[:count]]

    write(args.out / "train.jsonl", {
        "math": math[: args.train], "code": code[held : held + args.train], "chat": chat[: args.train],
    })  # fmt: skip
    write(args.out / "test.jsonl", {
        "math": pick(turns(args.text / "gsm8k.jsonl"), args.test),
        "code": pick(turns(args.text / "humaneval.jsonl"), args.test - held) + code[:held],
        "chat": pick(turns(args.text / "mt-bench.jsonl"), args.test - held)
        + [cut(talk, rng) for talk in talks[:held]],
    })  # fmt: skip


if __name__ == "__main__":
    main()
