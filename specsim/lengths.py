"""How many tokens a prompt or an answer has: laws of lengths that can be sampled.

A law is a frozen dataclass with ``sample(rng, n)``, which returns int64[n], every entry at least 1.
Samples are rounded to the nearest token and clipped, never truncated to 0. Wherever a law is
expected a plain int is one too: that many tokens, always.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from specsim.types import Ints, SpecsimError

MAX_TOKENS = 2**31 - 1  # traces hold lengths as int32


def check_number(
    field: str,
    value: object,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    whole: bool = False,
) -> None:
    """Raise a SpecsimError unless ``value`` is a finite number within the bounds given.

    ``field`` opens the message ("Poisson.rate"); ``above`` is an exclusive lower bound, ``least`` and
    ``most`` are inclusive; ``whole`` asks for an integer type.
    """
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, kinds) and not isinstance(value, bool):
        number: Any = value
        finite = abs(number) <= sys.float_info.max  # also false for NaN
        if finite and least <= number <= most and number > above:
            return
    expected = "a whole number" if whole else "a number"
    bounds = []
    if above > -math.inf:
        bounds.append(f"above {above:g}")
    if least > -math.inf:
        bounds.append(f"of at least {least:g}")
    if most < math.inf:
        bounds.append(f"of at most {int(most) if float(most).is_integer() else most}")
    raise SpecsimError(f"{field}: expected {' '.join([expected, ' and '.join(bounds)]).strip()}, got {value!r}")


def _check_tokens(field: str, value: object, least: float = 1) -> None:
    check_number(field, value, least=least, most=MAX_TOKENS, whole=True)


@dataclass(frozen=True)
class Fixed:
    """Always ``tokens`` tokens (an int of at least 1)."""

    tokens: int

    def __post_init__(self) -> None:
        _check_tokens("Fixed.tokens", self.tokens)

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        """Return int64[n]; draws nothing from ``rng``."""
        return np.full(n, self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths: half of them below ``median`` tokens, log-scale deviation ``sigma``.

    Samples below ``minimum`` or above ``maximum`` (``None``: 2^31 − 1) become those bounds. The mean
    before clipping is ``median · exp(sigma² / 2)``.
    """

    median: float
    sigma: float
    minimum: int = 1
    maximum: int | None = None

    def __post_init__(self) -> None:
        check_number("LogNormal.median", self.median, least=1, most=MAX_TOKENS)
        check_number("LogNormal.sigma", self.sigma, least=0)
        _check_tokens("LogNormal.minimum", self.minimum)
        if self.maximum is not None:
            _check_tokens("LogNormal.maximum", self.maximum, least=self.minimum)

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        """Return int64[n] of lengths, in tokens."""
        most = MAX_TOKENS if self.maximum is None else self.maximum
        # Bounded before the exponential too, so that a wide law cannot overflow.
        logs = np.minimum(math.log(self.median) + self.sigma * rng.standard_normal(n), math.log(MAX_TOKENS))
        return np.clip(np.rint(np.exp(logs)), self.minimum, most).astype(np.int64)


@dataclass(frozen=True)
class Empirical:
    """Lengths drawn with replacement from ``values`` (tokens, each at least 1)."""

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        values = _as_tuple("Empirical.values", self.values, least_entries=1)
        for i, value in enumerate(values):
            _check_tokens(f"Empirical.values[{i}]", value)
        object.__setattr__(self, "values", values)

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        """Return int64[n] of lengths, in tokens."""
        return np.asarray(self.values, dtype=np.int64)[rng.integers(0, len(self.values), n)]


@dataclass(frozen=True)
class Quantiles:
    """Lengths by their quantiles: a share ``probabilities[i]`` of them is at most ``tokens[i]``.

    The inverse of the distribution function is linear between the quantiles given, so
    ``probabilities`` must climb from 0 to 1 and ``tokens`` must not fall.
    """

    probabilities: tuple[float, ...]
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        probabilities = _as_tuple("Quantiles.probabilities", self.probabilities, least_entries=2)
        tokens = _as_tuple("Quantiles.tokens", self.tokens, least_entries=2)
        if len(tokens) != len(probabilities):
            n = len(probabilities)
            raise SpecsimError(f"Quantiles.tokens: expected {n} entries as in probabilities, got {len(tokens)}")
        for i, (probability, token) in enumerate(zip(probabilities, tokens, strict=True)):
            check_number(f"Quantiles.probabilities[{i}]", probability, least=0, most=1)
            check_number(f"Quantiles.tokens[{i}]", token, least=1, most=MAX_TOKENS)
        if probabilities[0] != 0 or probabilities[-1] != 1 or np.any(np.diff(probabilities) <= 0):
            raise SpecsimError(
                f"Quantiles.probabilities: expected numbers climbing from 0 to 1, got {list(probabilities)}"
            )
        if np.any(np.diff(tokens) < 0):
            raise SpecsimError(f"Quantiles.tokens: expected numbers that do not fall, got {list(tokens)}")
        object.__setattr__(self, "probabilities", probabilities)
        object.__setattr__(self, "tokens", tokens)

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        """Return int64[n] of lengths, in tokens."""
        return np.rint(np.interp(rng.random(n), self.probabilities, self.tokens)).astype(np.int64)


Lengths = Fixed | LogNormal | Empirical | Quantiles


def as_lengths(value: Lengths | int, field: str = "lengths") -> Lengths:
    """Return ``value`` as a law of lengths: a plain int is ``Fixed``; ``field`` names it in the error."""
    if isinstance(value, Lengths):
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        _check_tokens(field, value)
        return Fixed(int(value))
    raise SpecsimError(f"{field}: expected a number of tokens, Fixed, LogNormal, Empirical or Quantiles, got {value!r}")


def parse_lengths(text: str) -> Lengths:
    """Read lengths as written on the command line: "512", "fixed(12)", "lognormal(500, 1.2)".

    Arguments may be named ("lognormal(500, sigma=1.2, maximum=4096)"), and a law's own repr is
    understood. Anything else is a SpecsimError.
    """
    problem = SpecsimError(f"lengths: expected something like 512, fixed(12) or lognormal(500, 1.2), got {text!r}")
    laws = {law.__name__.lower(): law for law in (Fixed, LogNormal, Empirical, Quantiles)}
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call):
            return as_lengths(ast.literal_eval(node))
        law = laws[ast.unparse(node.func).lower()]
        named = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        return law(*(ast.literal_eval(a) for a in node.args), **named)
    except SpecsimError as error:
        raise SpecsimError(f"lengths {text!r}: {error}") from error
    except (SyntaxError, ValueError, KeyError, TypeError) as error:
        raise problem from error


def _as_tuple(field: str, values: object, least_entries: int) -> tuple[int | float, ...]:
    """Return ``values`` as a tuple of Python numbers (hashable, short to print), or raise."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise SpecsimError(f"{field}: expected a list of numbers, got {values!r}")
    entries = tuple(v.item() if isinstance(v, np.generic) else v for v in values)
    if len(entries) < least_entries:
        raise SpecsimError(f"{field}: expected at least {least_entries} entries, got {len(entries)}")
    return entries
