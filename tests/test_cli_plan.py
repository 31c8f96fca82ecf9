"""specsim plan: what it prints and writes, and one line for each mistake."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import mistake

ROOT = Path(__file__).parents[1]
PROFILE = str(ROOT / "hw_profiles/dsv4-flash-b300-tp4.json")
TRACE = str(ROOT / "traces/qwen3-4b-dspark.json")
BASE = ("--profile", PROFILE, "--trace", TRACE, "--gamma", "3", "--max-num-batched-tokens", "1024")
QWEN = ("--profile", str(ROOT / "hw_profiles/h200-qwen3-8b-tp1-vllm.json"), *BASE[2:])
TIER = ("--tier", "pro: interactivity>=120@p50, share=0.5", "--tier", "std: interactivity>=80@p50, ttft<=1s")
SMALL = ("--num-requests", "30", "--prompt-tokens", "32", "--output-tokens", "24", "--seeds", "2", "--jobs", "1")
Run = Callable[..., tuple[int, str, str]]


def test_plan_prints_and_writes(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, text, _ = run(
        "plan", *BASE, *SMALL, *TIER, "--users", "400", "-s", "NoSpec", "-s", "DSparkAsync", "--gpu-price", "6",
        "--json", file,
    )  # fmt: skip
    assert code == 0
    data = json.loads(file.read_text())
    assert data["schema"] == "specsim.plan/1"
    assert [t["name"] for t in data["tiers"]] == ["pro", "std"]
    assert len(data["offers"]) == 4
    assert len(data["sensitivity"]) == 12
    for tier in data["tiers"]:
        assert tier["words"] in text
        assert tier["words"].startswith(f"{tier['decision']}\nFor ")
    for line in data["leaders_words"]:
        assert line in text
    assert "50 % of 400 users" in text
    assert "$/M tokens" in text
    assert "If something is 10 % off" in text
    assert data["total"]["words"] in text
    assert data["total"]["dollars_per_hour"] == 6 * data["gpus"] == 6 * data["total"]["gpus"]
    again = tmp_path / "again.json"
    command = ("plan", *BASE, *SMALL, *TIER, "--users", "400", "-s", "NoSpec", "-s", "DSparkAsync", "--gpu-price", "6")
    code, _, _ = run(*command, "--json", again)
    assert json.loads(again.read_text()) | {"command": ""} == data | {"command": ""}


def test_plan_of_a_rate_on_a_shared_pool(run: Run) -> None:
    code, text, _ = run(
        "plan", *BASE, *SMALL, *TIER, "--rate", "50", "--shared", "--headroom", "0", "--no-sensitivity",
        "-s", "StaticGamma(2)",
    )  # fmt: skip
    assert code == 0
    assert "pro + std" in text
    assert "requests/s a replica" in text
    assert "\nFor 50 requests/s: a replica sustains " in text
    assert "10 % off" not in text


def test_what_is_offered_unasked_can_be_asked_for(run: Run, tmp_path: Path) -> None:
    """MTP1 on the first token of the drafter's blocks, which costs less than blocks of three, of which it takes one."""
    loads, spelled = {}, ("-s", f"MTP1@{TRACE}:1", "-s", "StaticGamma(1)")
    for name, more in (("unasked", ()), ("asked", spelled)):
        file = tmp_path / name
        asked = ("plan", *BASE, *SMALL, "--users", "50", "--tier", "a: interactivity>=100@p10", "--no-sensitivity")
        assert run(*asked, *more, "--json", file)[0] == 0
        loads[name] = {offer["policy"]: offer["load"] for offer in json.loads(file.read_text())["offers"]}
    first = "MTP1()@qwen3-4b-dspark:1"
    assert loads["asked"].keys() == {first, "StaticGamma(1)"}
    assert loads["unasked"][first] == loads["asked"][first] > loads["asked"]["StaticGamma(1)"]


def test_a_tier_that_nothing_keeps_ends_with_1(run: Run, tmp_path: Path) -> None:
    tiers = ("--tier", "a: interactivity>=1e5", "--tier", "b: interactivity>=80")
    several = ("--profile", PROFILE, *QWEN, *SMALL, "--users", "50", "-s", "NoSpec")
    code, text, _ = run("plan", *several, *tiers, "--drafter-bytes", "1e9", "--json", tmp_path / "a.json")
    assert code == 1
    assert json.loads((tmp_path / "a.json").read_text())["total"]["left_out"] == ["a"]
    assert ", without a, which no scheduler keeps." in text
    moves = text.partition("If something is 10 % off\n")[2] or text.rpartition("If something is 10 % off")[2]
    assert [h.strip() for h in moves.split("\n")[2].split("  ") if h][:4] == [
        "tier",
        "what is off",
        "profile",
        "best then",
    ]
    assert "none" not in moves
    assert "of different models (DeepSeek-V4-Flash, Qwen/Qwen3-8B)" in text
    assert "the drafter's memory has no effect on dsv4-flash-b300-tp4" in text


def test_check_acceptance_needs_no_plan(run: Run, tmp_path: Path, write: Callable[..., Path]) -> None:
    code, text, _ = run("plan", "--check-acceptance", TRACE, "--json", tmp_path / "a.json")
    assert code == 0
    assert "within the 3.51 to 5.56 published for DSpark" in text
    assert json.loads((tmp_path / "a.json").read_text())["acceptance"]["kinds"] == ["DSpark"]
    counters = "".join(
        f'vllm:spec_decode_num_{name}{{model_name="m"{more}}} {value}\n'
        for name, more, value in (
            ("drafts_total", "", 1000.0),
            ("draft_tokens_total", "", 2000.0),
            ("accepted_tokens_total", "", 600.0),
            ("accepted_tokens_per_pos_total", ',position="0"', 400.0),
            ("accepted_tokens_per_pos_total", ',position="1"', 200.0),
        )
    )
    code, text, _ = run("plan", "--check-acceptance", write(counters, "metrics.txt"))
    assert code == 0
    assert "1.60 tokens a block of 2 drafted whole, bonus token included, below the" in text


def test_the_help_tells_what_is_needed_and_what_is_usual(run: Run) -> None:
    code, text, _ = run("plan", "--help")
    assert code == 0
    words = " ".join("".join(c for c in text if c not in "│╭╰─╮╯").split())
    for told in (
        "A plan needs this or --users",
        "A plan needs one; repeatable",
        "default: p10 of interactivity",
        "--max-num-seqs",
    ):
        assert told in words


def test_check_gamma(run: Run) -> None:
    code, text, _ = run("plan", *BASE, *SMALL, "--check-gamma", "4", "--drafter-bytes", "1e18")
    assert code == 0
    assert "the drafter's memory has no effect on dsv4-flash-b300-tp4" in text
    assert "At 4 users a replica, γ = 3 is the best fixed length" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--tier: expected at least one"),
        (TIER, "--profile: expected a hardware profile"),
        ((*BASE, *TIER), "demand: expected either --rate (requests/s) or --users"),
        ((*BASE, *TIER, "--rate", "5", "--users", "5"), "demand: expected either --rate"),
        ((*BASE, *TIER, "--rate", "-5"), "--rate: expected a number above 0, at most 1e+12, got -5"),
        ((*BASE, *TIER, "--rate", "1e300"), "--rate: expected a number above 0, at most 1e+12, got 1e+300"),
        ((*BASE, *TIER, "--users", "1" + 400 * "0"), "--users: expected a number above 0, at most 1e+12, got 1e+300"),
        ((*BASE, "--users", "5", "--tier", "pro: fast"), "expected a bound such as"),
        ((*BASE, *TIER, "--users", "5", "--headroom", "much"), "--headroom: expected a share like 0.2 or 20%"),
        ((*BASE, *TIER, "--users", "5", "--headroom", "20"), "--headroom: expected a share like 0.2 or 20%"),
        ((*BASE, *TIER, "--users", "5", "--headroom", "2000%"), "(at most 1000%), got 2000%"),
        (
            (*QWEN, *TIER, "--users", "5", "--drafter-bytes", "1e18"),
            "--drafter-bytes: drafter qwen3-4b-dspark: weights",
        ),
        ((*BASE, *TIER, "--users", "5", "--gpu-price", "0"), "gpu_price: expected dollars above 0"),
        ((*BASE, *TIER, "--rate", "5", "--think", "1"), "--think: has no meaning with --rate"),
        ((*BASE, *TIER, "--users", "5", "--cv", "2"), "--cv: has no meaning with --users"),
        ((*BASE, *TIER, "--users", "5", "--replicas", "2"), "--replicas"),
        ((*BASE, *TIER, "--users", "5", "--closed", "2"), "--closed"),
        ((*BASE, *TIER, "--users", "5", "--drafter-bytes", "-1"), "--drafter-bytes: expected bytes, 0 or more"),
        ((*BASE[:2], *TIER, "--users", "5", "--drafter-bytes", "1"), "--drafter-bytes: has no meaning without --trace"),
        ((*BASE, *TIER, "--users", "5", "--arrivals", "x.csv"), "--arrivals: expected --rate"),
        ((*BASE, "--check-gamma", "1.5"), "--check-gamma: expected a whole number above 0, got 1.5"),
        ((*BASE[:2], "--check-gamma", "4"), "expected a scenario with a drafter (--trace)"),
        ((*BASE, "--check-gamma", "1e6"), "--check-gamma: expected at most 1,024 users, as --max-num-seqs allows, got"),
        ((*BASE, "--check-gamma", "1e6", "--rate", "1"), "--check-gamma: expected at most 262,144 requests/s"),
        ((*BASE, "--check-gamma", "4", "--users", "4"), "--users: has no meaning with --check-gamma alone"),
        ((*BASE, "--check-gamma", "4", "-s", "NoSpec"), "--scheduler: has no meaning with --check-gamma alone"),
        ((*BASE, "--check-gamma", "4", "--gpu-price", "6"), "--gpu-price: has no meaning with --check-gamma"),
        ((*BASE, "--check-gamma", "4", "--headroom", "6%"), "--headroom: has no meaning with --check-gamma"),
        ((*BASE, "--check-gamma", "4", "--no-sensitivity"), "--no-sensitivity: has no meaning with --check-gamma"),
        ((*BASE, "--check-gamma", "4", "--shared"), "--shared: has no meaning with --check-gamma"),
        ((*BASE, "--check-gamma", "4", *QWEN[:2]), "--profile: expected one with --check-gamma alone"),
        (("--check-acceptance", TRACE, "--shared"), "--shared: has no meaning with --check-acceptance alone"),
        (("--check-acceptance", TRACE, *BASE[:2]), "--profile: has no meaning with --check-acceptance alone"),
        (("--check-acceptance", "none.json"), "none.json: cannot read"),
    ],
)
def test_mistakes(run: Run, arguments: tuple[str, ...], words: str) -> None:
    assert words in mistake(run, "plan", *arguments)


def test_nothing_is_written_over_an_input(run: Run) -> None:
    assert "--json" in mistake(run, "plan", *BASE, *TIER, "--users", "5", "--json", TRACE)
