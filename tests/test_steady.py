"""A sweep can be made again: schedulers that would give other answers are refused."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
from conftest import make_profile

import specsim as ss
from specsim.asking import scheduler_name
from specsim.steady import ASKED, check_steady
from specsim.types import SpecsimError

WORDS = "answers otherwise when the same seed is run again: expected chance only from a generator that its start"


def scenario(scheduler=None, **more):
    drafter = ss.synthetic(0.7, gamma=3, concentration=2.0)
    return ss.Scenario(make_profile(), ss.ClosedLoop(4, 16, 16, measured=20), drafter, scheduler, **more)


def draws(view):
    return np.random.default_rng().integers(0, view.gamma + 1, view.num_seqs)


@dataclass(frozen=True)
class Now:
    """Its generators are all others, also those of one process."""

    def start(self):
        rng = np.random.default_rng()
        return lambda view: rng.integers(0, view.gamma + 1, view.num_seqs)


class Counts:
    """Memory outside of start(): what one run remembers the next one sees, in the same process alone."""

    def __init__(self):
        self.steps = 0

    def __call__(self, view):
        self.steps += 1
        return np.full(view.num_seqs, self.steps % 3)


class Caches:
    """What it decided for a request it keeps for all runs, which number their requests alike."""

    def __init__(self):
        self.kept = {}

    def __call__(self, view):
        for request, confidence in zip(view.request_ids.tolist(), view.confidence, strict=True):
            self.kept.setdefault(request, int((confidence > 0.6).sum()))
        return np.array([self.kept[request] for request in view.request_ids.tolist()])


@dataclass(frozen=True)
class Seeded:
    """Chance as it should be."""

    seed: int = 0
    uses_previous = False

    def start(self):
        rng = np.random.default_rng(self.seed)
        return lambda view: rng.integers(0, view.gamma + 1, view.num_seqs)


CHANGING = [draws, Now(), Counts(), Caches(), ss.WrongCost(draws), ss.WrongCost(Caches())]


@pytest.mark.parametrize("scheduler", CHANGING, ids=scheduler_name)
@pytest.mark.parametrize("jobs", [1, 2])
def test_one_that_changes_its_mind_is_refused(scheduler, jobs):
    scheduler = copy.deepcopy(scheduler)  # without what another test had it remember
    words = "than a copy of it that has run no other seed" if "Caches" in scheduler_name(scheduler) else WORDS
    with pytest.raises(SpecsimError, match=words) as error:
        ss.sweep(scenario(), [ss.NoSpec(), scheduler], [ss.ClosedLoop(2, 16, 16, measured=20)], range(2), jobs=jobs)
    assert "\n" not in str(error.value)


def test_chance_from_a_seed_of_its_own_is_not():
    for policy in (Seeded(), ss.GammaBandit(epsilon=0.5), ss.WrongCost(Seeded())):
        tables = [ss.sweep(scenario(), [policy], seeds=range(2), jobs=1) for _ in range(2)]
        assert tables[0].equals(tables[1])


def test_few_questions_are_put_and_none_to_our_own():
    asked = []

    def counted(view):
        asked.append(view.num_seqs)
        return np.zeros(view.num_seqs, dtype=int)

    check_steady(scenario(counted, replicas=2), 0)
    assert 0 < len(asked) <= 2 * ASKED
    short = len(asked)
    long = ss.ClosedLoop(4, 16, 160, measured=2000)
    check_steady(ss.Scenario(make_profile(), long, ss.synthetic(0.7, gamma=3), counted), 0)
    assert len(asked) == short + 2 * ASKED
    check_steady(scenario(ss.DSparkAsync()), 0)  # asks nothing

    class Counted:  # an instance, which is asked under another seed too
        def __call__(self, view):
            return counted(view)

    before = len(asked)
    check_steady(ss.Scenario(make_profile(), long, ss.synthetic(0.7, gamma=3), Counted()), 0)
    assert len(asked) == before + 4 * ASKED


def test_a_seed_that_nobody_asked_for_refuses_nothing():
    """A request of the next seed does not fit into the KV cache."""

    class Fixed:
        def __call__(self, view):
            return np.ones(view.num_seqs, dtype=int)

    workload = ss.ClosedLoop(4, ss.LogNormal(1000, 0.8), 64, measured=40)
    tight = replace(scenario(Fixed()), workload=workload, kv_tokens=12000)
    assert len(ss.sweep(tight, seeds=[0], jobs=1)) == 1
    with pytest.raises(SpecsimError, match="can never fit in the KV cache"):
        ss.sweep(tight, seeds=[1], jobs=1)


def test_one_that_cannot_be_copied_is_run_twice_all_the_same():
    class Locked(Counts):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle '_thread.lock' object")

    with pytest.raises(SpecsimError, match=WORDS):
        check_steady(replace(scenario(Locked()), workload=ss.ClosedLoop(4, 16, 160, measured=2000)), 0)


class Forgets:
    def start(self):
        pass


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (Seeded, r"scheduler Seeded: expected an instance, such as Seeded\(\), got the class"),
        (
            Forgets(),
            "scheduler Forgets: start: expected it to return something that can be called with a StepView, got",
        ),
        (lambda: 0, "scheduler <lambda>: expected something that can be called with a StepView alone: TypeError: "),
        (lambda view: None, "scheduler <lambda>: expected 4 whole draft lengths within 0..3, got NoneType"),
    ],
)
def test_what_is_no_scheduler_is_told_as_elsewhere(scheduler, words):
    with pytest.raises(SpecsimError, match=f"^{words}"):
        ss.sweep(scenario(), [scheduler], jobs=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": Seeded()}, r"policy: expected several, in a list, got Seeded Seeded\(seed=0\)"),
        ({"policy": "NoSpec"}, "policy: expected several, in a list, got str 'NoSpec'"),
        ({"workload": ss.ClosedLoop(4)}, "workload: expected several, in a list, got ClosedLoop ClosedLoop"),
        ({"seeds": 3}, "seeds: expected several, in a list, got int 3"),
    ],
)
def test_one_thing_where_several_are_expected_is_told(given, words):
    with pytest.raises(SpecsimError, match=f"^{words}"):
        ss.sweep(scenario(), **{"jobs": 1} | given)


@pytest.mark.parametrize("given", [{"tiers": ss.parse_tier("a: ttft<=9s")}, {"tiers": "a: ttft<=9s"}, {"profiles": 0}])
def test_a_plan_takes_several_too(given):
    with pytest.raises(SpecsimError, match=f"^plan: {next(iter(given))}: expected several, in a list, got "):
        ss.plan(scenario(), users=9, jobs=1, **{"tiers": ["a: ttft<=9s"]} | given)


def test_a_policys_drafter_is_no_file_name():
    with pytest.raises(SpecsimError, match=r"^Policy: drafter: expected what load_drafter returns, got 'a.json'"):
        ss.Policy(ss.MTP1(), "a.json")
