// What a person does, and what is then shown.

const NOTHING = { hops: [], seen: new Set(), ends: [] };
const state = { chosen: null, gap: null, hover: null, cursor: null, found: null, masks: new Map(), chain: [], exchanged: NOTHING, marked: null };
const ROOMY = 6; // lanes of work that leave room for curves
let studio = null; // what the studio adds to this page: `grab`, `drag`, `drop`, `paint`, `keys` and `describeGap`
let runs = [], mode = 0, due = false, drag = null, matches = [], nth = -1;

function redraw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; paint(state); });
}

function make(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function resize() {
  const { width, height } = $("stage").getBoundingClientRect();
  const was = ratio;
  ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  Object.assign(view, { wide: width, high: height });
  small = null;
  if (was !== ratio) theme();
  arrange();
  redraw();
}

// ---------------------------------------------------------------- choosing and finding

function masks() {
  state.masks = new Map();
  const { chosen, found } = state;
  const mask = (run) => {
    if (!state.masks.has(run)) state.masks.set(run, new Uint8Array(run.op.length));
    return state.masks.get(run);
  };
  if (found) for (const { run, k } of matches) mask(run)[k] = 1;
  if (chosen) {
    const own = mask(chosen.run);
    own[chosen.k] = 1;
    for (const k of state.chain) own[k] = 1;
    for (const k of state.exchanged.seen) own[k] = 1;
    for (const [a, b] of state.exchanged.hops) own[a] = own[b] = 1;
  }
}

function choose(run, k, idle = null) {
  state.chosen = run ? { run, k } : null;
  state.gap = idle;
  state.chain = run ? criticalPathTo(run, k) : [];
  state.exchanged = run ? exchanged(run, k) : NOTHING;
  masks();
  describe();
  redraw();
}

// The idle time of a rank, with the chain of the instruction that ends it.
function chooseGap(run, rank, t) {
  const idle = { run, rank, ...gap(run, rank, t) };
  if (idle.next >= 0) choose(run, idle.next, idle);
  else { choose(null); state.gap = idle; describe(); }
}

// The next idle time of the shown run, the longest first.
function nextGap() {
  const [run] = view.shown, list = [];
  if (!run) return;
  for (const { rank, index } of run.rows.filter((row) => row.lane === 0)) {
    let since = 0;
    for (const k of index) {
      if (run.start[k] > since + run.total * 1e-9) list.push({ rank, since, until: run.start[k] });
      since = Math.max(since, run.end[k]);
    }
  }
  list.sort((a, b) => b.until - b.since - a.until + a.since || a.rank - b.rank);
  const now = list.findIndex((g) => state.gap && g.rank === state.gap.rank && g.since === state.gap.since);
  const to = list[(now + 1) % list.length];
  if (to) chooseGap(run, to.rank, (to.since + to.until) / 2);
}

function find(text) {
  const test = text.trim() ? query(text) : null;
  matches = [];
  nth = -1;
  if (test) for (const run of view.shown)
    for (let k = 0; k < run.op.length; k++) if (test(run, k)) matches.push({ run, k });
  state.found = test ? text : null;
  $("found").textContent = !text.trim() ? "" : test ? `${matches.length}` : "none";
  masks();
  redraw();
}

function nextMatch(by) {
  if (!matches.length) return;
  nth = (nth + by + matches.length) % matches.length;
  const { run, k } = matches[nth];
  $("found").textContent = `${nth + 1} of ${matches.length}`;
  choose(run, k);
  show(run, k, (run.end[k] - run.start[k]) * (view.wide - GUTTER) < 12 * (view.t1 - view.t0));
  redraw();
}

// From the chosen one along its lane, or to the nearest in the next lane.
function step(along, down) {
  const { chosen } = state, lanes = view.lanes;
  if (!chosen || !view.shown.includes(chosen.run)) {
    const lane = lanes.find((l) => l.index.length);
    if (lane) choose(lane.run, lane.index[0]);
    return;
  }
  const { run, k } = chosen, lane = laneOf(run, k) || lanes[0];
  let to = k;
  if (along) to = lane.index[lane.index.indexOf(k) + along] ?? k;
  let target = lane;
  if (down) {
    target = lanes[lanes.indexOf(lane) + down] || lane;
    const middle = (run.start[k] + run.end[k]) / 2;
    if (target !== lane) to = target.index[Math.min(first(target.reach, middle), target.index.length - 1)];
  }
  choose(target.run, to);
  show(target.run, to);
}

// ---------------------------------------------------------------- what is shown

function select(which) {
  mode = which;
  view.shown = which < runs.length ? [runs[which]] : runs;
  [...$("runs").children].forEach((button, k) => button.setAttribute("aria-pressed", k === which));
  $("facts").replaceChildren(...view.shown.map((run) => {
    const made = make("span");
    if (runs.length > 1) made.append(`${run.label}: `);
    if (run.causalityWarning) made.append(make("b", `${run.causalityWarning}!`), "\u2003");
    for (const [name, value] of [["span", time(run, run.total)], ...(DATA.bound && run === runs[0] ? [["bound", time(run, DATA.bound * run.scale)]] : []), ["bubble", percent(run.bubble)], ["peak in flight", `${Math.max(...run.peakInFlight)}`], ...(run.peakMemory ? [["memory", run.peakMemory]] : [])])
      made.append(`${name}\u2002`, make("b", value), "\u2003");
    return made;
  }));
  small = null;
  if (state.chosen && !view.shown.includes(state.chosen.run)) choose(null);
  arrange();
  find($("find").value);
  legend();
  redraw();
}

function legend() {
  const seen = new Set();
  for (const run of view.shown) for (const row of run.rows) for (const k of row.index) seen.add(run.op[k]);
  const most = Math.max(...view.shown.map((run) => run.stagesPerRank));
  // What bears one colour has one entry.
  const alike = new Map();
  for (const op of [...seen].sort((a, b) => a - b)) {
    const own = fills[op].slice(0, OPS[op].isCompute ? Math.min(most, 4) : 1).map(({ fill }) => fill);
    if (!alike.has(`${own}`)) alike.set(`${own}`, { own, ops: [] });
    alike.get(`${own}`).ops.push(OPS[op]);
  }
  const entry = (own, name) => {
    const item = make("li"), swatch = make("i");
    for (const fill of own) {
      const part = make("b");
      part.style.background = fill;
      swatch.append(part);
    }
    item.append(swatch, name);
    return item;
  };
  $("legend").replaceChildren(...[...alike.values()].map(({ own, ops }) => {
    const [{ isCompute, text, label }] = ops, brief = new Set(ops.map((op) => op.text.split("_")[0]));
    return entry(own, ops.length > 1 ? [...brief].join(", ") : isCompute ? `${text} ${label}` : label);
  }));
  if (view.shown.some((run) => run.bandRows))
    $("legend").append(entry(DATA.unshardedStages[dark() ? "dark" : "light"].slice(0, Math.min(most, 4)), DATA.unshardedStages.name));
}

function toggle(name) {
  view[name] = !view[name];
  $(name).setAttribute("aria-pressed", view[name]);
  if (name === "curves") { small = null; arrange(); }
  redraw();
}

function switchTheme(night) {
  host.classList.toggle("dark", night);
  theme();
  small = null;
  legend();
  describe();
  redraw();
}

// ---------------------------------------------------------------- events

function listen() {
  const point = (event) => ({ x: event.offsetX, y: event.offsetY });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { x, y } = point(event), unit = event.deltaMode ? 30 : 1, dy = event.deltaY * unit, dx = event.deltaX * unit;
    if (event.ctrlKey) { view.tall = Math.max(0.2, Math.min(6, view.tall * Math.exp(-dy / 400))); arrange(); }
    else if (event.shiftKey || x < GUTTER) { view.top += dy || dx; arrange(); }
    else if (Math.abs(dx) > Math.abs(dy)) pan(dx / view.wide);
    else zoom(Math.exp(Math.max(-200, Math.min(200, dy)) / 300), x);
    state.hover = at(x, y);
    tell(event);
    redraw();
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    const { x, y } = point(event);
    canvas.focus({ preventScroll: true });
    canvas.setPointerCapture(event.pointerId);
    drag = { x, y, fromX: x, fromY: y, moved: false, what: y < MAP ? "map" : y < HEAD ? "ruler" : "plot" };
    if (drag.what === "map") toMap(x);
    if (drag.what === "plot" && studio?.grab(at(x, y))) drag.what = "move";
  });
  const toMap = (x) => {
    const middle = ((x - GUTTER) / (view.wide - GUTTER)) * longest(), span = view.t1 - view.t0;
    look(middle - span / 2, middle + span / 2);
    redraw();
  };
  canvas.addEventListener("pointermove", (event) => {
    const { x, y } = point(event);
    if (!drag) {
      const hover = at(x, y);
      state.cursor = runs.length > 1 && x > GUTTER && y > HEAD ? tOf(x) : null;
      if (hover || state.hover || state.cursor) { state.hover = hover; tell(event); redraw(); }
      canvas.style.cursor = y < MAP ? "grab" : y < HEAD ? "col-resize" : hover && hover.k !== undefined ? "pointer" : "default";
      return;
    }
    drag.moved ||= Math.hypot(x - drag.fromX, y - drag.fromY) > 3;
    if (!drag.moved) return;
    state.hover = null;
    tell(event);
    if (drag.what === "map") toMap(x);
    else if (drag.what === "ruler") state.marked = [drag.fromX, x];
    else if (drag.what === "move") studio.drag(x);
    else {
      canvas.style.cursor = "grabbing";
      pan((drag.x - x) / (view.wide - GUTTER));
      view.top += drag.y - y;
      arrange();
    }
    Object.assign(drag, { x, y });
    redraw();
  });
  const drop = (event) => {
    if (!drag) return;
    const { x, y } = point(event), hit = at(x, y);
    if (["plot", "move"].includes(drag.what) && !drag.moved) {
      if (hit && hit.k !== undefined) choose(hit.run, hit.k);
      else if (hit && !hit.curve) chooseGap(hit.run, hit.rank, hit.t);
      else choose(null);
    }
    if (drag.what === "move") studio.drop(drag.moved);
    if (state.marked) {
      const [a, b] = state.marked.map(tOf).sort((p, q) => p - q);
      state.marked = null;
      if (b > a) look(a, b);
    }
    drag = null;
    redraw();
  };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", () => { studio?.drop(false); drag = state.marked = null; redraw(); });
  canvas.addEventListener("pointerleave", (event) => { if (!drag) { state.hover = state.cursor = null; tell(event); redraw(); } });
  canvas.addEventListener("dblclick", (event) => {
    const { x, y } = point(event), hit = at(x, y);
    if (hit && hit.k !== undefined) show(hit.run, hit.k, true); else fit();
    redraw();
  });

  const keys = {
    w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
    a: () => pan(-0.15), d: () => pan(0.15), 0: fit, Home: fit,
    PageUp: () => { view.top -= view.high / 2; arrange(); }, PageDown: () => { view.top += view.high / 2; arrange(); },
    ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
    Enter: () => state.chosen && show(state.chosen.run, state.chosen.k, true),
    b: nextGap, p: () => toggle("path"), m: () => toggle("messages"), c: () => toggle("curves"),
    t: () => switchTheme(!dark()), v: () => runs.length > 1 && select((mode + 1) % (runs.length + 1)),
    "/": () => $("find").focus(), "?": () => $("keys").showModal(),
    ...studio?.keys, Escape: () => { choose(null); $("find").value = ""; find(""); },
  };
  root.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea"), pressing = event.target.tagName === "BUTTON" && event.key === "Enter";
    if (typing && event.key === "Escape") canvas.focus();
    if (event.ctrlKey || event.metaKey || event.altKey || pressing || $("keys").open || (typing && event.key !== "Escape")) return;
    const act = keys[event.key] || keys[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
    redraw();
  });
  for (const name of ["path", "messages", "curves"]) $(name).onclick = () => toggle(name);
  for (const [name, key] of [["in", "w"], ["out", "s"], ["fit", "0"], ["theme", "t"], ["help", "?"]])
    $(name).onclick = () => { keys[key](); redraw(); };
  $("find").addEventListener("input", (event) => find(event.target.value));
  $("find").addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); nextMatch(event.shiftKey ? -1 : 1); }
  });
  new ResizeObserver(resize).observe($("stage"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => switchTheme(event.matches));
}

// Title, words and tables, for a page without them in its HTML.
function fillDetails({ title, summary, tables }) {
  root.querySelector("h1").textContent = title;
  $("summary").textContent = summary;
  $("tables").replaceChildren(...tables.map(({ caption, headings, rows }) => {
    const made = make("table"), line = (cells, tag) => {
      const row = make("tr");
      row.append(...cells.map((cell, k) => {
        const shown = make(k ? tag : "th", cell);
        if (tag === "th" || !k) shown.scope = tag === "th" ? "col" : "row";
        return shown;
      }));
      return row;
    };
    const top = make("thead"), body = make("tbody");
    top.append(line(headings, "th"));
    body.append(...rows.map((cells) => line(cells, "td")));
    made.append(make("caption", caption), top, body);
    return made;
  }));
}

// Show other runs. A person who has zoomed in keeps the times in view.
async function update(next) {
  const loaded = await Promise.all(next.runs.map(load)), isZoomedOut = view.t0 <= 0 && view.t1 >= longest();
  for (const run of loaded) run.rows = rows(run);
  DATA = next;
  runs = loaded;
  if (next.tables) fillDetails(next);
  const names = runs.length > 1 ? [...runs.map((run) => run.label), "both"] : [];
  $("runs").hidden = !names.length;
  $("runs").replaceChildren(...names.map((name, k) => {
    const made = make("button", name);
    made.onclick = () => select(k);
    return made;
  }));
  Object.assign(state, { chosen: null, gap: null, hover: null, chain: [], exchanged: NOTHING });
  $("tip").hidden = true;
  view.shown = runs;
  ratio = 0; // colours and sizes are computed again
  resize();
  select(runs.length > 1 ? runs.length : 0);
  if (isZoomedOut) fit(); else look(view.t0, view.t1);
  describe();
}

async function begin() {
  host.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
  await update(DATA);
  if (runs.length && runs.length * runs[0].ranks <= ROOMY) toggle("curves");
  fit();
  listen();
  host.dataset.ready = "true";
}

begin().catch((error) => {
  $("stage").replaceChildren(make("p", `This browser cannot show the picture: ${error.message}`, "plain"));
  throw error;
});
