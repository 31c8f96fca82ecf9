"""What the shipped profiles and traces promise: the figures they cite."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import specsim as ss
from specsim.importers.arrivals import open_workload
from specsim.synthesis import Synthetic

ROOT = Path(__file__).parents[1]
FIGURES = ROOT.parent / "shared/data/published/dspark_paper_figures.csv"
DRAFTERS = ("DSpark", "DFlash", "Eagle3")
TAU = {"math": 5.56, "code": 5.16, "chat": 3.51}  # figure 2's products for DSpark, γ = 7


def cheap_profile() -> ss.Profile:
    return ss.Profile.model_validate(
        {
            "schema": "specsim.profile/1",
            "name": "cheap",
            "kind": "analytic",
            "model": "any",
            "device": "any",
            "gpus": 1,
            "verify": {"type": "table1d", "tokens": [1, 8192], "seconds": [0.01, 0.02], "below": "linear"},
            "draft": {"type": "parallel", "num_seqs": [1, 1024], "seconds": [0.001, 0.001]},
            "provenance": {"source": "a test"},
        }
    )


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tau_at_fixed_gamma_is_figure_2s_product(drafter: str) -> None:
    """Within 1 %, simulated: StaticGamma(7) on a closed loop, three seeds."""
    trace = ss.load_drafter(ROOT / f"traces/qwen3-4b-{drafter.lower()}.json")
    assert isinstance(trace.acceptance, Synthetic)
    scenario = ss.Scenario(cheap_profile(), ss.ClosedLoop(64, 1, 256), trace, ss.StaticGamma(7), prefill="free")
    runs = pd.concat([ss.summarize(ss.simulate(scenario, seed)) for seed in range(3)])
    tau = runs.groupby("domain")["tau"].mean()
    for name, domain in trace.acceptance.domains.items():
        product = 1 + np.cumprod(domain.conditional_acceptance).sum()
        assert tau[name] == pytest.approx(product, rel=0.01)
        if drafter == "DSpark":
            assert tau[name] == pytest.approx(TAU[name], rel=0.01)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_conditional_acceptance_over_visited_anchors(drafter: str) -> None:
    """Walk the tape as StaticGamma(7) does; at every position within 0.01 of the figure."""
    trace = ss.load_drafter(ROOT / f"traces/qwen3-4b-{drafter.lower()}.json")
    assert isinstance(trace.acceptance, Synthetic)
    tapes = [trace.tape(seed) for seed in range(3)]
    for d, domain in enumerate(trace.acceptance.domains.values()):
        visited = []
        for tape in tapes:
            accepted = tape.accepted[tape.first[d] : tape.first[d] + tape.size[d]]
            row = 0
            while row < len(accepted):
                visited.append(accepted[row])
                row += accepted[row] + 1
        reached = np.array([(np.array(visited) >= k).sum() for k in range(8)])
        assert reached[1:] / reached[:-1] == pytest.approx(domain.conditional_acceptance, abs=0.01)


@pytest.mark.skipif(not FIGURES.exists(), reason="the figures' points are not beside this checkout")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_traces_hold_the_figures_points(drafter: str) -> None:
    figures = pd.read_csv(FIGURES)
    figures = figures[(figures["figure"] == "fig2") & (figures["method"] == drafter)]
    trace = ss.load_trace(ROOT / f"traces/qwen3-4b-{drafter.lower()}.json")
    assert isinstance(trace, Synthetic)
    for name, domain in trace.domains.items():
        points = figures[figures["panel"] == name].sort_values("x")
        assert domain.conditional_acceptance == tuple(points["y"])


def test_mtp1_accepts_what_the_report_says() -> None:
    drafter = ss.load_drafter(ROOT / "traces/mtp1.json")
    assert drafter.gamma == 1
    assert drafter.tape(0).accepted.mean() == pytest.approx(0.85, abs=0.005)


@pytest.mark.parametrize("path", sorted((ROOT / "hw_profiles").glob("*.json")), ids=lambda p: p.stem)
def test_profiles_load_and_say_where_they_come_from(path: Path) -> None:
    profile = ss.load_profile(path)
    assert profile.name == path.stem
    assert profile.provenance.source
    assert np.all(profile.step_seconds(np.arange(*profile.verify.range), num_seqs=1) > 0)


def test_the_b300_profile_keeps_the_cliff() -> None:
    profile = ss.load_profile(ROOT / "hw_profiles/dsv4-flash-b300-tp4.json")
    assert profile.step_seconds([1024, 1025]) == pytest.approx([0.020634, 0.104489])


@pytest.mark.parametrize(("name", "rate", "cv"), [("chat", 5.53, 1.1), ("code", 2.57, 13.1)])
def test_fitted_arrivals_have_the_azure_hours_rate_and_burstiness(name: str, rate: float, cv: float) -> None:
    workload = open_workload(ROOT / f"traces/azure-2023-{name}.json")
    assert isinstance(workload, ss.Gamma)
    assert workload.rate == pytest.approx(rate, rel=0.01)
    assert workload.cv == pytest.approx(cv, rel=0.05)
