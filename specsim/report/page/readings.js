// Reading a front, by the rule of specsim.pareto.throughput_at: a front is the polyline through the measured loads in
// their order, linear between adjacent ones and nothing beyond. Pure functions over plain numbers; no page needed.
"use strict";

const readings = (() => {
  // The most of `give` along the polyline where `keep` is `floor` or more, with the place it is found at:
  // {value, index, share}, a share of the way from point `index` to the next; null where there is none.
  function most(keep, give, floor) {
    let best = null;
    const offer = (value, index, share) => {
      if (best === null || value > best.value) best = { value, index, share };
    };
    for (let i = 0; i < keep.length; i++) {
      if (keep[i] >= floor) offer(give[i], i, 0);
      if (i + 1 < keep.length && keep[i] >= floor !== keep[i + 1] >= floor) {
        const share = (floor - keep[i]) / (keep[i + 1] - keep[i]);
        offer(give[i] + share * (give[i + 1] - give[i]), i, share);
      }
    }
    return best;
  }

  // What a curve {x, y} sells at the floor: {kind: "value" | "at_least" | "none", value, index, share}. Where the last
  // load still has x above the floor, more could be sold and what was found is a lower bound.
  function read(curve, floor) {
    const best = most(curve.x, curve.y, floor);
    if (best === null) return { kind: "none", value: NaN };
    return { kind: curve.x[curve.x.length - 1] > floor ? "at_least" : "value", ...best };
  }

  // `values` of the points of a curve, at the place where a reading was found.
  function at(values, reading) {
    const here = values[reading.index];
    return reading.share === 0 ? here : here + reading.share * (values[reading.index + 1] - here);
  }

  // Half-width of the 95 % interval of the mean; `factors` holds t/√n by n. NaN if any value is, or there is but one.
  function halfWidth(values, factors) {
    const n = values.length;
    if (n < 2 || values.some((v) => !Number.isFinite(v))) return NaN;
    const mean = values.reduce((a, b) => a + b, 0) / n;
    const squares = values.reduce((a, b) => a + (b - mean) ** 2, 0);
    const spread = Math.sqrt(squares / (n - 1));
    return spread <= 1e-12 * Math.abs(mean) ? 0 : factors[n] * spread; // differing by rounding alone is being equal
  }

  const exact = (curve, floor) => {
    const reading = read(curve, floor);
    return reading.kind === "value" ? reading.value : NaN;
  };

  // Everything that the page says of one policy at a floor; `base` is the policy that gains are over.
  function sold(front, policy, base, floor) {
    const reading = read(policy, floor);
    const found = { policy, ...reading, ci: NaN, gain: NaN, gainCi: NaN, gainLeast: NaN, served: NaN, ttft: NaN, late: NaN };
    if (reading.kind === "none") return found;
    found.served = at(policy.served, reading);
    found.ttft = at(policy.ttft, reading);
    found.late = at(policy.ttft_late, reading);
    const over = exact(base, floor);
    if (reading.kind === "at_least") {
      if (over > 0) found.gainLeast = reading.value / over - 1;
      return found;
    }
    const seeds = Object.keys(policy.seeds);
    const values = seeds.map((seed) => exact(policy.seeds[seed], floor));
    found.ci = halfWidth(values, front.factors);
    if (over > 0) {
      found.gain = reading.value / over - 1;
      const ratios = seeds.map((seed, i) => values[i] / (seed in base.seeds ? exact(base.seeds[seed], floor) : NaN));
      found.gainCi = halfWidth(ratios, front.factors);
    }
    return found;
  }

  // Whole replicas of `front.gpus` GPUs each for so many users, or requests/s; NaN where a GPU's are unknown.
  function gpusFor(front, perGpu, demand) {
    if (!(perGpu > 0) || !(demand > 0)) return NaN;
    return Math.ceil(demand / (perGpu * front.gpus) - 1e-9) * front.gpus;
  }

  // The policy that sells the most, and what stands in the way of saying so: `tied` have intervals that overlap the
  // leader's, `open` are bounded only from below and might sell more, `unsure` have no interval to compare by.
  function best(rows) {
    const told = rows.filter((row) => row.kind !== "none");
    if (!told.length) return null;
    const leader = told.reduce((a, b) => (b.value > a.value ? b : a));
    const others = told.filter((row) => row !== leader);
    const open = others.filter((row) => row.kind === "at_least");
    const exactly = leader.kind === "value" ? others.filter((row) => row.kind === "value") : [];
    const both = exactly.filter((row) => Number.isFinite(row.ci) && Number.isFinite(leader.ci));
    const tied = both.filter((row) => row.value + row.ci >= leader.value - leader.ci);
    const unsure = exactly.filter((row) => !both.includes(row));
    return { leader, tied, open, unsure };
  }

  // Numbers as the command line prints them: 15,594 from 100 on, three figures below.
  function number(value) {
    if (!Number.isFinite(value)) return "–";
    if (Math.abs(value) < 100) return String(Number(value.toPrecision(3)));
    return whole(value);
  }

  function whole(value) {
    let rounded = Math.round(value);
    if (Math.abs(value % 1) === 0.5 && rounded % 2 !== 0) rounded -= 1; // halves go to the even one
    return String(rounded).replace(/\B(?=(\d{3})+$)/g, ",");
  }

  function text(row) {
    if (row.kind === "none") return "–";
    if (row.kind === "at_least") return `≥ ${number(row.value)}`;
    if (!Number.isFinite(row.ci)) return number(row.value);
    const around = Math.abs(row.value) >= 100 ? whole(row.ci) : String(Number(row.ci.toPrecision(2)));
    return `${number(row.value)} ± ${around}`;
  }

  const signed = (share) => `${share < 0 ? "−" : "+"}${Math.abs(100 * share).toFixed(1)}`;

  // A gain in %, as the command line prints it: "+50.4 ± 5.4", "≥ +17.9" where the throughput is but bounded, "–".
  function gain(row) {
    if (Number.isFinite(row.gainLeast)) return `≥ ${signed(row.gainLeast)}`;
    if (!Number.isFinite(row.gain)) return "–";
    const around = Number.isFinite(row.gainCi) ? ` ± ${(100 * row.gainCi).toFixed(1)}` : "";
    return signed(row.gain) + around;
  }

  // Seconds, in ms below one.
  function seconds(value) {
    if (!Number.isFinite(value)) return "–";
    return value < 1 ? `${number(1e3 * value)} ms` : `${number(value)} s`;
  }

  // What a text of the field asks for: users are a whole number, requests/s any above 0, up to `most`; or NaN.
  function demand(text, most, users) {
    const asked = text.trim() === "" ? NaN : Number(text);
    return asked > 0 && asked <= most && (!users || Number.isInteger(asked)) ? asked : NaN;
  }

  return { read, at, halfWidth, sold, gpusFor, best, number, seconds, text, gain, demand };
})();

if (typeof module !== "undefined") module.exports = readings;
