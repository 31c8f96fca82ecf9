// The page: draws the charts, and reads every front off at the floor that the slider stands at.
"use strict";

(() => {
  const { front, charts } = JSON.parse(document.getElementById("report-data").textContent);
  const views = new Map();
  const element = (id) => document.getElementById(id);
  const slider = element("floor");
  const demand = element("demand");

  // ---- charts

  const options = {
    mode: "vega-lite",
    renderer: "svg",
    actions: false,
    ast: true, // expressions are interpreted: the page's policy allows no eval
    defaultStyle: false,
    tooltip: { theme: "page", disableDefaultStyle: true },
  };

  // Panels of a facet have no container to fill: as many columns as have room, of equal width.
  function fitted(spec, box) {
    if (!spec.facet) return spec;
    const panels = spec.facet.sort.length;
    const axis = 34; // what the numbers beside a panel take
    const columns = Math.max(1, Math.min(panels, Math.floor(box.clientWidth / 150)));
    const size = Math.min(190, Math.floor(box.clientWidth / columns) - spec.spacing - axis);
    return { ...spec, columns, spec: { ...spec.spec, width: size, height: size } };
  }

  async function draw(box) {
    const spec = fitted(charts[box.dataset.chart], box);
    views.get(box)?.finalize();
    const { view } = await vegaEmbed(box, spec, options);
    views.set(box, view);
    if (box.closest("#drafters") === null) {
      view.addEventListener("mouseover", (_, item) => light(item?.datum?.policy ?? null));
      box.addEventListener("mouseleave", () => light(null));
    }
    return view;
  }

  function chartOf(name) {
    const box = document.querySelector(`[data-chart="${name}"]`);
    return box ? views.get(box) : undefined;
  }

  // ---- the read-off

  const base = front.policies[front.base];
  for (const policy of front.policies) {
    for (const name of ["served", "ttft", "ttft_late"]) {
      policy[name] = policy[name].map((value) => value ?? NaN); // JSON has no NaN
    }
  }
  const rows = new Map(front.policies.map((policy, i) => [policy, element(`sold-${i}`)]));

  // Fill a cell: signs stay with their numbers where it is narrow, and what follows the number is smaller.
  function fill(cell, text) {
    const [value, ...rest] = text.replace(/([≥≤]) | (?=m?s\b)/g, "$1\u00a0").split(/(?= ± | p90 )/);
    cell.textContent = value;
    if (!rest.length) return;
    const more = document.createElement("small");
    more.textContent = rest.join("").replace("± ", "±\u00a0");
    cell.append(more);
  }

  // The users or requests/s to serve; where the field has no such number, it says so, and no GPUs are told.
  const most = Number(demand.max);
  function asked() {
    const found = demand.validity.badInput ? NaN : readings.demand(demand.value, most, front.closed);
    const wrong = Number.isNaN(found);
    demand.setAttribute("aria-invalid", String(wrong));
    const what = front.closed ? "a whole number of users, from 1 to" : "a number of requests/s above 0, at most";
    const said = wrong ? `GPUs need ${what} ${readings.number(most)}.` : "";
    if (element("demand-problem").textContent !== said) element("demand-problem").textContent = said;
    return found;
  }

  // What a GPU serves, and GPUs, from a reading; a lower bound of the throughput bounds them too.
  function bounded(row, value, sign) {
    if (!Number.isFinite(value)) return "–";
    return (row.kind === "at_least" ? `${sign} ` : "") + readings.number(value);
  }

  const listed = (found) => found.map((row) => row.policy.name).join(", ");

  // Who then waits how long for the first token.
  function wait(row, one) {
    if (!Number.isFinite(row.ttft)) return "";
    const late = Number.isFinite(row.late) ? `, 90th percentile ${readings.seconds(row.late)}` : "";
    return ` and then wait${one ? "s" : ""} ${readings.seconds(row.ttft)} for the first token (median${late})`;
  }

  function verdict(found, floor, wanted) {
    const here = `At ${floor} tok/s per user`;
    const { leader, tied, open, unsure } = found;
    const gpus = readings.gpusFor(front, leader.served, wanted);
    const bound = leader.kind === "at_least";
    let text = `${here}, ${leader.policy.name} sells the most: ${readings.text(leader)} tok/s per GPU`;
    if (bound) text = `${here}, ${leader.policy.name} sells at least ${readings.number(leader.value)} tok/s per GPU`;
    if (Number.isFinite(gpus)) {
      const least = bound ? "at most " : "";
      const one = front.closed && wanted === 1;
      const who = front.closed ? `user${one ? "" : "s"}` : "requests/s";
      const many = gpus === 1 ? "GPU" : "GPUs";
      text += `; ${readings.number(wanted)} ${who} need${one ? "s" : ""} ${least}${readings.number(gpus)} ${many}`;
      text += wait(leader, one);
    }
    text += ".";
    if (tied.length) text += ` Within noise of it (intervals overlap): ${listed(tied)}.`;
    if (unsure.length) text += ` Without intervals to compare by: ${listed(unsure)}.`;
    if (open.length) text += ` Might sell as much or more, their loads end above this floor: ${listed(open)}.`;
    return text;
  }

  let spoken = 0;

  function update() {
    const floor = Number(slider.value);
    const wanted = asked();
    const found = front.policies.map((policy) => readings.sold(front, policy, base, floor));
    const first = readings.best(found);
    for (const row of found) {
      const cells = rows.get(row.policy).cells;
      const leads = row === first.leader;
      const close = first.tied.includes(row);
      rows.get(row.policy).classList.toggle("best", leads);
      cells[0].querySelector(".tag").textContent = leads ? "most" : close ? "within noise" : "";
      fill(cells[1], readings.text(row));
      fill(cells[2], row.policy === base ? "–" : readings.gain(row));
      fill(cells[3], bounded(row, row.served, "≥"));
      fill(cells[4], bounded(row, readings.gpusFor(front, row.served, wanted), "≤"));
      const late = Number.isFinite(row.late) ? ` p90 ${readings.seconds(row.late)}` : "";
      fill(cells[5], readings.seconds(row.ttft) + late);
    }
    element("floor-value").textContent = `${floor} tok/s per user`;
    slider.setAttribute("aria-valuetext", `${floor} tokens per second and user`);
    for (const button of document.querySelectorAll("[data-floor]")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.floor) === floor));
    }
    // Heard once the slider rests, not at every step of it.
    clearTimeout(spoken);
    spoken = setTimeout(() => (element("verdict").textContent = verdict(first, floor, wanted)), 150);
    const view = chartOf("front");
    if (view) {
      const marks = found.filter((row) => row.kind !== "none");
      view.data("readings", marks.map((row) => ({
        policy: row.policy.name, x: readings.at(row.policy.x, row), y: row.value,
      })));
      view.signal("floor", floor).runAsync();
    }
  }

  slider.addEventListener("input", update);
  demand.addEventListener("input", update);
  for (const button of document.querySelectorAll("[data-floor]")) {
    button.addEventListener("click", () => {
      slider.value = button.dataset.floor;
      update();
    });
  }

  // ---- one scheduler among many: the others' curves fade while it is pointed at, focused, or its name is pressed

  const names = [...document.querySelectorAll("button.name")];
  let pressed = null;

  function light(name) {
    const lit = name ?? pressed ?? "";
    for (const chart of ["front", "throughput", "verified_tokens", "ttft", "tpot", "e2e"]) {
      chartOf(chart)?.signal("lit", lit).runAsync();
    }
  }

  for (const place of document.querySelectorAll("table.sold tbody tr, #read-off .key li, #load .key li, #latency .key li")) {
    const curve = place.dataset.curve ?? place.querySelector("[data-curve]").dataset.curve;
    const { name } = front.policies[curve];
    for (const event of ["mouseenter", "focusin"]) place.addEventListener(event, () => light(name));
    for (const event of ["mouseleave", "focusout"]) place.addEventListener(event, () => light(null));
  }
  for (const button of names) {
    button.addEventListener("click", () => {
      const { name } = front.policies[button.dataset.curve];
      pressed = pressed === name ? null : name;
      for (const other of names) {
        other.setAttribute("aria-pressed", String(front.policies[other.dataset.curve].name === pressed));
      }
      light(pressed);
    });
  }

  // ---- latency percentiles

  function showQuantile(quantile) {
    for (const name of ["ttft", "tpot", "e2e"]) chartOf(name)?.signal("quantile", quantile).runAsync();
  }

  for (const radio of document.querySelectorAll("input[name=quantile]")) {
    radio.addEventListener("change", () => showQuantile(radio.value));
  }

  // ---- tables

  // A table that has nothing to scroll is no stop of the Tab key.
  function stops() {
    for (const box of document.querySelectorAll(".scroll")) {
      const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
      if (scrolls) box.setAttribute("tabindex", "0");
      else box.removeAttribute("tabindex");
    }
  }

  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", stops);

  // ---- what folds: open where there is room and on paper, folded on a telephone

  const roomy = window.matchMedia("print, (min-width: 48rem)");
  const unfold = (open) => {
    for (const part of document.querySelectorAll("details.fold")) part.open = open;
  };
  roomy.addEventListener("change", () => unfold(roomy.matches));
  window.addEventListener("beforeprint", () => unfold(true));
  window.addEventListener("afterprint", () => unfold(roomy.matches));

  // ---- start

  const boxes = [...document.querySelectorAll("[data-chart]")];
  let width = window.innerWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // a phone's address bar comes and goes
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      stops();
      boxes.filter((box) => charts[box.dataset.chart].facet).forEach(draw);
    }, 200);
  });

  unfold(roomy.matches);
  update();
  Promise.all(boxes.map(draw)).then(() => {
    update();
    stops();
    showQuantile(document.querySelector("input[name=quantile]:checked")?.value ?? "p50");
    document.documentElement.dataset.ready = "true";
  });
})();
