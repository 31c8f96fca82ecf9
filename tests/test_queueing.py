"""Queueing truth at 50, 80 and 95 % load: the engine against closed forms, with intervals below 3 %.

One seat is a single server, and every wait must be Lindley's. Seats that step together are a discrete queue, which a
Markov chain solves exactly; replicas are servers behind a router. Where plain sampling would need millions of
requests, a control variate is used: a single server on the same arrivals, whose mean is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from conftest import make_arrivals, make_profile
from scipy import sparse, stats
from scipy.optimize import brentq
from scipy.sparse.linalg import spsolve

from specsim.engine import Scenario, simulate
from specsim.metrics import request_metrics
from specsim.workload import ClosedLoop, Empirical

LOADS = (0.5, 0.8, 0.95)
WIDTH = 0.03
"""Largest half width of a 95 % interval, as a share of what theory says."""


def constant_step():
    """Every step lasts one second, whatever it holds."""
    return make_profile(verify={"type": "table1d", "tokens": [1, 1 << 16], "seconds": [1.0, 1.0], "below": "linear"})


def seconds_per_prompt():
    """A step lasts a millisecond a token: the one step of a prompt is a service of any length."""
    tokens = [1, 1 << 16]
    return make_profile(
        verify={"type": "table1d", "tokens": tokens, "seconds": [t / 1000 for t in tokens], "below": "linear"}
    )


@dataclass(frozen=True)
class Law:
    """A law of service times: mean and second moment in s and s², and how a request is given one."""

    mean: float
    second: float
    draw: str

    def services(self, rng, n):
        """Seconds of n services, and the scenario and workload fields that make the engine serve them."""
        if self.draw == "one step":
            return np.ones(n), constant_step(), {"prompt": 1, "output": 1}, "chunked"
        if self.draw == "prompt":
            tokens = np.minimum(rng.geometric(0.001, n), 1 << 16)
            return tokens / 1000, seconds_per_prompt(), {"prompt": tokens, "output": 1}, "chunked"
        steps = rng.geometric(1 / self.mean, n)
        return steps.astype(float), constant_step(), {"prompt": 1, "output": 1 + steps}, "free"


CONSTANT = Law(1.0, 1.0, "one step")
EXPONENTIAL = Law(1.0, 1.999, "prompt")  # geometric in milliseconds
GEOMETRIC = Law(4.0, (2 - 0.25) / 0.25**2, "steps")


def run(law, rate, n, seed, **fields):
    """Arrivals, services and the request table of n Poisson requests; other rates draw other numbers."""
    rng = np.random.default_rng([seed, int(1000 * rate)])
    arrival = np.cumsum(rng.exponential(1 / rate, n))
    service, profile, lengths, prefill = law.services(rng, n)
    scenario = Scenario(
        profile, make_arrivals(arrival, **lengths), prefill=prefill, max_num_batched_tokens=1 << 16, **fields
    )
    return arrival, service, simulate(scenario).requests


def lindley(gaps, service):
    """Waits of a single server, first come first served: W' = max(0, W + S - A), as a running minimum."""
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps[1:])])
    return walk - np.minimum.accumulate(walk)


def pollaczek_khinchine(law, load):
    """Mean wait of M/G/1."""
    return load / law.mean * law.second / (2 * (1 - load))


def assert_theory(samples, expected, *controls):
    """The mean of independent ``samples`` is the expected one, by an interval narrow enough to tell.

    ``controls`` are (samples, known mean) of what moves with them: regression takes out what they explain, and the
    interval is that of its intercept at the known means. Theory must lie in its 99.9 % interval.
    """
    shifts = [values - known for values, known in controls]
    design = np.column_stack([np.ones(len(samples)), *shifts])
    inverse = np.linalg.inv(design.T @ design)
    found = inverse @ design.T @ samples
    freedom = len(samples) - design.shape[1]
    error = np.sqrt(((samples - design @ found) ** 2).sum() / freedom * inverse[0, 0])
    half = stats.t.ppf(0.975, freedom) * error
    print(f"theory {expected:.4f}, simulated {found[0]:.4f} +- {half:.4f} ({half / expected:.1%})")
    assert half < WIDTH * expected
    assert abs(found[0] - expected) < stats.t.ppf(0.9995, freedom) * error, (found[0], expected, error)


# One seat


def test_users_who_think_are_the_machines_of_the_textbook():
    """The interactive closed network N/(R + Z): exponential thinking and service, solved by mean value analysis."""
    users, think, response = 12, 10.0, 0.0
    for n in range(1, users + 1):
        response = 1 + (n - 1) * response / (response + think) if n > 1 else 1.0
    throughput = users / (response + think)
    # Levels of an exponential law stand for it.
    levels = -np.log1p(-(np.arange(4096) + 0.5) / 4096)
    law = Empirical(tuple(np.maximum(1, np.rint(1000 * levels / levels.mean())).astype(int).tolist()))
    found = []
    for seed in range(16):
        loop = ClosedLoop(users, law, 1, think_s=think, measured=8000)
        scenario = Scenario(seconds_per_prompt(), loop, max_num_batched_tokens=1 << 16, max_num_seqs=1)
        table = request_metrics(simulate(scenario, seed))
        rate = (len(table) - 1) / (table["arrival"].iloc[-1] - table["arrival"].iloc[0])
        found.append((rate, table["e2e"].mean()))
        assert rate == pytest.approx(users / (think + table["e2e"].mean()), rel=0.02)
    rates, times = np.array(found).T
    assert_theory(rates, throughput)
    assert_theory(times, response)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("law", [CONSTANT, EXPONENTIAL, GEOMETRIC], ids=["M/D/1", "M/M/1", "M/Geo/1"])
def test_every_wait_of_one_seat_is_lindleys(law, load):
    arrival, service, table = run(law, load / law.mean, 8000, 1, max_num_seqs=1)
    wait = (table["scheduled"] - table["arrival"]).to_numpy()
    assert np.abs(wait - lindley(np.diff(arrival, prepend=0), service)).max() < 1e-6
    assert np.abs(table["finish"] - table["scheduled"] - service).max() < 1e-6


@pytest.mark.parametrize(
    ("law", "load", "n"),
    [(CONSTANT, 0.5, 6_000), (CONSTANT, 0.8, 24_000), (EXPONENTIAL, 0.5, 12_000), (EXPONENTIAL, 0.8, 60_000)],
    ids=["M/D/1 at 50 %", "M/D/1 at 80 %", "M/M/1 at 50 %", "M/M/1 at 80 %"],
)
def test_the_simulated_wait_of_one_seat_is_pollaczeks_and_khinchines(law, load, n):
    waits = []
    for seed in range(16):
        _, _, table = run(law, load / law.mean, n, seed, max_num_seqs=1)
        waits.append((table["scheduled"] - table["arrival"])[n // 20 :].mean())
    assert_theory(np.array(waits), pollaczek_khinchine(law, load))


@pytest.mark.parametrize("law", [CONSTANT, EXPONENTIAL, GEOMETRIC], ids=["M/D/1", "M/M/1", "M/Geo/1"])
def test_at_95_percent_lindleys_waits_are_pollaczeks_and_khinchines(law):
    """What the engine was held to request by request, over 16 million of them."""
    waits = []
    for seed in range(16):
        rng = np.random.default_rng(seed)
        service = law.services(rng, 1_000_000)[0]
        waits.append(lindley(rng.exponential(law.mean / 0.95, len(service)), service)[50_000:].mean())
    assert_theory(np.array(waits), pollaczek_khinchine(law, 0.95))


# Seats that step together


def time_in_system(rate, seats, p):
    """Mean seconds in a system whose steps last one second; each request in a seat leaves after one with chance p.

    A Markov chain on the number at the start of a step: N -> N - Binomial(min(N, seats), p) + Poisson(rate). An empty
    system waits for one request and steps with it at once. Its time average and Little's law give the time.
    """
    spare = seats * p - rate  # what a full step can serve beyond what arrives
    most = min(seats, int(rate / p + 40 * (rate / p) ** 0.5)) + 60 + int(12 * (rate + seats * p * (1 - p)) / spare)
    states = np.arange(most + 1)
    arrivals = stats.poisson.pmf(states, rate)
    chain = np.zeros((most + 1, most + 1))
    for n in states[1:]:
        served = min(n, seats)
        after = np.zeros(most + 1)
        after[n - served : n + 1] = stats.binom.pmf(np.arange(served, -1, -1), served, p)
        chain[n] = np.convolve(after, arrivals)[: most + 1]
        chain[n, most] += 1 - chain[n].sum()
    empties = chain[:, 0].copy()
    chain[:, 1] += chain[:, 0]  # the next step starts with one request, after a mean of 1 / rate
    balance = chain[1:, 1:].T - np.eye(most)
    balance[-1] = 1
    share = np.linalg.solve(balance, np.eye(most)[-1])
    assert share[-20:].sum() < 1e-8
    number = share @ (states[1:] + rate / 2)
    return number / (1 + share @ empties[1:] / rate) / rate


def erlang_c(rate, service, seats):
    """Mean wait of M/M/c."""
    offered = rate * service
    terms = np.cumprod([1.0, *(offered / k for k in range(1, seats + 1))])
    last = terms[-1] * seats / (seats - offered)
    return last / (terms[:-1].sum() + last) * service / (seats - offered)


@pytest.mark.parametrize("load", LOADS)
def test_the_chain_has_the_limits_of_the_textbook(load):
    """One seat: Pollaczek and Khinchine. Short steps: Erlang C, less p / 2, and half a step until one is seen."""
    assert time_in_system(load, 1, 1.0) == pytest.approx(1 + pollaczek_khinchine(CONSTANT, load), rel=1e-6)
    assert time_in_system(load / 4, 1, 0.25) == pytest.approx(4 + pollaczek_khinchine(GEOMETRIC, load), rel=1e-6)
    for seats in (2, 8):
        steps = 50
        rate = load * seats / steps
        wait = erlang_c(rate, steps, seats)
        assert time_in_system(rate, seats, 1 / steps) == pytest.approx(steps + wait * (1 - 0.5 / steps) + 0.5, abs=0.3)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("steps", "seats"), [(4, 8), (4, 32), (1, 8)], ids=["M/Geo/8", "M/Geo/32", "bulk of 8"])
def test_seats_that_step_together(steps, seats, load):
    """Geometric answers in c seats, and the bulk queue: every step serves up to c requests for good."""
    rate, p = load * seats / steps, 1 / steps
    law = Law(float(steps), (2 - p) / p**2, "steps")
    n, skip = (14_000, 4_000) if load > 0.9 else (5_000, 1_000)
    found = []
    for seed in range(16):
        arrival, service, table = run(law, rate, n, seed, max_num_seqs=seats)
        fast = lindley(np.diff(arrival, prepend=0), service / seats)
        found.append([x[skip:].mean() for x in (table["finish"] - table["arrival"], fast, service)])
    times, fast, service = np.array(found).T
    known = pollaczek_khinchine(law, load) / seats
    controls = [(fast, known), (service, law.mean)] if steps > 1 else [(fast, known)]
    assert_theory(times, time_in_system(rate, seats, p), *controls)


def test_seats_without_end():
    """M/G/∞ in steps: an answer's own steps, and half a step until one begins."""
    rate, found = 12.0, []
    for seed in range(16):
        arrival, service, table = run(GEOMETRIC, rate, 6000, seed, max_num_seqs=4096)
        moments = np.arange(50.5, arrival[-1])
        begun, ended = (np.searchsorted(np.sort(table[name]), moments) for name in ("scheduled", "finish"))
        times = table["finish"] - table["arrival"]
        found.append((times[500:].mean(), service[500:].mean(), (begun - ended).mean()))
    times, service, seated = np.array(found).T
    assert_theory(times, GEOMETRIC.mean + 0.5, (service, GEOMETRIC.mean))
    assert_theory(seated, rate * GEOMETRIC.mean)


@pytest.mark.parametrize("seats", [1, 8, 32])
def test_full_seats_sell_one_token_each_a_step(seats):
    """More users than seats: c tokens a second, and c answers of four steps in four seconds, exactly."""
    work = ClosedLoop(2 * seats, 1, 1 + 4, measured=40 * seats)
    result = simulate(Scenario(constant_step(), work, prefill="free", max_num_seqs=seats), steps=True)
    assert (result.steps["emitted"] == seats).all()
    waited = 4.0  # the first measured request is seated after the round before it
    assert result.window.end - result.window.start == 40 * 4 + waited


# Replicas as servers


def test_round_robin_gives_each_replica_every_fourth_request():
    """Every wait is Lindley's, replica by replica."""
    arrival, service, table = run(EXPONENTIAL, 0.95 * 4, 8000, 3, replicas=4, max_num_seqs=1, router="round_robin")
    wait = (table["scheduled"] - table["arrival"]).to_numpy()
    for i in range(4):
        mine = slice(i, None, 4)
        assert np.abs(wait[mine] - lindley(np.diff(arrival[mine], prepend=0), service[mine])).max() < 1e-6


@pytest.mark.parametrize("load", LOADS)
def test_round_robin_is_erlang_arrivals_for_each(load):
    """E4/M/1: an arrival finds the server busy with the σ that solves σ = (4ρ / (4ρ + 1 - σ))^4."""
    busy = brentq(lambda s: (4 * load / (4 * load + 1 - s)) ** 4 - s, 0, 1 - 1e-9 - (1 - load) / 4)
    waits = []
    for seed in range(16):
        rng = np.random.default_rng(seed)
        gaps = rng.gamma(4, 1 / (4 * load), 1_000_000)
        waits.append(lindley(gaps, rng.exponential(1.0, len(gaps)))[50_000:].mean())
    assert_theory(np.array(waits), busy / (1 - busy))


def shorter_of_two(load, most):
    """Mean wait where each request joins the shorter of two exponential servers' queues; a chain of both lengths."""
    index = np.arange(most * most).reshape(most, most)
    a, b = np.divmod(np.arange(most * most), most)
    moves = [
        (a > 0, index[np.maximum(a - 1, 0), b], 1.0),
        (b > 0, index[a, np.maximum(b - 1, 0)], 1.0),
        ((a <= b) & (a < most - 1), index[np.minimum(a + 1, most - 1), b], 2 * load),
        ((a > b) & (b < most - 1), index[a, np.minimum(b + 1, most - 1)], 2 * load),
    ]
    rows = np.concatenate([np.flatnonzero(where) for where, _, _ in moves])
    columns = np.concatenate([to[where] for where, to, _ in moves])
    rates = np.concatenate([np.full(where.sum(), rate) for where, _, rate in moves])
    chain = sparse.csr_matrix((rates, (rows, columns)), shape=(most * most,) * 2)
    balance = (chain - sparse.diags(np.asarray(chain.sum(axis=1)).ravel())).T.tocsc()
    share = np.append(1.0, spsolve(balance[1:, 1:], -balance[1:, 0].toarray().ravel()))
    share /= share.sum()
    assert share[(a == most - 1) | (b == most - 1)].sum() < 1e-6
    return share @ (a + b) / (2 * load) - 1


@pytest.mark.parametrize("load", LOADS)
def test_least_loaded_joins_the_shorter_queue(load):
    n, skip = (20_000, 5_000) if load > 0.9 else (10_000, 1_000)
    found = []
    for seed in range(16):
        arrival, service, table = run(EXPONENTIAL, 2 * load, n, seed, replicas=2, max_num_seqs=1, router="least_loaded")
        fast = lindley(np.diff(arrival, prepend=0), service / 2)
        found.append([x[skip:].mean() for x in (table["finish"] - table["arrival"], fast)])
    times, fast = np.array(found).T
    expected = 1 + shorter_of_two(load, 130 if load > 0.9 else 50)
    assert_theory(times, expected, (fast, pollaczek_khinchine(EXPONENTIAL, load) / 2))
