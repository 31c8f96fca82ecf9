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
    return view;
  }

  function chartOf(name) {
    const box = document.querySelector(`[data-chart="${name}"]`);
    return box ? views.get(box) : undefined;
  }

  // ---- the read-off

  const base = front.policies[front.base];
  for (const policy of front.policies) policy.users = policy.users.map((value) => value ?? NaN); // JSON has no NaN
  const rows = new Map(front.policies.map((policy, i) => [policy, element(`sold-${i}`)]));

  // Signs stay with their numbers where a cell is narrow.
  const joined = (text) => text.replace(/([≥≤±]) /g, "$1\u00a0");

  // The users to serve; where the field has no such number, it says so, and no GPUs are told.
  const most = Number(demand.max);
  function asked() {
    const users = demand.validity.badInput ? NaN : readings.users(demand.value, most);
    const wrong = Number.isNaN(users);
    demand.setAttribute("aria-invalid", String(wrong));
    const said = wrong ? `GPUs need a whole number of users, from 1 to ${readings.number(most)}.` : "";
    if (element("demand-problem").textContent !== said) element("demand-problem").textContent = said;
    return users;
  }

  // Users and GPUs from a reading; a lower bound of the throughput bounds them too.
  function bounded(row, value, sign) {
    if (!Number.isFinite(value)) return "–";
    return (row.kind === "at_least" ? `${sign} ` : "") + readings.number(value);
  }

  const listed = (found) => found.map((row) => row.policy.name).join(", ");

  function verdict(found, floor, users) {
    const here = `At ${floor} tok/s per user`;
    if (found === null) return `${here} no scheduler sells anything: no measured load is that fast.`;
    const { leader, tied, open, unsure } = found;
    const gpus = readings.gpusFor(front, leader.users, users);
    const bound = leader.kind === "at_least";
    let text = `${here}, ${leader.policy.name} sells the most: ${readings.text(leader)} tok/s per GPU`;
    if (bound) text = `${here}, ${leader.policy.name} sells at least ${readings.number(leader.value)} tok/s per GPU`;
    if (Number.isFinite(gpus)) {
      const least = bound ? "at most " : "";
      text += `; ${readings.number(users)} users need ${least}${readings.number(gpus)} GPUs`;
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
    const users = asked();
    const found = front.policies.map((policy) => readings.sold(front, policy, base, floor));
    const first = readings.best(found);
    for (const row of found) {
      const cells = rows.get(row.policy).cells;
      const leads = first !== null && row === first.leader;
      const close = first !== null && first.tied.includes(row);
      rows.get(row.policy).classList.toggle("best", leads);
      cells[0].querySelector(".tag").textContent = leads ? "most" : close ? "within noise" : "";
      cells[1].textContent = joined(readings.text(row));
      cells[2].textContent = row.policy === base ? "–" : joined(readings.gain(row));
      cells[3].textContent = joined(bounded(row, row.users, "≥"));
      const gpus = readings.gpusFor(front, row.users, users);
      cells[4].textContent = joined(bounded(row, gpus, "≤"));
    }
    element("floor-value").textContent = `${floor} tok/s per user`;
    slider.setAttribute("aria-valuetext", `${floor} tokens per second and user`);
    for (const button of document.querySelectorAll("[data-floor]")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.floor) === floor));
    }
    // Heard once the slider rests, not at every step of it.
    clearTimeout(spoken);
    spoken = setTimeout(() => (element("verdict").textContent = verdict(first, floor, users)), 150);
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

  update();
  Promise.all(boxes.map(draw)).then(() => {
    update();
    stops();
    showQuantile(document.querySelector("input[name=quantile]:checked")?.value ?? "p50");
    document.documentElement.dataset.ready = "true";
  });
})();
