"use strict";
// Draws the page from the figures in it. Numbers come thinned: of many points
// in a column of pixels the lowest and the highest (see series.py).
const COLORS = ["#1f6fd0", "#c2410c", "#2a8a4a", "#7a3fb0"];
const KINDS = { train: "#c2410c", wait: "#cfd5dd", generate: "#1f6fd0",
  prefill: "#58b5d8", weights: "#b59a00", checkpoint: "#2f7d32",
  evaluate: "#9c2f78", compile: "#3b3f46", other: "#8d7fa8", idle: "#e7eaee" };
const CHARTS = [
  ["Reward and held-out accuracy", ["reward", "heldout_accuracy",
    "heldout_greedy"]],
  ["Staleness of consumed tokens", ["staleness_mean", "staleness_max"]],
  ["Importance weights", ["behavior_weight", "ratio"]],
  ["Clipped and masked", ["clip_fraction", "behavior_weight_masked",
    "trajectories_masked", "extreme_ratio"]],
  ["Behavior against proximal and target (nats)", ["behavior_proximal_kl",
    "behavior_target_kl"]],
  ["Engine mismatch, mean |log target - log behavior|", ["engine_mismatch"]],
  ["Tokens a second", ["generated_tokens_per_second",
    "trained_tokens_per_second"]],
  ["Share of time the learner waits", ["learner_wait_share"]],
  ["Loss", ["loss"]],
  ["Gradient norm", ["grad_norm"]],
  ["Answers cut, advantages of zero", ["truncated", "zero_advantage"]],
  ["Mixed-version trajectories", ["mixed_version_trajectories"]],
];
let runs = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const chosen = { sample: null, token: 0, color: "version", from: null, to: null };

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "rect", "text", "circle"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
function show(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  return size >= 1000 ? value.toFixed(0) : size >= 1e-3 || size === 0
    ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}
function percent(value) {
  return value === null ? "-" : (100 * value).toFixed(1) + "%";
}
function swatch(color, text) {
  const mark = el("i");
  mark.style.background = color;
  return el("span", { class: "key" }, mark, text);
}
function section(title, id) {
  const heading = el("h2", { id, tabindex: "-1" }, title);
  main.append(heading);
}
function ticks(low, high) {
  const rough = (high - low) / 4 || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(n * step);
  return found;
}
function axes(svg, box, xs, ys) {
  for (const y of ticks(...box.y)) {
    svg.append(el("line", { x1: box.left, x2: box.right, y1: ys(y), y2: ys(y),
      stroke: "#e3e7ec" }));
    svg.append(el("text", { x: box.left - 5, y: ys(y) + 4,
      "text-anchor": "end" }, show(y)));
  }
  for (const x of ticks(...box.x)) {
    svg.append(el("text", { x: xs(x), y: box.bottom + 16,
      "text-anchor": "middle" }, show(x)));
  }
}
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}
function lineChart(parent, title, names) {
  const lines = [];
  names.forEach((name, k) => runs.forEach((run, r) => {
    const points = run.series[name];
    if (points) lines.push({ name, run: r, xs: points[0], ys: points[1],
      color: COLORS[k % COLORS.length], dash: r ? "6 4" : "" });
  }));
  if (!lines.length) return;
  const read = el("p", { class: "read", "aria-live": "polite" });
  const card = el("section", { class: "card chart" }, el("h3", {}, title));
  for (const line of lines) {
    const mark = line.dash ? "repeating-linear-gradient(90deg," + line.color +
      " 0 5px,transparent 5px 8px)" : line.color;
    card.append(swatch(mark, line.name + (runs.length > 1 ?
      line.run ? " (B)" : " (A)" : "")));
  }
  parent.append(card);
  const width = Math.max(card.clientWidth - 24, 200), height = 200;
  const all = lines.flatMap((line) => line.ys);
  let low = all.reduce((a, b) => Math.min(a, b));
  let high = all.reduce((a, b) => Math.max(a, b));
  if (low === high) { low -= Math.abs(low) / 2 || 0.5; high = 2 * high - low; }
  const first = Math.min(...lines.map((line) => line.xs[0]));
  const last = Math.max(...lines.map((line) => line.xs.at(-1)), first + 1);
  const box = { left: 58, right: width - 16, top: 8, bottom: height - 22,
    x: [first, last], y: [low, high] };
  const xs = (x) => box.left + (x - first) / (last - first) *
    (box.right - box.left);
  const ys = (y) => box.bottom - (y - low) / (high - low) *
    (box.bottom - box.top);
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height,
    tabindex: "0", role: "img", "aria-label": title +
      ": arrow keys read the values" });
  axes(svg, box, xs, ys);
  for (const line of lines) {
    const path = line.xs.map((x, i) => (i ? "L" : "M") + xs(x).toFixed(1) +
      " " + ys(line.ys[i]).toFixed(1)).join("");
    svg.append(el("path", { d: path, fill: "none", stroke: line.color,
      "stroke-width": 1.6, "stroke-dasharray": line.dash }));
    if (line.xs.length < 30) line.xs.forEach((x, i) => svg.append(
      el("circle", { cx: xs(x), cy: ys(line.ys[i]), r: 2.5,
        fill: line.color })));
  }
  const cursor = el("line", { y1: box.top, y2: box.bottom, x1: -9, x2: -9,
    stroke: "#1c2330" });
  svg.append(cursor);
  const longest = lines.reduce((a, b) => a.xs.length >= b.xs.length ? a : b);
  let at = longest.xs.length - 1;
  function point(x) {
    cursor.setAttribute("x1", xs(x));
    cursor.setAttribute("x2", xs(x));
    read.textContent = "batch " + show(x) + ": " + lines.map((line) =>
      line.name + (runs.length > 1 ? line.run ? " B" : " A" : "") + " " +
      show(line.ys[nearest(line.xs, x)])).join(", ");
  }
  function move(to) {
    at = Math.min(Math.max(to, 0), longest.xs.length - 1);
    point(longest.xs[at]);
  }
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20,
      Home: -1e9, End: 1e9 }[event.key];
    if (by) { event.preventDefault(); move(at + by); }
  });
  svg.addEventListener("focus", () => move(at));
  svg.addEventListener("pointermove", (event) => {
    const part = (event.offsetX - box.left) / (box.right - box.left);
    move(nearest(longest.xs, first + part * (last - first)));
  });
  card.append(svg, read);
}
function bars(parent, title, label, columns, names) {
  // columns: [x, [[layer, value], ...]]
  const card = el("section", { class: "card chart" }, el("h3", {}, title));
  parent.append(card);
  const width = Math.max(card.clientWidth - 24, 200), height = 180;
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height,
    role: "img", "aria-label": title });
  const total = (column) => column[1].reduce((sum, part) => sum + part[1], 0);
  const top = Math.max(...columns.map(total), 1e-9);
  const box = { left: 58, right: width - 16, top: 8, bottom: height - 22,
    x: [0, 0], y: [0, top] };
  const ys = (y) => box.bottom - y / top * (box.bottom - box.top);
  const first = Math.min(...columns.map((column) => column[0]));
  const count = Math.max(...columns.map((column) => column[0])) - first + 1;
  const each = (box.right - box.left) / count;
  axes(svg, { ...box, x: [1, 0] }, () => 0, ys);
  const every = Math.ceil(count / Math.max(width / 60, 1));
  columns.forEach((column) => {
    const x = box.left + (column[0] - first) * each;
    let below = 0;
    for (const [layer, value] of column[1]) {
      const rect = el("rect", { x: x + each * 0.05, width: each * 0.9,
        y: ys(below + value), height: ys(below) - ys(below + value),
        fill: layerColor(layer) });
      rect.append(document.createElementNS("http://www.w3.org/2000/svg",
        "title"));
      rect.firstChild.textContent = label(column[0]) + ": " + show(value);
      svg.append(rect);
      below += value;
    }
    if ((column[0] - first) % every === 0) svg.append(el("text", {
      x: x + each / 2, y: box.bottom + 16, "text-anchor": "middle" },
      label(column[0])));
  });
  card.append(svg);
  if (names) for (const [layer, name] of names)
    card.append(swatch(layerColor(layer), name));
}
function layerColor(layer) {
  const scale = ["#1f6fd0", "#35a3a0", "#c9a400", "#e0701f", "#c02a3a",
    "#7a3fb0"];
  return scale[Math.min(layer, scale.length - 1)];
}
function tile(parent, name, values) {
  parent.append(el("div", { class: "card tile" },
    el("span", {}, name), el("b", {}, values.join(" | "))));
}
function lastOf(run, name) {
  const points = run.series[name];
  return points ? points[1].at(-1) : null;
}
function overview() {
  section("Overview", "overview");
  if (runs.length > 1) main.append(el("p", {}, "A, solid: " + runs[0].name +
    ", " + runs[0].directory), el("p", {}, "B, dashed: " + runs[1].name +
    ", " + runs[1].directory));
  else main.append(el("p", { class: "soft" }, runs[0].directory));
  const tiles = el("div", { class: "tiles" });
  const each = (get) => runs.map(get);
  tile(tiles, "batches trained", each((run) => show(lastBatch(run)) + "/" +
    run.asked));
  tile(tiles, "reward, last batch", each((run) => show(lastOf(run, "reward"))));
  tile(tiles, "held-out, first to last", each((run) => {
    const points = run.series.heldout_accuracy;
    if (!points) return "-";
    const problems = run.config.evaluation?.problems;
    return show(points[1][0]) + " to " + show(points[1].at(-1)) +
      (problems ? " (" + problems + " questions)" : "");
  }));
  tile(tiles, "seconds of the loop", each((run) =>
    show(Math.round(run.goodput.seconds))));
  tile(tiles, "goodput of the learner", each((run) =>
    percent(run.goodput.goodput)));
  tile(tiles, "sampled tokens trained on", each((run) =>
    percent(run.goodput.token_goodput)));
  tile(tiles, "warnings", each((run) => run.warnings.length));
  main.append(tiles, el("p", { class: "soft" }, "Goodput: the seconds in " +
    "which the learner trained batches that the run kept, over all seconds of " +
    "the loop; where the others went is below. Sampled tokens that are not " +
    "trained on were evaluations', refused as too stale, or not yet consumed."));
}
function lastBatch(run) {
  const points = run.series.reward;
  return points ? points[0].at(-1) : 0;
}
function health() {
  section("Health", "health");
  runs.forEach((run, r) => {
    const who = runs.length > 1 ? "AB"[r] + ": " : "";
    if (!run.warnings.length) main.append(el("p", { class: "card well" }, who +
      "no rule is broken: importance weights near 1, answers end, updates are " +
      "finite, staleness within its limit."));
    for (const warning of run.warnings) main.append(el("p",
      { class: "card warn" }, who, el("code", {}, warning.rule), " " +
      warning.said));
  });
}
function charts() {
  section("Training", "training");
  const longest = Math.max(...runs.map((run) => run.points));
  main.append(el("p", { class: "soft" }, longest > 1200 ? "Of " + longest +
    " rows each line shows the lowest and the highest value of every column " +
    "of pixels; metrics.csv has all of them." :
    "By batch. Point at a chart, or use the arrow keys in it, to read its " +
    "values."));
  const grid = el("div", { class: "grid" });
  main.append(grid);
  for (const [title, names] of CHARTS) lineChart(grid, title, names);
  for (const name of ofTask())
    lineChart(grid, "Task: " + name.slice(4).replaceAll("_", " "), [name]);
}
function ofTask() {
  return [...new Set(runs.flatMap((run) => Object.keys(run.series)))]
    .filter((name) => name.startsWith("env_")).sort();
}
function staleness() {
  section("Staleness and versions", "staleness");
  const grid = el("div", { class: "grid" });
  main.append(grid);
  runs.forEach((run, r) => {
    const who = runs.length > 1 ? "AB"[r] + ": " : "";
    const data = run.staleness;
    if (!data.whole.length) return;
    const total = data.whole.reduce((sum, pair) => sum + pair[1], 0);
    const names = data.whole.map(([s]) => [s, "lag " + s]);
    bars(grid, who + "share of consumed tokens by staleness", String,
      data.whole.map(([s, n]) => [s, [[s, n / total]]]));
    bars(grid, who + "consumed tokens by batch and staleness",
      (c) => String(c * data.width), data.by_batch, names);
    bars(grid, who + "consumed tokens by the version that sampled them",
      (c) => String(c * data.width), data.by_version.map(([v, n]) =>
        [v, [[0, n]]]));
  });
}
function parts() {
  section("Where the time went", "goodput");
  const cells = (tag, run, texts) => el("tr", {}, ...(runs.length > 1 ?
    [run, ...texts] : texts).map((text) => el(tag, {}, text)));
  const table = el("table", { class: "plain" }, cells("th", "run", ["part",
    "what", "seconds", "share"]));
  runs.forEach((run, r) => {
    for (const [part, kinds] of Object.entries(run.goodput.parts))
      for (const [kind, seconds] of Object.entries(kinds))
        table.append(cells("td", "AB"[r], [part, kind, seconds.toFixed(1),
          percent(part === "learner" ? run.goodput.shares[kind]
            : seconds / run.goodput.seconds)]));
    if (run.goodput.lost_seconds) table.append(cells("td", "AB"[r], ["learner",
      "lost to crashes, trained again", run.goodput.lost_seconds.toFixed(1),
      percent(run.goodput.shares.lost)]));
  });
  main.append(el("p", { class: "soft" }, "The learner's share of train is its " +
    "goodput."), el("div", { class: "card" }, table));
}
function timeline() {
  section("Timeline", "timeline");
  const lanes = runs.flatMap((run, r) => run.timeline.map((lane) => ({ ...lane,
    name: (runs.length > 1 ? "AB"[r] + " " : "") + lane.part })));
  if (!lanes.length) return;
  const low = 0; // What came before is not the loop's.
  const high = Math.max(1, ...lanes.map((lane) => lane.bars.at(-1)?.[2] ?? 0));
  const gap = Math.max(...lanes.map((lane) => lane.gap));
  const read = el("p", { class: "read", "aria-live": "polite" });
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label":
    "Timeline: arrow keys move, plus and minus zoom, 0 shows all" });
  const card = el("div", { class: "card" });
  const seen = new Set(lanes.flatMap((lane) => lane.kinds));
  for (const kind of seen) card.append(swatch(KINDS[kind] ?? "#555", kind));
  const act = (text, what) => el("button", { type: "button", onclick: what },
    text);
  card.append(el("div", { class: "bar" }, act("Zoom in", () => zoom(0.5)),
    act("Zoom out", () => zoom(2)), act("Earlier", () => pan(-0.3)),
    act("Later", () => pan(0.3)), act("All", () => view(low, high))), canvas,
    read, el("p", { class: "soft" }, (gap ? "Intervals closer than " + show(gap)
      + " s are joined here. " : "") + "trace.json in the run's directory has " +
      "every interval, for ui.perfetto.dev."));
  main.append(card);
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(card.clientWidth - 26, 200);
  const height = 26 + 44 * lanes.length;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  const ink = canvas.getContext("2d");
  ink.scale(ratio, ratio);
  let from = chosen.from ?? low, to = chosen.to ?? high;
  function view(a, b) {
    const span = Math.min(Math.max(b - a, 1e-4), high - low);
    from = Math.min(Math.max(a, low), high - span);
    to = from + span;
    [chosen.from, chosen.to] = span < high - low ? [from, to] : [null, null];
    draw();
  }
  function zoom(by) {
    const middle = (from + to) / 2, half = (to - from) * by / 2;
    view(middle - half, middle + half);
  }
  function pan(by) { view(from + by * (to - from), to + by * (to - from)); }
  function draw() {
    const xs = (t) => (t - from) / (to - from) * width;
    ink.clearRect(0, 0, width, height);
    ink.font = "12px sans-serif";
    lanes.forEach((lane, i) => {
      const y = 44 * i;
      ink.fillStyle = "#5a6472";
      ink.fillText(lane.name, 2, y + 12);
      for (const [kind, start, end] of lane.bars) {
        if (end < from || start > to) continue;
        ink.fillStyle = KINDS[lane.kinds[kind]] ?? "#555";
        ink.fillRect(xs(start), y + 16, Math.max(xs(end) - xs(start), 0.4), 24);
      }
    });
    ink.fillStyle = "#5a6472";
    for (const t of ticks(from, to)) ink.fillText(show(t) + " s", xs(t),
      height - 6);
    read.textContent = "seconds " + show(from) + " to " + show(to);
    canvas.dataset.from = from;
    canvas.dataset.to = to;
  }
  canvas.addEventListener("keydown", (event) => {
    const what = { ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
      0: () => view(low, high) }[event.key];
    if (what) { event.preventDefault(); what(); }
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8);
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { held = event.offsetX; });
  window.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (held !== null) {
      pan((held - event.offsetX) / width);
      held = event.offsetX;
      return;
    }
    const t = from + event.offsetX / width * (to - from);
    const lane = lanes[Math.floor(event.offsetY / 44)];
    const bar = lane?.bars.find(([, start, end]) => start <= t && t <= end);
    if (bar) read.textContent = lane.name + ": " + lane.kinds[bar[0]] + " " +
      show(bar[1]) + " to " + show(bar[2]) + " s, " + show(bar[2] - bar[1]) +
      " s long";
  });
  draw();
}
function diverging(value, scale) {
  if (value === null || value === undefined) return "#eee";
  const part = Math.min(Math.abs(value) / scale, 1);
  return `hsl(${value < 0 ? 15 : 150} 70% ${(96 - 40 * part).toFixed(0)}%)`;
}
function opening(all) {
  // Of the last batch that samples were kept of, the one with least reward.
  const last = Math.max(...all.map((t) => t.batch));
  const shown = all.map((t, i) => i).filter((i) => all[i].batch === last);
  return shown.reduce((a, b) => all[b].reward < all[a].reward ? b : a);
}
function word(t, i) {
  // Special tokens have no text; which they are, their place says.
  if (t.text[i] !== "") return t.text[i];
  const ends = !t.action[i + 1];
  if (t.action[i] && ends && (i + 1 < t.length || t.stop_reason === "stop"))
    return "\u27e8stop\u27e9";
  return !i && !t.action[i] ? "\u27e8begin\u27e9" : `\u27e8${t.tokens[i]}\u27e9`;
}
function samples() {
  section("Trajectories", "samples");
  const all = runs.flatMap((run, r) => run.samples.flatMap((record) =>
    record.trajectories.map((t) => ({ ...t, batch: record.batch, run: r }))));
  if (!all.length) {
    main.append(el("p", {}, "This run kept none."));
    return;
  }
  const versions = (t) => new Set(t.version.filter((v) => v >= 0)).size;
  const card = el("div", { class: "card" });
  const pick = el("select", { "aria-label": "Trajectory", id: "pick" },
    ...all.map((t, i) => el("option", { value: i }, (runs.length > 1 ?
      "AB"[t.run] + " " : "") + `batch ${t.batch}, prompt ${t.prompt}, member ${
        t.member}: reward ${show(t.reward)}, ${versions(t)} version(s)`)));
  let at = Math.min(chosen.sample ?? opening(all), all.length - 1);
  const turn = (by) => { choose(Math.min(Math.max(at + by, 0),
    all.length - 1)); };
  const mixed = () => {
    for (let i = 1; i <= all.length; i++) {
      const n = (at + i) % all.length;
      if (versions(all[n]) > 1) { choose(n); return; }
    }
  };
  const radios = el("fieldset", {}, el("legend", { class: "soft" },
    "Colour tokens by"));
  for (const [name, text] of [["version", "version"], ["action", "mask"],
    ["gap", "logp gap"], ["advantage", "advantage"]]) {
    const radio = el("input", { type: "radio", name: "color", value: name,
      onchange: () => { chosen.color = name; draw(); } });
    radio.checked = chosen.color === name;
    radios.append(el("label", {}, radio, " " + text));
  }
  const about = el("p", {}), key = el("p", {});
  const box = el("div", { class: "tokens", tabindex: "0", role: "group",
    "aria-label": "Tokens: arrow keys read them" });
  const read = el("p", { class: "read", "aria-live": "polite", id: "token" });
  card.append(el("div", { class: "bar" }, pick,
    el("button", { type: "button", onclick: () => turn(-1) }, "Previous"),
    el("button", { type: "button", onclick: () => turn(1) }, "Next"),
    el("button", { type: "button", onclick: mixed }, "Next of mixed versions")),
    radios, about, key, box, read, el("p", { class: "soft" },
      "Kept to be looked at, not at random: of some batches the one with most " +
      "versions, the lowest and highest reward, and the longest."));
  main.append(card);
  const gap = (t, i) => t.action[i] && t.proximal_logp?.[i] != null &&
    t.behavior_logp[i] !== null ? t.proximal_logp[i] - t.behavior_logp[i] : null;
  function color(t, i, scale) {
    if (chosen.color === "action") return t.action[i] ? "#bfe3c9" : "#eee";
    if (!t.action[i]) return "transparent";
    if (chosen.color === "version") return "hsl(" + (40 + 67 *
      scale.order.indexOf(t.version[i])) % 360 + " 75% 85%)";
    return diverging(chosen.color === "gap" ? gap(t, i) : t.advantage?.[i],
      scale.most);
  }
  function draw() {
    const t = all[at];
    pick.value = at;
    const order = [...new Set(t.version.filter((v) => v >= 0))].sort((a, b) =>
      a - b);
    const values = t.tokens.map((_, i) => Math.abs((chosen.color === "gap" ?
      gap(t, i) : t.advantage?.[i]) ?? 0));
    const scale = { order, most: Math.max(...values, 1e-9) };
    about.textContent = `Trained in batch ${t.batch}; ${t.length} tokens; ` +
      `reward ${show(t.reward)}; ended by ${t.stop_reason}; versions ` +
      order.join(", ") + (t.length > t.tokens.length ? "; the first " +
        t.tokens.length + " are kept" : "");
    key.replaceChildren();
    if (chosen.color === "version") order.forEach((v, i) => key.append(swatch(
      `hsl(${(40 + 67 * i) % 360} 75% 85%)`, "version " + v + ", lag " +
        (t.batch - 1 - v))));
    else if (chosen.color === "action") key.append(swatch("#bfe3c9",
      "action: trained"), swatch("#eee", "given: prompt or observation"));
    else key.append(swatch(diverging(-1, 1), "-" + show(scale.most)),
      swatch(diverging(1, 1), "+" + show(scale.most)), chosen.color === "gap" ?
        "learner's logp less the sampler's" : "advantage");
    box.replaceChildren(...t.text.map((_, i) => {
      const span = el("span", { class: t.action[i] ? "" : "given" },
        word(t, i).replace(/\n/g, "\u21b5\n"));
      span.style.background = color(t, i, scale);
      span.addEventListener("pointerdown", () => point(i));
      return span;
    }));
    point(Math.min(chosen.token, t.tokens.length - 1));
  }
  function point(i) {
    const t = all[at];
    box.children[chosen.token]?.classList.remove("here");
    chosen.token = i;
    box.children[i].classList.add("here");
    read.textContent = `token ${i} (id ${t.tokens[i]}) ${JSON.stringify(
      word(t, i))}: ` + (t.action[i] ? `version ${t.version[i]}, behavior logp ${
        show(t.behavior_logp[i])}, proximal logp ${show(t.proximal_logp?.[i])
        }, gap ${show(gap(t, i))}, advantage ${show(t.advantage?.[i])}`
        : "given, not trained");
  }
  function choose(i) {
    chosen.sample = at = i;
    chosen.token = Math.max(all[i].action.indexOf(1), 0);
    for (const span of box.children) span.classList.remove("here");
    draw();
  }
  pick.addEventListener("change", () => choose(Number(pick.value)));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    point(Math.min(Math.max(chosen.token + by, 0), box.children.length - 1));
  });
  if (chosen.sample === null)
    chosen.token = Math.max(all[at].action.indexOf(1), 0);
  draw();
}
function flat(value, path, into) {
  if (value !== null && typeof value === "object" && !Array.isArray(value))
    for (const [name, inner] of Object.entries(value))
      flat(inner, path ? path + "." + name : name, into);
  else into[path] = JSON.stringify(value);
  return into;
}
function tableOf(title, get) {
  const sides = runs.map((run) => flat(get(run), "", {}));
  const names = [...new Set(sides.flatMap(Object.keys))].sort();
  const table = el("table", {}, el("tr", {}, el("th", {}, "field"),
    ...sides.map((_, r) => el("th", {}, runs.length > 1 ? "AB"[r] : "value"))));
  for (const name of names) {
    const values = sides.map((side) => side[name] ?? "");
    const row = el("tr", {}, el("td", {}, name), ...values.map((value) =>
      el("td", {}, value)));
    if (values.length > 1 && values[0] !== values[1]) row.className = "differs";
    table.append(row);
  }
  main.append(el("details", { class: "card" }, el("summary", {}, title), table));
}
function everything() {
  section("Everything else", "rest");
  const listed = new Set(CHARTS.flatMap(([, names]) => names)
    .concat(ofTask()));
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.series)))]
    .filter((name) => !listed.has(name)).sort();
  const grid = el("div", { class: "grid" });
  const more = el("details", { class: "card" }, el("summary", {},
    names.length + " more metrics"), grid);
  more.addEventListener("toggle", () => {
    if (more.open && !grid.children.length)
      for (const name of names) lineChart(grid, name, [name]);
  });
  main.append(more);
  tableOf("Config" + (runs.length > 1 ? ", differences marked" : ""),
    (run) => run.config);
  tableOf("Environment", (run) => run.environment);
}
function render() {
  const open = [...main.querySelectorAll("details")].map((d) => d.open);
  const at = window.scrollY;
  main.replaceChildren();
  for (const draw of [overview, health, charts, staleness, parts, timeline,
    samples, everything]) draw();
  main.querySelectorAll("details").forEach((d, i) => { d.open = !!open[i]; });
  window.scrollTo(0, at);
}
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) { width = window.innerWidth; render(); }
});
const status = document.getElementById("status");
async function update() {
  try {
    const answer = await fetch("data.json");
    const text = await answer.text();
    if (JSON.stringify(runs) !== text) {
      runs = JSON.parse(text);
      if (!main.contains(document.activeElement)) render();
    }
    status.textContent = "Live; batch " + runs.map(lastBatch).join(" | ") +
      ", " + new Date().toLocaleTimeString();
  } catch (error) {
    status.textContent = "The server of this page has ended.";
    return;
  }
  if (runs.some((run) => run.summary === null)) setTimeout(update, 3000);
  else status.textContent = "Complete.";
}
render();
if (LIVE) update();
else status.textContent = runs.some((run) => run.summary === null) ?
  "Not complete when this page was made." : "Complete.";
