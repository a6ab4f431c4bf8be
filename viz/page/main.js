// Handle the input of the user, and update the page.

const NO_EXCHANGE = { hops: [], seen: new Set(), ends: [] };
const state = { chosen: null, gap: null, hover: null, cursor: null, found: null, masks: new Map(), chain: [], exchanged: NO_EXCHANGE, marked: null };
const MAX_ROWS_WITH_CURVES = 6; // With more compute lanes, the page does not show curves at the start.
let studio = null; // the members that the studio adds: `grab`, `drag`, `drop`, `paint`, `keys`, `hint` and `describeGap`
let runs = [], selectedMode = 0, isRedrawPlanned = false, drag = null, matches = [], matchIndex = -1;

function redraw() {
  if (isRedrawPlanned) return;
  isRedrawPlanned = true;
  requestAnimationFrame(() => { isRedrawPlanned = false; paint(state); });
}

function makeElement(tag, text, name) {
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
  overview = null;
  if (was !== ratio) readTheme();
  updateLayout();
  redraw();
}

// ---------------------------------------------------------------- selection and search

function updateMasks() {
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
  state.chain = run ? findCriticalPathTo(run, k) : [];
  state.exchanged = run ? findExchange(run, k) : NO_EXCHANGE;
  updateMasks();
  describeSelection();
  redraw();
}

// Select an idle interval of a rank, and show the critical path to the instruction that ends it.
function chooseGap(run, rank, t) {
  const idle = { run, rank, ...findGap(run, rank, t) };
  if (idle.next >= 0) choose(run, idle.next, idle);
  else { choose(null); state.gap = idle; describeSelection(); }
}

// Select the next idle interval of the first run that is shown, in descending order of length.
function chooseNextGap() {
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

function findInstructions(text) {
  const test = text.trim() ? parseQuery(text) : null;
  matches = [];
  matchIndex = -1;
  if (test) for (const run of view.shown)
    for (let k = 0; k < run.op.length; k++) if (test(run, k)) matches.push({ run, k });
  state.found = test ? text : null;
  $("found").textContent = !text.trim() ? "" : test ? `${matches.length}` : "none";
  updateMasks();
  redraw();
}

function chooseMatch(by) {
  if (!matches.length) return;
  matchIndex = (matchIndex + by + matches.length) % matches.length;
  const { run, k } = matches[matchIndex];
  $("found").textContent = `${matchIndex + 1} of ${matches.length}`;
  choose(run, k);
  bringIntoView(run, k, (run.end[k] - run.start[k]) * (view.wide - GUTTER_WIDTH) < 12 * (view.t1 - view.t0));
  redraw();
}

// Select the next or previous span on the lane of the selected span (`along`), or the span at its time on an adjacent lane (`down`).
function moveSelection(along, down) {
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
    if (target !== lane) to = target.index[Math.min(findFirst(target.reach, middle), target.index.length - 1)];
  }
  choose(target.run, to);
  bringIntoView(target.run, to);
}

// ---------------------------------------------------------------- the shown runs

function selectRuns(which) {
  selectedMode = which;
  view.shown = which < runs.length ? [runs[which]] : runs;
  [...$("runs").children].forEach((button, k) => button.setAttribute("aria-pressed", k === which));
  $("facts").replaceChildren(...view.shown.map((run) => {
    const made = makeElement("span");
    if (runs.length > 1) made.append(`${run.label}: `);
    if (run.causalityWarning) made.append(makeElement("b", `${run.causalityWarning}!`), "\u2003");
    for (const [name, value] of [["span", formatTime(run, run.total)], ...(DATA.bound && run === runs[0] ? [["bound", formatTime(run, DATA.bound * run.scale)]] : []), ["bubble", formatPercent(run.bubble)], ["peak in flight", `${Math.max(...run.peakInFlight)}`], ...(run.peakMemory ? [["memory", run.peakMemory]] : [])])
      made.append(`${name}\u2002`, makeElement("b", value), "\u2003");
    return made;
  }));
  overview = null;
  if (state.chosen && !view.shown.includes(state.chosen.run)) choose(null);
  updateLayout();
  findInstructions($("find").value);
  updateLegend();
  redraw();
}

function updateLegend() {
  const seen = new Set();
  for (const run of view.shown) for (const row of run.rows) for (const k of row.index) seen.add(run.op[k]);
  const most = Math.max(...view.shown.map((run) => run.stagesPerRank));
  // Opcodes with the same colours share an entry.
  const alike = new Map();
  for (const op of [...seen].sort((a, b) => a - b)) {
    const own = fills[op].slice(0, OPS[op].isCompute ? Math.min(most, 4) : 1).map(({ fill }) => fill);
    if (!alike.has(`${own}`)) alike.set(`${own}`, { own, ops: [] });
    alike.get(`${own}`).ops.push(OPS[op]);
  }
  const entry = (own, name) => {
    const item = makeElement("li"), swatch = makeElement("i");
    for (const fill of own) {
      const part = makeElement("b");
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
    $("legend").append(entry(DATA.unshardedStages[isDark() ? "dark" : "light"].slice(0, Math.min(most, 4)), DATA.unshardedStages.name));
}

function toggle(name) {
  view[name] = !view[name];
  $(name).setAttribute("aria-pressed", view[name]);
  if (name === "curves") { overview = null; updateLayout(); }
  redraw();
}

function switchTheme(night) {
  host.classList.toggle("dark", night);
  readTheme();
  overview = null;
  updateLegend();
  describeSelection();
  redraw();
}

// ---------------------------------------------------------------- events

function addListeners() {
  const point = (event) => ({ x: event.offsetX, y: event.offsetY });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { x, y } = point(event), unit = event.deltaMode ? 30 : 1, dy = event.deltaY * unit, dx = event.deltaX * unit;
    if (event.ctrlKey) { view.tall = Math.max(0.2, Math.min(6, view.tall * Math.exp(-dy / 400))); updateLayout(); }
    else if (event.shiftKey || x < GUTTER_WIDTH) { view.top += dy || dx; updateLayout(); }
    else if (Math.abs(dx) > Math.abs(dy)) pan(dx / view.wide);
    else zoom(Math.exp(Math.max(-200, Math.min(200, dy)) / 300), x);
    state.hover = findTarget(x, y);
    updateTooltip(event);
    redraw();
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    const { x, y } = point(event);
    canvas.focus({ preventScroll: true });
    canvas.setPointerCapture(event.pointerId);
    drag = { x, y, fromX: x, fromY: y, moved: false, what: y < OVERVIEW_HEIGHT ? "map" : y < HEAD_HEIGHT ? "ruler" : "plot" };
    if (drag.what === "map") toMap(x);
    // A finger scrolls the timeline, also from an instruction.
    if (drag.what === "plot" && event.pointerType !== "touch" && studio?.grab(findTarget(x, y))) drag.what = "move";
  });
  const toMap = (x) => {
    const middle = ((x - GUTTER_WIDTH) / (view.wide - GUTTER_WIDTH)) * longestSpan(), span = view.t1 - view.t0;
    setTimeRange(middle - span / 2, middle + span / 2);
    redraw();
  };
  canvas.addEventListener("pointermove", (event) => {
    const { x, y } = point(event);
    if (!drag) {
      const hover = findTarget(x, y);
      state.cursor = runs.length > 1 && x > GUTTER_WIDTH && y > HEAD_HEIGHT ? tOf(x) : null;
      if (hover || state.hover || state.cursor) { state.hover = hover; updateTooltip(event); redraw(); }
      canvas.style.cursor = y < OVERVIEW_HEIGHT ? "grab" : y < HEAD_HEIGHT ? "col-resize" : hover && hover.k !== undefined ? "pointer" : "default";
      return;
    }
    drag.moved ||= Math.hypot(x - drag.fromX, y - drag.fromY) > 3;
    if (!drag.moved) return;
    state.hover = null;
    updateTooltip(event);
    if (drag.what === "map") toMap(x);
    else if (drag.what === "ruler") state.marked = [drag.fromX, x];
    else if (drag.what === "move") studio.drag(x);
    else {
      canvas.style.cursor = "grabbing";
      pan((drag.x - x) / (view.wide - GUTTER_WIDTH));
      view.top += drag.y - y;
      updateLayout();
    }
    Object.assign(drag, { x, y });
    redraw();
  });
  const drop = (event) => {
    if (!drag) return;
    const { x, y } = point(event), hit = findTarget(x, y);
    if (["plot", "move"].includes(drag.what) && !drag.moved) {
      if (hit && hit.k !== undefined) choose(hit.run, hit.k);
      else if (hit && !hit.curve) chooseGap(hit.run, hit.rank, hit.t);
      else choose(null);
    }
    if (drag.what === "move") studio.drop(drag.moved);
    if (state.marked) {
      const [a, b] = state.marked.map(tOf).sort((p, q) => p - q);
      state.marked = null;
      if (b > a) setTimeRange(a, b);
    }
    drag = null;
    redraw();
  };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", () => { studio?.drop(false); drag = state.marked = null; redraw(); });
  canvas.addEventListener("pointerleave", (event) => { if (!drag) { state.hover = state.cursor = null; updateTooltip(event); redraw(); } });
  canvas.addEventListener("dblclick", (event) => {
    const { x, y } = point(event), hit = findTarget(x, y);
    if (hit && hit.k !== undefined) bringIntoView(hit.run, hit.k, true); else showAllTimes();
    redraw();
  });

  const keys = {
    w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
    a: () => pan(-0.15), d: () => pan(0.15), 0: showAllTimes, Home: showAllTimes,
    PageUp: () => { view.top -= view.high / 2; updateLayout(); }, PageDown: () => { view.top += view.high / 2; updateLayout(); },
    ArrowLeft: () => moveSelection(-1, 0), ArrowRight: () => moveSelection(1, 0), ArrowUp: () => moveSelection(0, -1), ArrowDown: () => moveSelection(0, 1),
    Enter: () => state.chosen && bringIntoView(state.chosen.run, state.chosen.k, true),
    b: chooseNextGap, p: () => toggle("path"), m: () => toggle("messages"), c: () => toggle("curves"),
    t: () => switchTheme(!isDark()), v: () => runs.length > 1 && selectRuns((selectedMode + 1) % (runs.length + 1)),
    "/": () => $("find").focus(), "?": () => $("keys").showModal(),
    ...studio?.keys, Escape: () => { choose(null); $("find").value = ""; findInstructions(""); },
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
  $("find").addEventListener("input", (event) => findInstructions(event.target.value));
  $("find").addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); chooseMatch(event.shiftKey ? -1 : 1); }
  });
  new ResizeObserver(resize).observe($("stage"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => switchTheme(prefersDark()));
  new MutationObserver(() => switchTheme(prefersDark())).observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
}

// Write the title, the summary and the tables into a page whose HTML does not contain them.
function fillDetails({ title, summary, tables }) {
  root.querySelector("h1").textContent = title;
  $("summary").textContent = summary;
  $("tables").replaceChildren(...tables.map(({ caption, headings, rows }) => {
    const made = makeElement("table"), line = (cells, tag) => {
      const row = makeElement("tr");
      row.append(...cells.map((cell, k) => {
        const shown = makeElement(k ? tag : "th", cell);
        if (tag === "th" || !k) shown.scope = tag === "th" ? "col" : "row";
        return shown;
      }));
      return row;
    };
    const top = makeElement("thead"), body = makeElement("tbody");
    top.append(line(headings, "th"));
    body.append(...rows.map((cells) => line(cells, "td")));
    made.append(makeElement("caption", caption), top, body);
    return made;
  }));
}

// Show other runs. If the user has zoomed in, the visible range of time does not change.
async function showData(next) {
  const loaded = await Promise.all(next.runs.map(loadRun)), isZoomedOut = view.t0 <= 0 && view.t1 >= longestSpan();
  for (const run of loaded) run.rows = groupIntoRows(run);
  DATA = next;
  runs = loaded;
  if (next.tables) fillDetails(next);
  const names = runs.length > 1 ? [...runs.map((run) => run.label), "both"] : [];
  $("runs").hidden = !names.length;
  $("runs").replaceChildren(...names.map((name, k) => {
    const made = makeElement("button", name);
    made.onclick = () => selectRuns(k);
    return made;
  }));
  Object.assign(state, { chosen: null, gap: null, hover: null, cursor: null, chain: [], exchanged: NO_EXCHANGE });
  $("tip").hidden = true;
  view.shown = runs;
  ratio = 0; // `resize` then computes colours and sizes again
  resize();
  selectRuns(runs.length > 1 ? runs.length : 0);
  if (isZoomedOut) showAllTimes(); else setTimeRange(view.t0, view.t1);
  describeSelection();
}

// The theme of JupyterLab, if the page is in a notebook, or else that of the system.
function prefersDark() {
  const { jpThemeLight } = document.body.dataset;
  return jpThemeLight ? jpThemeLight === "false" : matchMedia("(prefers-color-scheme: dark)").matches;
}

async function startPage() {
  host.classList.toggle("dark", prefersDark());
  await showData(DATA);
  if (runs.length && runs.length * runs[0].ranks <= MAX_ROWS_WITH_CURVES) toggle("curves");
  showAllTimes();
  addListeners();
  host.dataset.ready = "true";
}

startPage().catch((error) => {
  $("stage").replaceChildren(makeElement("p", `This browser cannot show the picture: ${error.message}`, "plain"));
  throw error;
});
