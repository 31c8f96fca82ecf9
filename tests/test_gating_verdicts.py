"""specsim compare where it must not pass: losses that few seeds hide, and what NEW lacks; in every form."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specsim.baseline import METRICS, Baseline, Numbers, read_baseline, write_baseline

ROOT = Path(__file__).parents[1]
HIDES = r"losses of up to [\d,]+"
MORE = r"run more seeds \(8, say\)"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def few() -> Baseline:
    """The shipped baseline's first two seeds."""
    shipped = read_baseline(ROOT / "experiments/baseline.json")
    runs = [run.model_copy(update={m: getattr(run, m)[:2] for m in METRICS}) for run in shipped.runs]
    return shipped.model_copy(update={"seeds": [0, 1], "runs": runs})


def changed(made: Baseline, policy: str, **new: Callable[[Numbers], Numbers]) -> Baseline:
    """The baseline with these metrics of one policy changed."""
    runs = []
    for run in made.runs:
        update = {m: change(getattr(run, m)) for m, change in new.items() if run.policy == policy}
        runs.append(run.model_copy(update=update))
    return made.model_copy(update={"runs": runs})


def every_form(run: Run, folder: Path, base: Baseline, new: Baseline) -> tuple[int, str, str, dict[str, Path]]:
    files = {"base": write_baseline(folder / "base.json", base), "new": write_baseline(folder / "new.json", new)}
    files |= {form: folder / f"out.{form}" for form in ("markdown", "junit", "json")} | {"picture": folder / "out.svg"}
    flags = [x for form in ("markdown", "junit", "json", "picture") for x in (f"--{form}", files[form])]
    return *run("compare", files["base"], files["new"], *flags), files


def test_a_loss_that_few_seeds_hide_is_undecided_in_every_form(run: Run, tmp_path: Path, few: Baseline) -> None:
    less = changed(few, "DSparkAsync()", tau=lambda v: [0.5 * v[0], 0.7 * v[1]])
    code, text, err, files = every_form(run, tmp_path, few, less)
    assert code == 1
    told = f"Undecided: 1 number fell beyond its tolerance, but 2 seeds hide {HIDES} %: {MORE}"
    assert re.match(told, text.splitlines()[-1])
    assert re.fullmatch(r"undecided: DSparkAsync\(\): τ: .* no loss would fail \(noise \S+ %\)\n", err)
    summary = files["markdown"].read_text()
    assert summary.startswith("### ❓ specsim compare\n\nUndecided: ")
    failure = ElementTree.parse(files["junit"]).findall(".//failure")
    assert [f.attrib["type"] for f in failure] == ["undecided"]
    data = json.loads(files["json"].read_text())
    assert (data["passed"], data["failed"], data["undecided"], data["seeds"]) == (False, False, 1, [2, 2])
    assert re.match(told, data["verdict"])
    picture = files["picture"].read_text()
    assert "<!-- Undecided: 1 number fell beyond its tolerance" in picture
    assert "<!-- DSparkAsync() (undecided) -->" in picture


def test_equals_under_few_seeds_pass_and_a_pass_says_what_it_hides(run: Run, tmp_path: Path, few: Baseline) -> None:
    shipped = ROOT / "experiments/baseline.json"
    code, text, _ = run("compare", shipped, write_baseline(tmp_path / "a.json", few))
    assert (code, "Passed: the same. 42 numbers" in text, "warning" in text) == (0, True, False)
    more = changed(few, "DSparkAsync()", tau=lambda v: [1.5 * v[0], 1.7 * v[1]])
    code, text, err, files = every_form(run, tmp_path, few, more)
    assert (code, err) == (0, "")
    hidden = f"warning: in 1 number {HIDES} % would not be seen: {MORE}"
    assert re.match(hidden, text)
    assert "Passed: no regression" in text
    assert re.search(rf"^\*\*{hidden}\*\*$", files["markdown"].read_text(), re.MULTILINE)
    assert re.match(hidden, ElementTree.parse(files["junit"]).find(".//system-err").text)
    assert re.fullmatch(hidden, json.loads(files["json"].read_text())["warnings"][0])
    assert re.search(hidden, files["picture"].read_text())


def test_what_new_lacks_fails_in_every_form(run: Run, tmp_path: Path, few: Baseline) -> None:
    """A load of every policy, and all numbers of one: once "Passed: the same. 0 numbers"."""
    less = few.model_copy(update={"runs": [r for r in few.runs if r.load != 256]})
    less = changed(less, "NoSpec()", **dict.fromkeys(METRICS, lambda v: [None, None]))
    code, text, err, files = every_form(run, tmp_path, few, less)
    lines = err.splitlines()
    assert code == 1
    assert lines.count("gone: DSparkAsync(): in BASE and not in NEW: load 256") == 1
    read = [line for line in lines if line.startswith("gone: NoSpec(): ") and "no run of NEW has the number, " in line]
    assert len(lines) - len(few.policies) == len(read) > 4
    assert f"Failed: {len(lines)} gone" in text.splitlines()[-1]
    assert re.search(r"^ *NoSpec\(\) .* gone ", text, re.MULTILINE)
    summary = files["markdown"].read_text()
    assert summary.startswith("### ❌")
    assert "\n- gone: DSparkAsync(): in BASE and not in NEW: load 256\n" in summary
    failures = ElementTree.parse(files["junit"]).findall(".//failure")
    assert [f.attrib["type"] for f in failures] == ["gone"] * len(lines)
    data = json.loads(files["json"].read_text())
    assert (data["failed"], data["identical"], len(data["gone"])) == (True, False, len(few.policies))
    picture = files["picture"].read_text()
    assert f"<!-- Failed: {len(lines)} gone -->" in picture
    assert "NoSpec() (gone)" in picture


def test_nothing_to_compare_is_a_mistake(run: Run, tmp_path: Path, few: Baseline) -> None:
    empty = few
    for policy in few.policies:
        empty = changed(empty, policy, **dict.fromkeys(METRICS, lambda v: [None, None]))
    a, b = write_baseline(tmp_path / "a.json", empty), write_baseline(tmp_path / "b.json", few)
    code, text, err = run("compare", a, a, "--json", tmp_path / "c")
    assert (code, text) == (2, "")
    assert err == "error: runs: no number to compare: expected one that every run of a policy has in BASE and in NEW\n"
    assert not (tmp_path / "c").exists()
    code, text, _ = run("compare", b, a, "--picture", tmp_path / "f.png")
    assert code == 1
    assert "Failed: " in text
