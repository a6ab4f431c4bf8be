// The texts about instructions and idle time, in the panel and in the tooltip.

function listSpanFacts(run, k) {
  const op = OPS[run.op[k]], { length, blamed, since } = measureWait(run, k);
  const list = [["rank", `${run.rank[k]}`]];
  if (op.scope !== "rank") list.push(["stage", `${run.stage[k]}`]);
  if (op.scope === "stage.mb") list.push(["microbatch", `${run.mb[k]}`]);
  list.push(["start", formatTime(run, run.start[k], run.start[k], (run.end[k] - run.start[k]) / 10)], ["length", formatTime(run, run.end[k] - run.start[k])]);
  if (length > run.total * 1e-6) {
    let text = formatTime(run, length);
    if (blamed >= 0) text += `, last for ${nameOf(run, blamed)}` + (run.rank[blamed] === run.rank[k] ? "" : ` on rank ${run.rank[blamed]}`);
    list.push(["waited", text]);
    if (op.lane === 0) list.push(...describeIdleCauses(run, run.rank[k], since, run.start[k]));
  }
  if (op.lane === 0) for (const curve of run.curves) {
    list.push([curve.name, `${formatAmount(valueAt(curve, run.rank[k], (run.start[k] + run.end[k]) / 2), curve.unit)} while it runs`]);
  }
  const twin = counterpartOf(run, k);
  if (twin) {
    const own = (run.end[k] - run.start[k]) / run.scale, its = (twin.run.end[twin.k] - twin.run.start[twin.k]) / twin.run.scale;
    const change = own && its && twin.run.unit === run.unit && Math.abs(own / its - 1) >= 5e-4 ? `, ${own >= its ? "+" : "−"}${formatPercent(Math.abs(own / its - 1))} here` : "";
    list.push([twin.run.label, `${formatTime(twin.run, twin.run.start[twin.k])}, ${formatTime(twin.run, twin.run.end[twin.k] - twin.run.start[twin.k])} long${change}`]);
  }
  return list;
}

function valueAt(curve, rank, t) {
  const { times, values } = curve.ranks[rank], past = findFirst(times, t);
  return past ? values[past - 1] : 0;
}

// Return the same instruction of the other run, or null. Both runs must have the same program, or the same number of stages.
function counterpartOf(run, k) {
  const other = runs.find((r) => r !== run);
  if (!other) return null;
  if (other.digest === run.digest) return { run: other, k };
  const stages = ({ stagesOnRank }) => stagesOnRank.reduce((count, list) => count + list.length, 0), key = (r, j) => `${r.op[j]} ${r.stage[j]} ${r.mb[j]}`;
  if (stages(other) !== stages(run) || OPS[run.op[k]].scope !== "stage.mb") return null;
  other.places ||= new Map(Array.from(other.op, (_, j) => [key(other, j), j]));
  const j = other.places.get(key(run, k));
  return j === undefined ? null : { run: other, k: j };
}

// Return the lines that explain why a rank was idle: one line for each of the 4 longest causes.
function describeIdleCauses(run, rank, from, to) {
  return listIdleCauses(run, rank, from, to).slice(0, 4).map(([cause, length, awaits], nth) => {
    const whom = awaits < 0 ? "" : `: ${nameOf(run, awaits)}` + (run.rank[awaits] === rank ? "" : ` on rank ${run.rank[awaits]}`);
    return [nth ? "" : "because of", `${cause}${whom}, ${formatTime(run, length)}`];
  });
}

function makeTitle(run, k) {
  const head = makeElement("div", undefined, "name"), swatch = makeElement("span", undefined, "swatch");
  swatch.style.background = fillOf(run, k).fill;
  head.append(swatch, makeElement("span", nameOf(run, k)), makeElement("span", OPS[run.op[k]].name.replace(/(?!^)([A-Z])/g, " $1").toLowerCase(), "soft"));
  head.lastChild.style.fontWeight = "400";
  head.lastChild.style.fontSize = "13px";
  return head;
}

function makeTable(list) {
  const made = makeElement("dl", undefined, "pair");
  for (const [name, value] of list) {
    const shown = makeElement("dd");
    shown.append(value);
    made.append(makeElement("dt", name), shown);
  }
  return made;
}

function makeLink(run, k) {
  const made = makeElement("button", `${nameOf(run, k)}, rank ${run.rank[k]}`, "link");
  made.onclick = () => { choose(run, k); bringIntoView(run, k); };
  return made;
}

function describeSelection() {
  const panel = $("selected"), { chosen } = state;
  panel.replaceChildren();
  if (state.gap) {
    describeGap(panel, state.gap);
    return;
  }
  if (!chosen) {
    panel.append(makeElement("h2", "Selected"), makeElement("p", "Click an instruction, or select one with the arrow keys. The page then highlights its critical path and its messages. Click idle time, or press B, to see its cause.", "soft"));
    if (studio) panel.append(makeElement("p", studio.hint, "soft"));
    return;
  }
  const { run, k } = chosen, list = listSpanFacts(run, k), { chain: links, exchanged: { ends } } = state;
  const work = links.filter((j) => isComputeSpan(run, j)).length, ranks = new Set(links.map((j) => run.rank[j])).size;
  if (links.length > 1) list.push(["path", `${links.length} links, ${work} of them work, on ${ranks} rank${ranks > 1 ? "s" : ""}`]);
  panel.append(makeTitle(run, k), makeTable(list));
  const rows = [];
  if (run.criticalPredecessor[k] >= 0) rows.push(["after", makeLink(run, run.criticalPredecessor[k])]);
  for (const end of ends) rows.push([end.back ? "receives from" : "sends to", makeLink(run, end.k)]);
  if (rows.length) panel.append(makeTable(rows.slice(0, 8)));
}

function listGapFacts({ run, rank, since, until, next }) {
  const list = [["from", formatTime(run, since, since, (until - since) / 10)], ["length", formatTime(run, until - since)]];
  if (next >= 0) list.push(["until", nameOf(run, next)]);
  return [...list, ...describeIdleCauses(run, rank, since, until)];
}

// Show an idle interval in the panel: its causes, and the compute instructions of other ranks on the critical path to its end.
function describeGap(panel, idle) {
  const { run, rank, next } = idle, list = listGapFacts(idle);
  panel.append(makeElement("div", `rank ${rank} is idle`, "name"), makeTable(list));
  if (next < 0) panel.append(makeElement("p", "No instruction of this rank follows: the rank waits for the end of the step.", "soft"));
  const links = state.chain.slice(0, -1).filter((j) => isComputeSpan(run, j) && run.rank[j] !== rank && run.end[j] > idle.since);
  const rows = links.slice(-6).reverse().map((j, nth) => [nth ? "after" : "waits for", makeLink(run, j)]);
  if (rows.length) panel.append(makeTable(rows));
  if (links.length > 6) panel.append(makeElement("p", `and ${links.length - 6} more before`, "soft"));
  if (next >= 0) studio?.describeGap(panel, idle);
}

function updateTooltip(event) {
  const tip = $("tip"), { hover } = state;
  tip.hidden = !hover;
  if (!hover) return;
  tip.replaceChildren();
  const { run } = hover;
  if (hover.k !== undefined) tip.append(makeTitle(run, hover.k), makeTable(listSpanFacts(run, hover.k)));
  else if (hover.curve) {
    const held = run.curves.map((curve) => {
      return [curve.name, formatAmount(valueAt(curve, hover.rank, hover.t + run.total * 1e-9), curve.unit)];
    });
    tip.append(makeElement("div", `rank ${hover.rank} at ${formatTime(run, hover.t)}`, "name"), makeTable(held));
  } else {
    const idle = { run, rank: hover.rank, ...findGap(run, hover.rank, hover.t) };
    tip.append(makeElement("div", `rank ${hover.rank} is idle`, "name"), makeTable(listGapFacts(idle)));
  }
  if (runs.length > 1) tip.append(makeElement("div", `run: ${run.label}`, "soft"));
  const { offsetWidth: w, offsetHeight: h } = tip, x = event.offsetX, y = event.offsetY;
  tip.style.left = `${x + w + 24 > view.wide ? Math.max(4, x - w - 14) : x + 14}px`;
  tip.style.top = `${y + h + 24 > view.high ? Math.max(4, y - h - 14) : y + 16}px`;
}
