// The studio: controls, code and hand edits on the left of the timeline. A question goes to the process that the user
// started, and its answer is drawn by the scripts of the timeline.

const SETUP = DATA; // `showData` replaces DATA
const TOKEN = new URLSearchParams(location.search).get("token");
const COMPUTES = ["F", "B", "I", "W"];
const EXAMPLE = `from schedir import B, F


def mine(rank, ranks, microbatches):
    warmup = min(ranks - 1 - rank, microbatches)
    return warmup * F + (microbatches - warmup) * (F + B) + warmup * B
`;
// Each control: its name in `fields`, its label, its kind, and the values that it offers.
const GROUPS = [
  ["Schedule", [
    ["schedule", "schedule", "select", SETUP.schedules],
    ["ranks", "ranks", "range", [1, 16, 1]],
    ["microbatches", "microbatches", "range", [1, 64, 1]],
    ["stages_per_rank", "stages/rank", "range", [1, 8, 1]],
    ["placement", "placement", "text", ["loop", "vee", "mirror", "mirror-vee"], "of the schedule"],
    ["other", "compare", "select", ["", ...SETUP.schedules], "nothing"],
  ]],
  ["Costs", [
    ...COMPUTES.map((name) => [name, { F: "F forward", B: "B backward", I: "I input", W: "W weights" }[name], "range", [0, 4, 0.05]]),
    ["send", "message", "range", [0, 2, 0.05]],
    ["factors", "uneven", "text", [], "by stage: 1:1:2"],
    ["other_costs", "other costs", "text", [], "step=1,R=1"],
  ]],
  ["Memory", [
    ["saved", "activations", "text", [], "1GB"],
    ["other_sizes", "other sizes", "text", [], "params=2GB"],
    ["memory_limit", "rank limit", "text", [], "40GB"],
    ["recompute", "recompute", "text", ["all", "half", "fit"], "none"],
    ["offload", "offload", "text", ["all", "half", "fit"], "none"],
  ]],
  ["Parallelism and transport", [
    ["zero", "ZeRO", "select", ["", "1", "2", "3"], "0"],
    ["dp", "replicas", "text", [], "1"],
    ["progress_model", "progress", "select", ["", ...SETUP.progress_models], "per_device"],
    ["overlap", "overlap", "check"],
    ["more", "options", "text", [], "tp=2"],
  ]],
];
const LABELS = Object.fromEntries(GROUPS.flatMap(([, list]) => list));
const SHAPE = ["schedule", "ranks", "microbatches", "stages_per_rank", "placement"];
const PREDICTION = ["other", ...COMPUTES, "send", "factors", "other_costs", "saved", "other_sizes", "memory_limit", "progress_model"];
const TABS = { controls: "Controls", code: "Code", ...(SETUP.challenges.length ? { challenges: "Challenges" } : {}) };
const WRONG_ADDRESS = { fact: "The address contains no valid state, so the page shows the first state of the studio.", hint: "", fields: [], sites: [], picture: "" };
const FROM_TIMELINE = "Replace the code by the order of the timeline";
const SOLVED = "schedir-solved"; // the key of the solved challenges in the browser's storage
const inputs = {}, sliders = {}, solved = readSolved();
let shownState = SETUP.state, answer = SETUP.answer, undoStack = [], redoStack = [], committedState = JSON.stringify(shownState);

// ---------------------------------------------------------------- the state and the controls

const splitFields = (text) => text.split(",").map((part) => part.trim()).filter(Boolean).map((part) => [part.split("=")[0].trim(), part]);

// Return the texts of the controls for a state.
function readState({ options }) {
  const values = {}, { costs = "", sizes = "", ...rest } = options, other = { costs: [], sizes: [] };
  for (const [name, part] of splitFields(costs))
    if ([...COMPUTES, "send"].includes(name)) values[name] = part.slice(part.indexOf("=") + 1).trim();
    else other.costs.push(part);
  for (const [name, part] of splitFields(sizes))
    if (name === "saved") values.saved = part.slice(part.indexOf("=") + 1).trim();
    else other.sizes.push(part);
  const more = [];
  for (const [name, text] of Object.entries(rest))
    if (name in inputs) values[name] = text; else more.push(text === "yes" ? name : `${name}=${text}`);
  return { ...values, other_costs: other.costs.join(","), other_sizes: other.sizes.join(","), more: more.join(" ") };
}

// Return a cost, multiplied by the factor of each stage.
function timesFactors(text, factors) {
  const own = text.split(":"), all = factors.split(":"), hasOther = (list) => list.some((x) => x.trim() === "" || isNaN(x));
  if (hasOther(own) || hasOther(all)) return hasOther(own) ? text : factors; // wrong factors: the answer is an error
  return all.map((factor, k) => +(own[own.length > 1 ? k : 0] * factor).toPrecision(9)).join(":");
}

function writeState() {
  const value = (name) => inputs[name].value.trim(), options = {};
  const costs = COMPUTES.filter(value).map((name) => [name, value(name)]);
  if (value("factors") && !costs.some(([name]) => name === "F")) costs.unshift(["F", "1"]);
  const list = costs.map(([name, text]) => `${name}=${value("factors") ? timesFactors(text, value("factors")) : text}`);
  if (value("send")) list.push(`send=${value("send")}`);
  if (value("other_costs")) list.push(value("other_costs"));
  options.costs = list.join(",");
  options.sizes = [value("saved") && `saved=${value("saved")}`, value("other_sizes")].filter(Boolean).join(",");
  for (const name of ["ranks", "microbatches", "stages_per_rank", "placement", "memory_limit", "recompute", "offload", "zero", "dp", "progress_model"])
    options[name] = value(name);
  if (inputs.overlap.checked) options.overlap = "yes";
  for (const word of value("more").split(/\s+/).filter(Boolean)) {
    const [name, ...text] = word.split("=");
    options[name] = text.length ? text.join("=") : "yes";
  }
  for (const name of Object.keys(options)) if (!options[name]) delete options[name];
  return { ...shownState, other: value("other"), options };
}

function fillControls(state) {
  const values = readState(state);
  for (const [name, input] of Object.entries(inputs)) {
    if (name === "schedule") fillSchedules(state);
    else if (name === "other") input.value = state.other || "";
    else if (name === "overlap") input.checked = state.options.overlap === "yes";
    else input.value = values[name] || "";
    updateSlider(name);
  }
}

function fillSchedules(state) {
  const own = state.run ? "the measured run" : state.program ? "edited by hand" : state.code ? "your code" : "";
  const names = own || SETUP.schedules.includes(state.schedule) ? SETUP.schedules : [state.schedule, ...SETUP.schedules];
  inputs.schedule.replaceChildren(...(own ? [new Option(own, "")] : []), ...names.map((name) => new Option(name, name)));
  inputs.schedule.value = own ? "" : state.schedule;
}

// Set a slider to the number in its text field, or to the default if the text is empty. Other texts disable the slider.
function updateSlider(name) {
  const slider = sliders[name], text = inputs[name].value.trim();
  if (!slider) return;
  const number = text === "" ? defaultOf(name) : Number(text);
  slider.disabled = isNaN(number) || inputs[name].disabled;
  if (slider.disabled) return;
  if (number > +slider.max) slider.max = 2 * number;
  slider.value = number;
}

function defaultOf(name) {
  const cost = (other) => { const text = inputs[other].value.trim(); return text === "" ? NaN : Number(text); };
  const F = isNaN(cost("F")) ? 1 : cost("F");
  if (name === "I" || name === "W") return isNaN(cost("B")) ? F : cost("B") / 2;
  if (name === "B") return 2 * F;
  if (name === "stages_per_rank") return answer.stages / answer.ranks || 1;
  return { F: 1, send: 0, ranks: 4, microbatches: 8 }[name];
}

// ---------------------------------------------------------------- questions

async function sendQuestion(body) {
  if (SETUP.precomputed_answers) {
    const known = !["move", "export", "explain"].some((key) => key in body) && SETUP.precomputed_answers[body.state.schedule];
    return known || { error: { fact: "This page has precomputed timelines. `schedir studio` changes them.", hint: "pip install schedir",
      fields: [], sites: [], picture: "", line: 0, is_refused: "move" in body } };
  }
  try {
    const response = await fetch("/", { method: "POST", headers: { "Content-Type": "application/json", "X-Studio-Token": TOKEN }, body: JSON.stringify(body) });
    if (response.ok) return await response.json();
    return { error: { fact: await response.text(), hint: "", fields: [], sites: [], picture: "", line: 0 } };
  } catch {
    return { error: { fact: "The studio has stopped. Start it again with schedir studio, and open the new address.", hint: "", fields: [], sites: [], picture: "", line: 0, is_server_stopped: true } };
  }
}

// Send a question about the shown state. The studio does not run its code again.
const sendShownQuestion = (body) => sendQuestion({ ...body, state: shownState, run_code: false });

let isAsking = false, pendingQuestion = null, curvesSet = false;
// Ask for a state. While an answer is awaited, only the latest state is kept.
async function requestState(state, runsCode = true) {
  shownState = state;
  pendingQuestion = { state, run_code: runsCode };
  if (isAsking) return;
  isAsking = true;
  while (pendingQuestion) {
    const now = pendingQuestion, late = now.state.code && now.run_code ? setTimeout(showRunning, 300) : 0;
    pendingQuestion = null;
    const got = await sendQuestion(now);
    clearTimeout(late);
    if (pendingQuestion ? !got.error : now.state === shownState) await showAnswer(got, now.state);
  }
  isAsking = false;
  $("run-code").disabled = !SETUP.can_run_code;
}

// Show another complete state: the start of a challenge, or an earlier state. Its code runs only if `runsCode` is true.
async function restoreState(state, runsCode = false) {
  const other = runsCode || state.challenge !== shownState.challenge;
  if (state.code && (runsCode || state.code !== shownState.code)) editor.value = state.code;
  badLine = 0;
  numberLines();
  shownState = state;
  if (other) await clearTimeline();
  fillControls(state);
  await requestState(state, runsCode);
}

// Remove the timeline, so that no old timeline stays below an error.
async function clearTimeline() {
  answer = {};
  showProblem(null);
  await showData({ ...SETUP, title: "", summary: "", tables: [], bound: null });
  showVerdict();
  updateControls();
}

async function showAnswer(got, state) {
  showProblem(got.error);
  if (!got.error) {
    answer = got;
    await showData(got);
    if (got.challenge?.is_solved) saveSolved(state.challenge);
    if (!curvesSet && runs.length * runs[0].ranks <= MAX_ROWS_WITH_CURVES) toggle("curves");
    curvesSet = true;
    updateControls();
  }
  showVerdict();
  showCode(got.error, state);
  showChallenges(got);
  host.dataset.answered = `${+(host.dataset.answered || 0) + 1}`;
}

// Remember the state before a change, for undo.
function commitState() {
  const now = JSON.stringify(shownState);
  if (now === committedState) return;
  undoStack.push(committedState);
  redoStack = [];
  committedState = now;
  showUndo();
  saveAddress();
}

// A browser refuses very long addresses.
const saveAddress = () => committedState.length < 500000 && history.replaceState(null, "", `#${encodeURIComponent(committedState)}`);

async function applyHistory(from, to) {
  if (!from.length) return;
  to.push(committedState);
  committedState = from.pop();
  showUndo();
  saveAddress();
  await restoreState(JSON.parse(committedState));
}

function showUndo() {
  $("undo").disabled = !undoStack.length;
  $("redo").disabled = !redoStack.length;
}

// ---------------------------------------------------------------- the shown answer

// Disable the controls that do not apply to the shown source.
function updateControls() {
  const sourceType = answer.source_type;
  for (const [name, input] of Object.entries(inputs)) {
    const fixed = name !== "schedule" && (SHAPE.includes(name) ? ["draft", "lowered", "run"].includes(sourceType) && !shownState.code
      : name === "other" ? sourceType === "run" : !PREDICTION.includes(name) && ["lowered", "run"].includes(sourceType));
    input.disabled = fixed || (SETUP.precomputed_answers && name !== "schedule");
    input.title = fixed ? "The program defines this. Choose a schedule to change it." : SETUP.help[name] || "";
    if (!fixed || sourceType !== "run") updateSlider(name);
    if (sliders[name]) sliders[name].disabled ||= input.disabled;
  }
  if (answer.ranks && answer.source_type !== "schedule" && !shownState.code) {
    inputs.ranks.value = answer.ranks;
    inputs.microbatches.value = answer.microbatches;
  }
  inputs.stages_per_rank.placeholder = inputs.stages_per_rank.value || !answer.ranks ? "" : `${answer.stages / answer.ranks}`;
}

// Return the names of the controls with the texts that an error is about.
function findControls({ kind, fact, fields }) {
  const all = fields[0] === "other" ? fields : { CostsError: ["costs"], MemoryLimitError: ["memory_limit"] }[kind] || (fact.startsWith("-O: ") ? ["more"] : fields), words = new Set(fact.split(/\W+/)), has = (name) => words.has(name);
  return all.flatMap((field) => {
    if (!["costs", "sizes"].includes(field)) return field in inputs ? [field] : field in SETUP.help ? ["more"] : [];
    const own = field === "costs" ? [...COMPUTES, "send"] : ["saved"], rest = `other_${field}`, named = own.filter((name) => inputs[name].value && has(name));
    return splitFields(inputs[rest].value).some(([name]) => has(name)) ? [rest] : named.length ? [...named, ...(field === "costs" && inputs.factors.value ? ["factors"] : [])] : [...own, ...(field === "costs" ? ["factors"] : []), rest];
  });
}

function showProblem(error, stale = !!error && !error.is_refused) {
  const bar = $("problem"), bad = new Set(error ? findControls(error) : []);
  for (const [name, input] of Object.entries(inputs)) input.setAttribute("aria-invalid", bad.has(name));
  bar.hidden = !error;
  setStale(stale);
  if (!error) return bar.replaceChildren();
  const row = makeElement("div", undefined, "row"), text = makeElement("p");
  text.append(makeElement("b", error.is_refused ? "Not moved: " : ""), nameControls(error.fact));
  const close = makeElement("button", "Close");
  close.onclick = () => { bar.hidden = true; canvas.focus(); };
  row.append(text, close);
  bar.replaceChildren(row);
  if (error.sites.length) {
    const list = makeElement("ul");
    list.append(...error.sites.slice(0, 8).map((site) => makeElement("li", `rank ${site.rank} #${site.index}: ${site.text} ${site.note}`)));
    if (!error.picture) bar.append(list);
  }
  if (error.hint) bar.append(makeElement("p", nameControls(error.hint), "hint"));
  if (error.picture) {
    const image = makeElement("img"), places = error.sites.map((site) => `rank ${site.rank} #${site.index} ${site.text} ${site.note}`);
    image.alt = `The instructions of the ranks: ${places.join("; ")}`;
    image.src = `data:image/svg+xml,${encodeURIComponent(error.picture)}`;
    bar.append(image);
  }
}

// Show that code runs, and that the shown timeline belongs to an earlier state.
function showRunning() {
  showProblem(null);
  setStale(true);
  root.querySelector("aside").classList.remove("stale");
  $("verdict").replaceChildren(makeElement("h2", "Verdict"), makeElement("p", "running…"));
  $("run-code").disabled = true;
  $("code-message").textContent = "";
}

// Replace options of the command line in a message by the labels of the controls.
function nameControls(text) {
  if (text.includes("schedir ")) return text; // a command
  const label = (_, name) => LABELS[name] ?? name;
  return text.replace(/, or sizes=Sizes.*$/, "").replace(/\w+="\w+" \(-O (\w+=\w+)\)/g, "$1").replace(/-O (\w+)/g, label)
    .replace(/--sizes saved=/g, `${LABELS.saved} `).replace(/--memory-limit/g, LABELS.memory_limit);
}

// Mark the shown timeline as that of an earlier state, or remove the mark.
function setStale(stale) {
  for (const element of [$("stage"), $("facts"), root.querySelector("aside")]) element.classList.toggle("stale", stale);
  $("code-from-timeline").disabled = stale || !SETUP.can_run_code;
  $("code-from-timeline").title = stale ? "Mend the error first: the timeline shows an earlier state." : FROM_TIMELINE;
}

function showVerdict() {
  const panel = $("verdict");
  if (!answer.recognition) return panel.replaceChildren();
  const [sentence] = answer.recognition;
  const lines = [makeElement("h2", "Verdict")], proven = makeElement("p", shownState.run ? "A measured run, and its prediction at the mean times."
    : `Complete, and free of deadlock under the progress model ${answer.progress_model}.`);
  if (!shownState.run) proven.title = SETUP.help.progress_model;
  lines.push(proven);
  const found = makeElement("p", `${sentence.toUpperCase()}${answer.recognition.slice(1)}.`);
  if (answer.difference) {
    const [rank, index] = answer.difference, run = shownState.run ? runs[runs.length - 1] : runs[0], jump = makeElement("button", "Show it", "link");
    jump.onclick = () => { const k = run.offsets[rank] + index; choose(run, k); bringIntoView(run, k); };
    found.append(" ", jump);
  }
  lines.push(found);
  const summary = answer.schedule_summary;
  if (summary) lines.push(makeElement("p", `${summary[0].toUpperCase()}${summary.slice(1)}`, "soft"));
  if (answer.comparison) lines.push(makeElement("p", answer.comparison));
  if (!answer.verdict && !shownState.run) lines.push(makeElement("p", "No lower bound is known for a program with these instructions.", "soft"));
  if (answer.verdict) lines.push(makeElement("p", `${answer.verdict[0].toUpperCase()}${answer.verdict.slice(1)}.`));
  if (answer.bound_explanation) {
    const proof = makeElement("details", undefined, "soft proof");
    proof.append(makeElement("summary", "Proof"), makeElement("p", answer.bound_explanation));
    lines.push(proof);
  }
  for (const note of answer.notes) lines.push(makeElement("p", note, "soft"));
  panel.replaceChildren(...lines);
}

// ---------------------------------------------------------------- code

const editor = makeElement("textarea"), lineNumbers = makeElement("pre");
let badLine = 0;

function numberLines() {
  const count = editor.value.split("\n").length;
  lineNumbers.replaceChildren(...Array.from({ length: count }, (_, k) => (k + 1 === badLine ? makeElement("b", `${k + 1}`) : `${k + 1}\n`)));
  lineNumbers.scrollTop = editor.scrollTop;
}

function showCode(error, state) {
  const own = state.code && error && !error.is_server_stopped, message = $("code-message");
  const line = own ? error.line : 0;
  if (line !== badLine) { badLine = line; numberLines(); }
  message.classList.toggle("bad", !!own);
  message.textContent = own ? `${error.line ? `Line ${error.line}: ` : ""}${error.fact}${error.hint ? `\n${error.hint}` : ""}`
    : state.code && !error ? describeCode() : "";
  if (badLine) {
    const top = 10 + (badLine - 1) * 19;
    if (top < editor.scrollTop || top > editor.scrollTop + editor.clientHeight - 19) editor.scrollTop = top - editor.clientHeight / 2;
  }
}

const describeCode = () => (editor.value === shownState.code ? "The timeline shows this code." : "Run shows the timeline of this code.");

function runCode() {
  if (!editor.value.trim()) $("code-message").textContent = "The editor is empty: write a function of (rank, ranks, microbatches).";
  if (!editor.value.trim() || $("run-code").disabled) return;
  const same = shownState.code && editor.value === SETUP.state.code;
  const state = { ...writeState(), code: editor.value, program: "", run: false, function: same ? SETUP.state.function : "" };
  if ((shownState.program || shownState.run) && answer.ranks) state.options = { ...state.options, ranks: `${answer.ranks}`, microbatches: `${answer.microbatches}` };
  showRunning();
  requestState(state);
  fillSchedules(state);
  commitState();
}

// ---------------------------------------------------------------- edits by hand

const editing = { run: null, k: -1, x: 0, target: null };

const canEdit = (run) => run === runs[0] && answer.source_type !== "run" && !$("stage").classList.contains("stale");

// Return the other spans in the row of a span.
function listOtherSpans(run, k) {
  const lane = laneOf(run, k);
  return lane ? [...lane.index].filter((j) => j !== k) : [];
}

// Return the place to which a span is moved at a time: the spans after and before this place, or -1. `same` means no change.
function targetOf(run, k, t) {
  const row = listOtherSpans(run, k), next = row.find((j) => (run.start[j] + run.end[j]) / 2 > t) ?? -1;
  const last = row[row.length - 1] ?? -1, previous = next < 0 ? last : row[row.indexOf(next) - 1] ?? -1;
  const was = row.find((j) => j > k) ?? -1;
  return { next, previous, same: next === was };
}

async function moveSpan(run, k, { next, previous, same }, selects = false) {
  if (same) return;
  const first = run.offsets[run.rank[k]];
  const before = next >= 0 ? next - first : previous - first + 1;
  const identity = [run.rank[k], run.op[k], run.stage[k], run.mb[k]];
  const got = await sendShownQuestion({ move: [identity[0], k - first, before] });
  if (!got.error) {
    shownState = got.state;
    fillControls(shownState);
    commitState();
  }
  await showAnswer(got, shownState);
  if (!selects) return; // a selection fades all unrelated instructions
  const now = runs[0];
  for (let j = 0; j < now.op.length; j++)
    if (now.rank[j] === identity[0] && now.op[j] === identity[1] && now.stage[j] === identity[2] && now.mb[j] === identity[3]) {
      choose(now, j);
      break;
    }
}

// Return the entry of a change that shortens the step. If the change has a state, the entry is a button that shows this state.
function changeOf({ description, effect, state: changed }) {
  if (!changed) return `${description}: ${effect}`;
  const made = makeElement("button", `${description}: ${effect}`, "link");
  made.type = "button";
  made.onclick = () => { restoreState(changed); commitState(); };
  return made;
}

// Move the selected instruction by `by` places in its row.
function shiftSelection(by) {
  const { chosen } = state;
  if (!chosen || !canEdit(chosen.run) || state.gap) return;
  const { run, k } = chosen, row = [...(laneOf(run, k)?.index || [])], to = row.indexOf(k) + by;
  if (to < 0 || to >= row.length) return;
  const rest = listOtherSpans(run, k);
  moveSpan(run, k, { next: rest[to] ?? -1, previous: rest[to - 1] ?? -1, same: false }, true);
}

studio = {
  get hint() { return answer.source_type === "run" ? "" : "Drag an instruction along its rank to move it. An order that cannot work is refused."; },
  grab(hit) {
    if (!hit || hit.k === undefined || !canEdit(hit.run)) return false;
    if (xOf(hit.run.end[hit.k]) - xOf(hit.run.start[hit.k]) < 6) return false;
    Object.assign(editing, { run: hit.run, k: hit.k, target: null });
    return true;
  },
  drag(x) {
    Object.assign(editing, { x, target: targetOf(editing.run, editing.k, tOf(x)) });
    canvas.style.cursor = "grabbing";
  },
  drop(moved) {
    const { run, k, target } = editing;
    Object.assign(editing, { run: null, target: null });
    if (moved && target) moveSpan(run, k, target);
  },
  paint() {
    const { run, k, x, target } = editing, where = target && boxOf(run, k);
    if (!where) return;
    const wide = xOf(run.end[k]) - xOf(run.start[k]), y = where.y - view.top + HEAD_HEIGHT;
    pen.globalAlpha = 0.6;
    pen.fillStyle = fillOf(run, k).fill;
    pen.fillRect(x - wide / 2, y, wide, where.high);
    pen.globalAlpha = 1;
    pen.strokeStyle = colours.accent;
    pen.lineWidth = 1.5;
    pen.strokeRect(x - wide / 2, y, wide, where.high);
    const from = target.previous >= 0 ? run.end[target.previous] : 0, at = target.next >= 0 ? run.start[target.next] : from;
    pen.fillStyle = colours.accent;
    pen.fillRect(xOf((from + at) / 2) - 2, y - 5, 3, where.high + 10);
  },
  keys: { "[": () => shiftSelection(-1), "]": () => shiftSelection(1) },
  async describeGap(panel, idle) {
    const { run, rank, next } = idle, place = makeElement("div", undefined, "soft");
    if (run !== runs[0] && !shownState.run) return; // the second run of a comparison has another program
    place.append(makeElement("p", "Computing what would shorten it …"));
    panel.append(place);
    const got = await sendShownQuestion({ explain: [rank, next - run.offsets[rank]] });
    if (state.gap !== idle) return;
    const lines = [];
    if (got.error) lines.push(makeElement("p", got.error.fact));
    else {
      if (got.gap_costs.length) lines.push(makeElement("h2", "10% less of a cost"), makeTable(got.gap_costs.slice(0, 5).map((each) =>
        [each.cost, `idle ${formatNumber(each.old_gap)} → ${formatNumber(each.new_gap)}, span ${formatNumber(each.span)}`])));
      else lines.push(makeElement("p", "No cost on its chain shortens it by itself."));
      if (got.changes.length) lines.push(makeElement("h2", "Changes, with the time per microbatch that each saves"), makeTable(got.changes.map((each) => [`−${formatPercent(each.saved_share)}`, changeOf(each)])));
      else lines.push(makeElement("p", "No change that schedir tries shortens the step."));
    }
    place.replaceChildren(...lines);
    place.className = "";
  },
};

// ---------------------------------------------------------------- actions of the user

const showStatus = (text) => { $("done").textContent = text; };

async function exportFile(format) {
  const got = await sendShownQuestion({ export: format });
  if (got.error) return showProblem(got.error, $("stage").classList.contains("stale"));
  const away = makeElement("a");
  away.href = URL.createObjectURL(new Blob([got.text], { type: "text/plain" }));
  away.download = got.file;
  away.click();
  setTimeout(() => URL.revokeObjectURL(away.href), 10000);
  showStatus(`saved ${got.file}`);
}

async function copyText(what) {
  let text = location.href;
  if (what === "command") {
    if ($("stage").classList.contains("stale")) return showStatus("Mend the error first: the timeline shows an earlier state.");
    text = answer.command;
    if (!text) return showStatus("schedir compare has no options for this comparison: leave out the placement, or do not edit the order.");
  }
  if (what === "python") {
    const got = await sendShownQuestion({ export: "call" });
    if (got.error) return showProblem(got.error, $("stage").classList.contains("stale"));
    ({ text } = got);
  }
  await navigator.clipboard.writeText(text);
  const [file] = what === "command" && (shownState.program || shownState.code) ? text.split(" ")[2].split(":") : [""];
  showStatus(file ? `copied the command: export ${file} first, then run it`
    : `copied ${{ command: "the command", python: "the Python code", link: "the address" }[what]}`);
}

function makeControl([name, label, kind, values = [], placeholder = ""]) {
  const row = makeElement("div", undefined, kind === "range" ? "control" : "control plain"), title = makeElement("label", label);
  const input = makeElement(kind === "select" ? "select" : "input");
  Object.assign(input, { id: `control-${name}` });
  title.htmlFor = input.id;
  inputs[name] = input;
  if (kind === "select") input.append(...values.map((value) => new Option(value || placeholder, value)));
  else if (kind === "check") input.type = "checkbox";
  else Object.assign(input, { type: "text", placeholder, spellcheck: false, autocomplete: "off" });
  row.append(title);
  if (kind === "range") {
    const slider = (sliders[name] = makeElement("input")), [min, max, step] = values;
    Object.assign(slider, { type: "range", min, max, step, id: `slider-${name}` });
    slider.setAttribute("aria-label", label);
    slider.oninput = () => { input.value = slider.value; handleInput(name); };
    slider.onchange = commitState;
    row.append(slider);
  }
  if (kind === "text" && values.length) {
    const list = makeElement("datalist");
    list.id = `values-${name}`;
    list.append(...values.map((value) => new Option(value, value)));
    input.setAttribute("list", list.id);
    row.append(list);
  }
  input.oninput = () => handleInput(name);
  input.onchange = commitState;
  row.title = SETUP.help[name] || "";
  row.append(input);
  return row;
}

function handleInput(name) {
  if (COMPUTES.includes(name)) COMPUTES.forEach(updateSlider); else updateSlider(name);
  const state = writeState();
  if (name === "schedule") {
    if (!inputs.schedule.value) return;
    Object.assign(state, { schedule: inputs.schedule.value, program: "", code: "", run: false });
    if (state.challenge) {
      const { options } = SETUP.challenges.find((each) => each.name === state.challenge).state;
      for (const option of ["ranks", "microbatches", "stages_per_rank"]) if (options[option]) inputs[option].value = state.options[option] = options[option];
    } else for (const option of ["stages_per_rank", "placement"]) { inputs[option].value = ""; delete state.options[option]; }
    if (shownState.run) Object.assign(state.options, { costs: state.options.costs || "F=1,B=2" });
    fillSchedules(state);
  }
  requestState(state);
}

// Show the list of challenges, and the progress in the selected challenge.
function showChallenges(got) {
  if (!SETUP.challenges.length) return;
  $("challenges-pane").replaceChildren(...SETUP.challenges.map(({ name, title, text, hint, goal, state: first }, nth) => {
    const current = name === shownState.challenge, item = makeElement("section", undefined, current ? "current" : "");
    const begin = makeElement("button", `${solved.has(name) ? "\u2713 " : ""}${nth + 1}. ${title}`, "link");
    begin.id = `challenge-${name}`;
    begin.type = "button";
    begin.setAttribute("aria-current", current);
    begin.onclick = () => startChallenge(first);
    item.append(begin);
    if (!current) return item;
    const more = makeElement("details", undefined, "soft");
    more.append(makeElement("summary", "Hint"), makeElement("p", hint));
    const status = makeElement("p", got.challenge ? got.challenge.text : `The goal is a span of ${goal}. This order is refused.`, got.challenge?.is_solved ? "solved" : "");
    status.id = "challenge-status";
    status.setAttribute("role", "status");
    item.append(makeElement("p", text), status, more, makeButton("leave-challenge", "Leave", "Leave the challenge", () => {
      restoreState(beforeChallenge ? beforeChallenge.state : { ...SETUP.state, challenge: "" });
      if (beforeChallenge) editor.value = beforeChallenge.text;
      numberLines();
      beforeChallenge = null;
      commitState();
    }));
    return item;
  }));
}

let beforeChallenge = null; // the state before the challenges, and the text of the editor

// Solved challenges stay marked when the page is loaded again, if the browser keeps them.
function readSolved() {
  try { return new Set(JSON.parse(localStorage.getItem(SOLVED))); } catch { return new Set(); }
}

function saveSolved(name) {
  solved.add(name);
  try { localStorage.setItem(SOLVED, JSON.stringify([...solved])); } catch { /* the browser keeps nothing */ }
}

async function startChallenge(first) {
  if (!shownState.challenge) beforeChallenge = { state: shownState, text: editor.value };
  if (SETUP.challenges.some(({ state: { code } }) => code && code === editor.value)) editor.value = EXAMPLE;
  const restored = restoreState(first, true);
  commitState();
  await restored;
  $(`challenge-${first.challenge}`).focus();
}

function selectTab(which) {
  for (const name of Object.keys(TABS)) {
    $(`${name}-tab`).setAttribute("aria-selected", name === which);
    $(`${name}-tab`).tabIndex = name === which ? 0 : -1;
    $(`${name}-pane`).hidden = name !== which;
  }
  $("studio").classList.toggle("wide", which === "code");
  numberLines();
}

function makeButton(id, text, label, act) {
  const made = makeElement("button", text);
  Object.assign(made, { id, title: label, type: "button", onclick: act });
  made.setAttribute("aria-label", label);
  return made;
}

function makeMenu(label, items, act) {
  const menu = makeElement("select");
  menu.setAttribute("aria-label", label);
  menu.append(new Option(label, ""), ...items.map(([value, text]) => new Option(text, value)));
  menu.onchange = () => { if (menu.value) act(menu.value); menu.value = ""; };
  return menu;
}

function buildPanel() {
  const panel = makeElement("form"), tabs = makeElement("div", undefined, "tabs"), controls = makeElement("div", undefined, "pane"), code = makeElement("div", undefined, "pane");
  panel.id = "studio";
  panel.setAttribute("aria-label", "Studio");
  panel.onsubmit = (event) => event.preventDefault();
  tabs.setAttribute("role", "tablist");
  const names = Object.keys(TABS), panes = [controls, code, makeElement("div", undefined, "pane")].slice(0, names.length);
  for (const [nth, name] of names.entries()) {
    const pane = panes[nth], tab = makeButton(`${name}-tab`, TABS[name], TABS[name], () => selectTab(name));
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", `${name}-pane`);
    tab.onkeydown = (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
      const to = names[(nth + (event.key === "ArrowRight" ? 1 : names.length - 1)) % names.length];
      selectTab(to);
      $(`${to}-tab`).focus();
    };
    tabs.append(tab);
    Object.assign(pane, { id: `${name}-pane` });
    pane.setAttribute("role", "tabpanel");
  }
  for (const [title, list] of GROUPS) {
    const group = makeElement("section");
    group.append(makeElement("h2", title), ...list.map(makeControl));
    controls.append(group);
  }
  const area = makeElement("div", undefined, "editor"), row = makeElement("div", undefined, "code-actions"), message = makeElement("p");
  editor.id = "editor";
  editor.spellcheck = false;
  editor.setAttribute("aria-label", "Python code of a schedule. Tab indents; Escape, then Tab, leaves the editor.");
  editor.value = SETUP.state.code || EXAMPLE;
  message.id = "code-message";
  message.setAttribute("role", "status");
  area.append(lineNumbers, editor);
  lineNumbers.setAttribute("aria-hidden", "true");
  row.append(makeButton("run-code", "Run", "Run the code (Ctrl+Enter)", runCode),
    makeButton("code-from-timeline", "Start from the timeline", FROM_TIMELINE, async () => {
      const got = await sendShownQuestion({ export: "python" });
      if (got.error) return showProblem(got.error);
      editor.value = got.text;
      editor.oninput();
    }));
  if (!SETUP.can_run_code) message.textContent = "This studio was started with --no-code and runs no code.";
  for (const element of [editor, ...row.children]) element.disabled = !SETUP.can_run_code;
  code.append(area, row, message);
  let leaving = false;
  editor.onscroll = numberLines;
  editor.oninput = () => {
    badLine = 0;
    numberLines();
    $("code-message").classList.remove("bad");
    $("code-message").textContent = describeCode();
  };
  editor.onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); runCode(); }
    if (event.key === "Tab" && !event.shiftKey && !leaving) { event.preventDefault(); document.execCommand("insertText", false, "    "); }
    leaving = event.key === "Escape" || (leaving && event.key === "Shift");
    if (event.key === "Escape") event.stopPropagation();
  };
  const actions = makeElement("div", undefined, "actions"), done = makeElement("output");
  done.id = "done";
  actions.append(makeButton("undo", "Undo", "Undo (Ctrl+Z)", () => applyHistory(undoStack, redoStack)), makeButton("redo", "Redo", "Redo (Ctrl+Shift+Z)", () => applyHistory(redoStack, undoStack)),
    makeMenu("Export", [["sched", "program (.sched)"], ["python", "Python"], ["csv", "torch CSV"]], exportFile),
    makeMenu("Copy", [["command", "as CLI"], ["python", "as Python"], ["link", "address"]], copyText), done);
  panel.append(tabs, ...panes, actions);
  const center = makeElement("div", undefined, "center"), problem = makeElement("div"), verdict = makeElement("section"), stage = $("stage");
  problem.id = "problem";
  problem.setAttribute("role", "alert");
  problem.hidden = true;
  verdict.id = "verdict";
  verdict.setAttribute("aria-live", "polite");
  stage.replaceWith(center);
  center.append(problem, stage);
  center.before(panel);
  root.querySelector("aside").prepend(verdict);
  root.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z" || event.target.matches("input[type=text], textarea")) return;
    event.preventDefault();
    event.shiftKey ? applyHistory(redoStack, undoStack) : applyHistory(undoStack, redoStack);
  });
  const keys = root.querySelector("#keys dl");
  for (const [key, text] of [[["drag, ", makeElement("kbd", "["), " ", makeElement("kbd", "]")], "move an instruction to another place on its rank"],
    [[makeElement("kbd", "Ctrl"), " ", makeElement("kbd", "Z")], "undo; with Shift, redo"]])
    keys.append(makeElement("dt"), makeElement("dd", text)), keys.lastChild.previousSibling.append(...key);
  selectTab(SETUP.state.code ? "code" : "controls");
  tabs.hidden = !!SETUP.precomputed_answers;
  showUndo();
  numberLines();
}

// Return the state in the address. Its code is shown, but runs only after the user presses Run.
function readAddress() {
  if (location.hash.length < 2) return null;
  try {
    const state = JSON.parse(decodeURIComponent(location.hash.slice(1))), { options, code = "" } = state, isObject = typeof options === "object" && !Array.isArray(options);
    return isObject && [code, ...Object.values(options)].every((text) => typeof text === "string") ? state : null;
  } catch { return null; }
}

function beginStudio() {
  buildPanel();
  const given = readAddress();
  fillControls(shownState);
  if (given && JSON.stringify(given) !== committedState) {
    const code = given.code && given.code !== SETUP.state.code;
    if (code) {
      editor.value = given.code;
      selectTab("code");
      given.code = "";
    }
    fillControls(given);
    shownState = given;
    committedState = JSON.stringify(given);
    requestState(given).then(() => { if (code) { $("code-message").textContent = "This code is from the address. Read it, then press Run."; numberLines(); } });
  } else showAnswer(SETUP.answer, shownState).then(() => { if (!given && location.hash.length > 1) showProblem(WRONG_ADDRESS, false); });
}
beginStudio();
