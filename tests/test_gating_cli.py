"""specsim baseline and compare as CI runs them: exit codes, summaries, and one line for each mistake."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from pages import section

from specsim.baseline import FLOORS, read_baseline
from specsim.cli import gating_report
from specsim.compare import LOSS, TOLERANCES, Change, Comparison

ROOT = Path(__file__).parents[1]
PROFILE = ROOT / "hw_profiles/dsv4-flash-b300-tp4.json"
TRACE = ROOT / "traces/qwen3-4b-dspark.json"
LOAD = ("--closed", "2,8", "--num-requests", "30", "--output-tokens", "24", "--seeds", "3", "--jobs", "1")

Run = Callable[..., tuple[int, str, str]]


def mistake(run: Run, *arguments: object) -> str:
    """Run, expecting exit code 2, nothing on stdout and one line on stderr; return that line."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def write(run: Run, path: Path, *arguments: object, profile: Path = PROFILE) -> Path:
    code, _, err = run("baseline", "--profile", profile, "--trace", TRACE, *LOAD, *arguments, "--out", path)
    assert code == 0, err
    return path


@pytest.fixture(scope="module")
def slow_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile with verify seconds × 1.031, under the same name."""
    data = json.loads(PROFILE.read_text())
    data["verify"]["seconds"] = [1.031 * s for s in data["verify"]["seconds"]]
    path = tmp_path_factory.mktemp("slow") / PROFILE.name
    path.write_text(json.dumps(data))
    return path


def test_a_slower_engine_fails_and_every_report_says_so(run: Run, tmp_path: Path, slow_profile: Path) -> None:
    schedulers = ("-s", "NoSpec", "-s", "DSparkAsync", "--sla", "50,100,100000")
    base = write(run, tmp_path / "base.json", *schedulers)
    again = write(run, tmp_path / "again.json", *schedulers)
    made = read_baseline(base)
    assert made.model_copy(update={"command": ""}) == read_baseline(again).model_copy(update={"command": ""})
    assert (made.seeds, made.policies, made.floors) == ([0, 1, 2], ["NoSpec()", "DSparkAsync()"], [50, 100, 100000])
    assert [i.name for i in made.inputs] == [PROFILE.name, TRACE.name]
    assert base.stat().st_size < 10_000

    code, text, err = run("compare", base, again)
    assert (code, err) == (0, "")
    assert "Passed: the same" in text
    why = "not read for any policy: in BASE no load measured has 1e+05 or more"
    assert text.count("note: ") == text.count(f"note: throughput at ≥ 100000 tok/s/user: {why}") == 1
    told = "tok/s ≥ 50: throughput at 50 tok/s/user or more; speed at 50 %: tok/s/user at 50 % of BASE's greatest"
    assert told in " ".join(text.split())  # the key is of this table's own columns
    assert "regression" not in text.partition("± half")[0]

    new = write(run, tmp_path / "new.json", *schedulers, profile=slow_profile)
    out = {name: tmp_path / "deep" / name for name in ("s.md", "r.xml", "f.png", "c.json")}
    code, text, err = run(
        "compare", base, new, "--markdown", out["s.md"], "--junit", out["r.xml"], "--picture", out["f.png"],
        "--json", out["c.json"],
    )  # fmt: skip
    assert code == 1
    assert "▼ −3.0 ± 0.0" in text
    assert f"--profile {PROFILE.name}: its content differs" in text
    worse = err.splitlines()
    losses = [line for line in worse if line.startswith("regression: ")]
    assert [line[:42] for line in worse if line not in losses] == ["undecided: DSparkAsync(): hypervolume: 99,"]
    assert any(re.match(r"regression: NoSpec\(\): hypervolume: .* −\d\.\d", line) for line in worse)
    assert any("DSparkAsync()" in line for line in worse)

    data = json.loads(out["c.json"].read_text())
    assert data["failed"]
    assert data["paired"]
    assert sum(c["verdict"] == LOSS for c in data["changes"]) == len(losses)
    nospec = next(c for c in data["changes"] if c["metric"] == "hypervolume")
    assert nospec["half"] == 0.0

    suite = ElementTree.fromstring(out["r.xml"].read_text())[0]
    assert int(suite.attrib["tests"]) == len(suite.findall("testcase")) == 2 * (3 + 2 + 1 + 2)
    assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure")) == len(worse)
    assert int(suite.attrib["skipped"]) == len(suite.findall("testcase/skipped")) == 2

    summary = out["s.md"].read_text()
    assert summary.startswith("### ❌ specsim compare\n")
    assert "| `DSparkAsync()` | " in summary
    rows = [line for line in summary.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    assert out["f.png"].read_bytes().startswith(b"\x89PNG")
    pictures = {out["f.png"].read_bytes()}
    run("compare", base, new, "--picture", out["f.png"])
    assert {out["f.png"].read_bytes()} == pictures

    allowed = [f"--tolerance={metric}=8%" for metric in ("throughput", "interactivity", "hypervolume")]
    code, text, err = run("compare", base, new, *allowed)
    assert (code, err) == (0, "")
    hidden = "warning: in 1 number losses of up to 15 % would not be seen: run more seeds (8, say)"
    assert text.startswith(f"{hidden}\nnote: --profile ")


def test_a_scheduler_made_worse_fails_and_one_that_is_gone_too(run: Run, tmp_path: Path) -> None:
    def save(level: float) -> str:
        path = tmp_path / f"v{level}" / "mine.py"
        path.parent.mkdir()
        path.write_text(f"def mine(view):\n    return (view.survival >= {level}).sum(axis=1)\n")
        return f"{path}:mine"

    base = write(run, tmp_path / "base.json", "-s", save(0.3), "-s", "NoSpec")
    worse = write(run, tmp_path / "worse.json", "-s", save(0.95), "-s", "NoSpec")
    code, text, err = run("compare", base, worse)
    assert code == 1
    assert "--scheduler mine.py: its content differs" in text
    assert err.startswith("regression: mine: ")
    assert "NoSpec" not in err
    gone = write(run, tmp_path / "gone.json", "-s", "NoSpec")
    code, text, err = run("compare", base, gone, "--junit", tmp_path / "r.xml")
    assert (code, err) == (1, "gone: mine is in BASE and not in NEW\n")
    assert "Failed: 1 gone" in text
    assert ElementTree.parse(tmp_path / "r.xml").find(".//failure").attrib["type"] == "gone"
    code, text, err = run("compare", gone, base)
    assert (code, err) == (0, "")
    assert "note: mine is new" in text


def test_other_seeds_are_compared_as_independent(run: Run, tmp_path: Path) -> None:
    base = write(run, tmp_path / "base.json", "-s", "DSparkAsync", "--seeds", "4")
    other = write(run, tmp_path / "other.json", "-s", "DSparkAsync", "--seeds", "4", "--first-seed", "10")
    code, text, _ = run("compare", base, other, *[f"--tolerance={m}=99%" for m in TOLERANCES])
    assert code == 0
    assert "seeds 0-3 in BASE, 10-13 in NEW: compared as independent samples" in text
    assert "4 seeds, independent" in text


def test_one_scenario_file_serves_the_verbs_that_sweep(run: Run, tmp_path: Path) -> None:
    file, out = tmp_path / "s.toml", tmp_path / "out"
    few = f'trace = "{TRACE}"\nclosed = [2]\nnum_requests = 20\noutput_tokens = 16\njobs = 1\nseeds = 2\n'
    file.write_text(f'profile = "{PROFILE}"\n{few}sla = [50, 80]\nbase = "NoSpec()"\n')
    for verb, path in (("sweep", out), ("pareto", out), ("baseline", tmp_path / "b.json"), ("report", out / "r.html")):
        assert run(verb, "--scenario", file, "--out", path)[::2] == (0, ""), verb
    assert read_baseline(tmp_path / "b.json").floors == [50, 80]
    file.write_text(file.read_text() + "slaa = 80\n")
    assert "slaa: not an option of specsim sweep" in mistake(run, "sweep", "--scenario", file)


def test_a_sweeps_folder_will_do(run: Run, tmp_path: Path) -> None:
    code, _, err = run(
        "sweep", "--profile", PROFILE, "--trace", TRACE, *LOAD, "-s", "NoSpec", "--out", tmp_path / "out"
    )
    assert code == 0, err
    base = write(run, tmp_path / "base.json", "-s", "NoSpec")
    for pair in ((base, tmp_path / "out"), (tmp_path / "out/results.parquet", base)):
        code, text, _ = run("compare", *pair)
        assert code == 0
        assert "Passed: the same" in text
        assert "note" not in text


def test_two_that_are_not_like_with_like_are_told_first(run: Run, tmp_path: Path) -> None:
    """A file against a sweep's folder of other hardware, and against other options: in every form."""
    other = ROOT / "hw_profiles/h200-qwen3-8b-tp1-vllm.json"
    base = write(run, tmp_path / "base.json", "-s", "NoSpec", "--gamma", "5")
    code, _, err = run(
        "pareto", "--profile", other, "--trace", TRACE, *LOAD, "-s", "NoSpec", "--gamma", "3", "--out", tmp_path / "o"
    )
    assert code == 0, err
    again = tmp_path / "again"  # drawn anew from the results, which keep what they were made from
    assert run("pareto", "--results", tmp_path / "o/results.parquet", "--out", again)[0] == 0
    assert read_baseline(again).floors == list(FLOORS)  # nobody said --sla
    for more, floors in ((("--sla", "90,200"), [90.0, 200.0]), ((), [90.0, 200.0])):
        assert run("pareto", "--results", again / "results.parquet", "--out", again, *more)[0] == 0
        assert read_baseline(again).floors == floors
    for folder in (tmp_path / "o", again):
        out = [tmp_path / name for name in ("s.md", "r.xml", "c.json", "p.png")]
        flags = [x for pair in zip(("--markdown", "--junit", "--json", "--picture"), out, strict=True) for x in pair]
        _, text, _ = run("compare", base, folder, *flags)
        lines = text.splitlines()
        warning = "warning: not like with like: --profile and --gamma differ between BASE and NEW"
        assert lines[:3] == [
            warning,
            f"note: --profile: {PROFILE.name} in BASE, {other.name} in NEW",
            "note: --gamma: 5 in BASE, 3 in NEW",
        ]
        assert lines[-1].endswith(" Not like with like: see the warning.")
        summary = out[0].read_text().splitlines()
        assert f"**{warning}**" in summary
        assert f"- --profile: {PROFILE.name} in BASE, {other.name} in NEW" in summary
        assert summary.index(f"**{warning}**") < 6
        assert warning in ElementTree.parse(out[1]).find(".//system-err").text
        assert json.loads(out[2].read_text())["unlike"] == ["--profile", "--gamma"]


def test_the_step_summary_of_a_workflow_is_appended_to(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ROOT / "experiments/baseline.json"
    summary = tmp_path / "summary.md"
    summary.write_text("### Another step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    for times in (1, 2):
        assert run("compare", base, base, "--markdown", summary)[0] == 0
        assert summary.read_text().startswith("### Another step\n\n### ✅ specsim compare\n")
        assert summary.read_text().count("### ✅") == times
    other = tmp_path / "other.md"
    for _ in range(2):
        assert run("compare", base, base, "--markdown", other)[0] == 0
        assert other.read_text().count("### ✅") == 1


def test_the_shipped_baseline_is_what_this_code_makes(run: Run, tmp_path: Path) -> None:
    """`make gate` with two of its seeds. If a change was meant, renew it: see the README."""
    shipped = ROOT / "experiments/baseline.json"
    assert shipped.stat().st_size < 60_000
    code, _, err = run(
        "baseline", "--scenario", ROOT / "experiments/gate.toml", "--seeds", "2", "--jobs", "1",
        "--out", tmp_path / "new.json",
    )  # fmt: skip
    assert code == 0, err
    code, text, err = run("compare", shipped, tmp_path / "new.json")
    assert (code, err) == (0, "")
    assert "Passed: the same" in text


def test_mistakes(run: Run, tmp_path: Path) -> None:
    good = ROOT / "experiments/baseline.json"
    old, half = tmp_path / "old.json", tmp_path / "half.json"
    old.write_text(good.read_text().replace("specsim.baseline/1", "specsim.baseline/0"))
    half.write_text(good.read_text()[:900])
    for arguments, words in (
        ((good, old), f"{old}: schema: 'specsim.baseline/0' is of another version"),
        ((half, good), f"{half}: expected JSON"),
        ((Path(__file__), good), ": not what specsim baseline wrote, or the results.parquet of specsim sweep"),
        ((good, PROFILE), "schema: expected 'specsim.baseline/1', got 'specsim.profile/1'"),
        ((good, tmp_path), "is a folder without results.parquet"),
        ((good, tmp_path / "results.parquet"), "results.parquet: cannot read: No such file or directory"),
        ((good, tmp_path / "none.json"), "none.json: cannot read"),
        ((good,), "NEW"),
        ((good, good, "--tolerance", "speed=1%"), "--tolerance: expected METRIC=SHARE, METRIC one of throughput"),
        ((good, good, "--tolerance", "tau"), "--tolerance: expected METRIC=SHARE"),
        ((good, good, "--tolerance", "tau=3"), "--tolerance tau: expected a share"),
        ((good, good, "--tolerance", "tau=3%", "--tolerance", "tau=off"), "--tolerance: tau is given twice"),
        ((good, good, "--tolerance", "tau=200%"), "--tolerance tau: expected less than 100%"),
        ((good, good, *[f"--tolerance={m}=off" for m in TOLERANCES]), "--tolerance: expected a metric that is not off"),
        ((good, good, "--markdown", "-"), "--markdown: expected a path, got '-'"),
        ((good, good, "--json", "-"), "--json: expected a path, got '-'"),
        ((good, good, "--level", "0"), "--level: expected a probability"),
        ((good, good, "--level", "100%"), "--level: expected a probability"),
        ((good, good, "--level", "1e-30"), "--level: expected a probability of 1e-06 or more"),
        ((good, good, "--sla", "fast"), "--sla: expected numbers"),
        ((good, good, "--interactivity", "p99"), "--interactivity: expected p50 or p10"),
        ((good, good, "--picture", tmp_path / "front.gif"), "--picture: expected .png or .svg"),
        ((good, good, "--json", good), "is the input BASE"),
        ((good, good, "--json", tmp_path / "x", "--junit", tmp_path / "x"), "is also written by"),
        ((good, good, "--markdown", ""), "--markdown: expected a file name"),
    ):
        assert words in mistake(run, "compare", *arguments)
    base = ("baseline", "--profile", PROFILE, "--closed", "2")
    assert "--out" in mistake(run, *base)
    assert "--seeds" in mistake(run, *base, "--seeds", "1", "--out", tmp_path / "b.json")
    assert "is the input --profile" in mistake(run, *base, "--out", PROFILE)
    assert "--sla: expected numbers" in mistake(run, *base, "--sla", "0", "--out", tmp_path / "b.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["half.json", "old.json"]


def test_from_where_on_a_loss_fails_is_told_with_its_reasons() -> None:
    change = Change("A()", "tau", "τ", 0.02, 3.0, 2.9, -1 / 30, 0.01, 0.068, 0.2, "noise")
    assert gating_report.told(change).endswith("−3.3 ± 1.0 %; fails beyond −6.8 % (tolerance 2 %, noise 6.8 %)")
    change = replace(change, noise=0.004, metric="verified_tokens")
    assert gating_report.told(change).endswith("; fails beyond ±2 % (tolerance 2 %, noise 0.4 %)")


def test_names_that_users_chose_break_no_report() -> None:
    name = "a|b`c<d>_e_\x01&\n"
    change = Change(name, "tau", "τ", 0.02, 3.0, 2.0, -1 / 3, 0.01, 0.02, 0.0, LOSS)
    found = Comparison([change], [f"{name} is gone"], [f"note of {name}"], 0.01, 1, True, (3, 3), [50.0])
    suite = ElementTree.fromstring(gating_report.junit(found))[0]
    assert suite[1].attrib["classname"].startswith("a|b`c<d>_e_\ufffd&")
    rows = [line for line in gating_report.summary(found, [], "x").splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_the_workflow_and_the_hook_of_the_readme_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the tour's own files: they pass as they are, and fail once the scheduler is made worse."""
    tour = section(ROOT / "README.md", "You keep a front from sliding (CI)")
    files = [(block.name, block.text) for block in tour.blocks if block.name]
    workflow = yaml.safe_load(dict(files)[".github/workflows/front.yml"])
    hook = yaml.safe_load(dict(files)[".pre-commit-config.yaml"])["repos"][0]["hooks"][0]
    steps = next(iter(workflow["jobs"].values()))["steps"]
    lines = [line for step in steps for line in step.get("run", "").replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("specsim ")]
    assert [c[0] for c in commands] == ["baseline", "compare"]
    shell, flag, script = shlex.split(hook["entry"])
    assert (shell, flag) == ("sh", "-c")
    assert [shlex.split(c)[1:4] for c in script.split(" && ")] == [c[:3] for c in commands]

    (tmp_path / "out").mkdir()
    for name in ("hw_profiles", "traces"):
        (tmp_path / name).symlink_to(ROOT / name)
    policies = [text for name, text in files if name == "policy.py"]
    (tmp_path / "policy.py").write_text(policies[0])
    (tmp_path / "gate.toml").write_text(dict(files)["gate.toml"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    few = ("--seeds", "4", "--num-requests", "40", "--jobs", "1")
    assert run("baseline", "--scenario", "gate.toml", *few, "--out", "front.json")[0] == 0
    for policy, code, mark in ((policies[0], 0, "✅"), (policies[-1], 1, "❌")):
        (tmp_path / "policy.py").write_text(policy)
        (tmp_path / "summary.md").unlink(missing_ok=True)
        made, compared = ([w.replace("$GITHUB_STEP_SUMMARY", "summary.md") for w in c] for c in commands)
        assert run(*made, *few)[0] == 0
        assert run(*compared)[0] == code
        assert mark in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "out/front.xml").exists()
    assert (tmp_path / "out/front.png").exists()


def test_make_gate_runs_what_the_page_says() -> None:
    assert re.search(
        r"^gate:.*\n(\t.*specsim (baseline|compare).*\n){2}", (ROOT / "Makefile").read_text(), re.MULTILINE
    )


def test_an_absurd_number_is_a_mistake(run: Run, tmp_path: Path) -> None:
    base = write(run, tmp_path / "a.json", "-s", "NoSpec")
    data = json.loads(base.read_text())
    data["runs"][0]["throughput"][0] = 1e300
    (tmp_path / "b.json").write_text(json.dumps(data))
    assert "runs.0.throughput: expected numbers, 0 or more and 1e+15 at most" in mistake(
        run, "compare", tmp_path / "b.json", base
    )


@pytest.mark.parametrize("verb", ["baseline", "sweep", "pareto"])
def test_a_scheduler_that_changes_its_mind_leaves_no_file(run: Run, tmp_path: Path, verb: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import numpy as np\n\ndef draws(view):\n    return np.random.default_rng().integers(0, 3, view.num_seqs)\n"
    )
    told = mistake(
        run, verb, "--profile", PROFILE, "--trace", TRACE, *LOAD, "-s", f"{mine}:draws", "--out", tmp_path / "o"
    )
    assert told.startswith("error: scheduler draws: answers otherwise when the same seed is run again: expected chance")
    assert sorted(p.name for p in tmp_path.rglob("*.*")) == ["mine.py"]
