// Relations between instructions: messages, critical paths and waits. Also names, searches and numbers.

const isComputeSpan = (run, k) => OPS[run.op[k]].isCompute;

function nameOf(run, k) {
  const op = OPS[run.op[k]];
  if (op.scope === "stage.mb") return `${op.text} ${run.stage[k]}.${run.mb[k]}`;
  const update = run.mb[k]; // the number of the update or the occurrence. 0 is not written, as in the text of a program.
  if (op.scope === "rank") return op.text + (update ? ` ${update}` : "");
  return `${op.text} ${run.stage[k]}` + (update ? `.${update}` : "");
}

// Return the critical path to a span, in order of time, with the span as the last entry. Of all predecessors of an entry, the
// entry before it is the one that ended last.
function findCriticalPathTo(run, k) {
  const links = [];
  for (; k >= 0; k = run.criticalPredecessor[k]) links.push(k);
  return links.reverse();
}

function findCriticalPath(run) {
  let last = 0;
  for (let k = 1; k < run.end.length; k++) if (run.end[k] > run.end[last]) last = k;
  return run.end.length ? findCriticalPathTo(run, last) : [];
}

// Return all messages as pairs [sending span, receiving span].
function listMessages(run) {
  if (run.messages) return run.messages;
  const list = [];
  for (let k = 0; k < run.op.length; k++) {
    if (OPS[run.op[k]].isSend && run.partner[k] >= 0) list.push([k, run.partner[k]]);
  }
  return (run.messages = list);
}

// Return a map from each span to the spans that need its values.
function findConsumers(run) {
  if (run.consumers) return run.consumers;
  const list = new Map();
  const add = (from, to) => { if (from >= 0) list.has(from) ? list.get(from).push(to) : list.set(from, [to]); };
  for (let k = 0; k < run.op.length; k++) for (const need of run.needs) add(need[k], k);
  return (run.consumers = list);
}

// Find what a span receives from other ranks and sends to them. `hops` has the pairs [giver, receiver] of spans on two ranks,
// `seen` all spans through which the values pass, and `ends` the compute spans on the other ranks.
function findExchange(run, k) {
  const hops = [], seen = new Set([k]), ends = [];
  const walk = (at, back) => {
    const near = back ? run.needs.map((need) => need[at]) : findConsumers(run).get(at) || [];
    const op = OPS[run.op[at]];
    if (op.hasPeer && run.partner[at] >= 0 && op.isSend !== back) {
      const other = run.partner[at];
      hops.push(back ? [other, at] : [at, other]);
      if (!seen.has(other)) { seen.add(other); walk(other, back); }
      return;
    }
    for (const next of near) {
      if (next < 0 || seen.has(next)) continue;
      if (run.rank[next] !== run.rank[at]) hops.push(back ? [next, at] : [at, next]);
      if (isComputeSpan(run, next) && run.rank[next] !== run.rank[k]) { seen.add(next); ends.push({ k: next, back }); }
      if (isComputeSpan(run, next) || OPS[run.op[next]].scope !== "stage.mb") continue;
      seen.add(next);
      walk(next, back);
    }
  };
  walk(k, true);
  walk(k, false);
  return { hops, seen, ends };
}

// Return how long the lane of a span was idle before the span. `blamed` is its predecessor that ended last, or -1.
function measureWait(run, k) {
  const lane = OPS[run.op[k]].lane;
  let before = k - 1;
  const lowest = run.offsets[run.rank[k]];
  while (before >= lowest && (OPS[run.op[before]].lane !== lane || run.end[before] <= run.start[before])) before--;
  const since = before >= lowest ? Math.min(run.end[before], run.start[k]) : 0;
  const blamed = run.half[k] === 2 ? -1 : run.criticalPredecessor[k];
  return { length: run.half[k] === 2 ? 0 : run.start[k] - since, since, blamed };
}

// Return why a rank is idle between two times, as entries [cause, duration, awaited span]. The longest comes first.
function listIdleCauses(run, rank, from, to) {
  const list = [], slack = run.total * 1e-9;
  for (let g = run.gapOffsets[rank]; g < run.gapOffsets[rank + 1]; g++) {
    const length = Math.min(run.gaps.end[g], to) - Math.max(run.gaps.start[g], from);
    if (length > slack) list.push([CAUSES[run.gaps.cause[g]], length, run.gaps.awaited[g]]);
  }
  return list.sort((a, b) => b[1] - a[1]);
}

// Return a test of spans for a query such as "F 2.3", "rank 1", "stage 2", "mb 3", "send_act" or "Forward". A span must match
// all words. Return null if a word is unknown.
function parseQuery(text) {
  const words = text.trim().toLowerCase().split(/[\s,]+/).filter(Boolean);
  const tests = [];
  while (words.length) {
    const word = words.shift();
    const number = /^\d+$/.test(words[0] || "") ? +words[0] : null;
    const op = OPS.findIndex((o) => o.text.toLowerCase() === word || o.name.toLowerCase() === word);
    const at = /^(\d+)\.(\d*)$/.exec(word);
    if (["rank", "stage", "mb", "microbatch"].includes(word)) {
      if (number === null) return null;
      const what = word === "microbatch" ? "mb" : word;
      words.shift();
      tests.push((run, k) => run[what][k] === number && (what === "rank" || OPS[run.op[k]].scope !== "rank")
        && (what !== "mb" || OPS[run.op[k]].scope === "stage.mb"));
    } else if (op >= 0) {
      tests.push((run, k) => run.op[k] === op);
      if (number !== null) { words.shift(); tests.push((run, k) => run.stage[k] === number); }
    } else if (at) {
      tests.push((run, k) => OPS[run.op[k]].scope === "stage.mb" && run.stage[k] === +at[1]
        && (at[2] === "" || run.mb[k] === +at[2]));
    } else {
      const begins = OPS.map((o) => o.text.startsWith(word) || o.name.toLowerCase().startsWith(word));
      if (!begins.includes(true)) return null;
      tests.push((run, k) => begins[run.op[k]]);
    }
  }
  return tests.length ? (run, k) => tests.every((test) => test(run, k)) : null;
}

// ---------------------------------------------------------------- numbers

// Return a number with five digits, or with more if they are needed to show a difference of `fine`.
function formatNumber(x, fine = 0) {
  const digits = x && fine ? Math.ceil(Math.log10(Math.abs(x) / fine)) + 1 : 0;
  return String(+x.toPrecision(Math.max(5, Math.min(digits, 15))));
}

// Return a duration with the unit of the run. If this unit is seconds, use s, ms or µs, whichever fits the duration `of`.
function formatTime(run, x, of = x, fine = 0) {
  x /= run.scale; of *= (1 + 1e-6) / run.scale; fine /= run.scale; // 1e-6: a rounded second still has the unit s
  if (run.unit !== "s") return formatNumber(x, fine) + (run.unit ? ` ${run.unit}` : "");
  const [one, unit] = Math.abs(of) >= 1 ? [1, "s"] : Math.abs(of) >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${formatNumber(x / one, fine / one)} ${unit}`;
}

function formatAmount(x, unit) {
  if (unit !== "B") return formatNumber(x) + (unit ? ` ${unit}` : "");
  const power = Math.min(Math.floor(Math.log10(Math.max(x, 1)) / 3), 4);
  return `${+(x / 1000 ** power).toPrecision(4)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

const formatPercent = (x) => `${(100 * x).toFixed(1)}%`;
