// Positions: the visible range of time, and the lanes of each rank from top to bottom.

const OVERVIEW_HEIGHT = 46, RULER_HEIGHT = 24, GUTTER_WIDTH = 96, HEAD_HEIGHT = OVERVIEW_HEIGHT + RULER_HEIGHT;

const view = { t0: 0, t1: 1, top: 0, tall: 1, shown: [], wide: 1, high: 1, height: 0, lanes: [], blocks: [], find: new Map(),
  curves: false, messages: false, path: false };

const xOf = (t) => GUTTER_WIDTH + ((t - view.t0) / (view.t1 - view.t0)) * (view.wide - GUTTER_WIDTH);
const tOf = (x) => view.t0 + ((x - GUTTER_WIDTH) / (view.wide - GUTTER_WIDTH)) * (view.t1 - view.t0);
// All runs share one time axis, even if only one of them is shown.
const longestSpan = () => Math.max(...runs.map((run) => run.total), 1e-300);

// Return the blocks (one per rank of a run) and their lanes, for compute lanes with a height of `work` pixels.
function layOut(work) {
  const talk = Math.max(2, Math.min(9, Math.round(work * 0.26))), inset = work > 13 ? 2 : 1;
  const curve = Math.max(14, Math.round(work * 0.95)), gap = work > 15 ? 12 : work > 8 ? 5 : 1;
  const lanes = [], blocks = [];
  let y = Math.ceil(gap / 2);
  const ranks = Math.max(...view.shown.map((run) => run.ranks));
  for (let rank = 0; rank < ranks; rank++) {
    view.shown.forEach((run, nth) => {
      if (rank >= run.ranks) return;
      const block = { run, rank, nth, y, work, curve: null, bands: null, lanes: [] };
      const own = run.rows.filter((row) => row.rank === rank);
      const kinds = new Set(run.rows.map((row) => row.lane));
      for (let lane = 0; lane < LANES.length; lane++) {
        if (lane && !kinds.has(lane)) continue;
        const high = lane ? talk : work;
        block.lanes.push({ lane, y, high });
        for (const row of own.filter((row) => row.lane === lane)) {
          const halves = lane && own.some((r) => r.lane === lane && r.isSend !== row.isSend) ? 2 : 1;
          lanes.push({ ...row, block, y: y + (halves === 2 && row.isSend ? high / 2 : 0), high: high / halves });
        }
        y += high + inset;
      }
      if (run.bandRows && run.bands.length) {
        const high = Math.max(2, Math.round(talk * 0.9)), rows = run.bandRows;
        block.bands = { y, high, list: run.bands.filter((band) => band.rank === rank) };
        y += high * rows + inset;
      }
      if (view.curves) { // one strip for pairs in flight and device memory, and one for each tier below the device
        const strips = Math.max(1, run.curves.length - 1);
        block.curve = { y, high: curve, strips };
        y += strips * (curve + inset);
        block.curve.pitch = curve + inset;
      }
      block.high = y - block.y - inset;
      blocks.push(block);
      y += nth < view.shown.length - 1 ? Math.min(gap / 3, 3) : 0;
    });
    y += gap;
  }
  return { lanes, blocks, height: y };
}

function updateLayout() {
  const room = view.high - HEAD_HEIGHT - 6;
  let work = 46, made = layOut(work);
  while (made.height > room && work > 5) made = layOut(--work);
  if (view.tall !== 1) made = layOut(Math.max(3, Math.min(90, work * view.tall)));
  Object.assign(view, made);
  view.find = new Map(view.shown.map((run) => [run, new Map()]));
  for (const lane of view.lanes) view.find.get(lane.run).set((lane.rank * LANES.length + lane.lane) * 2 + lane.isSend, lane);
  view.top = Math.max(0, Math.min(view.top, view.height - room));
}

// Set the visible range of time. The range begins at most 2% of the longest span before 0, and ends at most 2% after this span. Its
// length is at least 1e-8 of the longest span.
function setTimeRange(t0, t1) {
  const all = longestSpan(), least = all * 1e-8, span = Math.max(least, Math.min(t1 - t0, all * 1.04));
  const middle = (t0 + t1) / 2, margin = all * 0.02;
  view.t0 = Math.max(-margin, Math.min(middle - span / 2, all + margin - span));
  view.t1 = view.t0 + span;
}

const showAllTimes = () => setTimeRange(-longestSpan() * 0.005, longestSpan() * 1.015);

function zoom(factor, x = (GUTTER_WIDTH + view.wide) / 2) {
  const t = tOf(x);
  setTimeRange(t - (t - view.t0) * factor, t + (view.t1 - t) * factor);
}

const pan = (part) => setTimeRange(view.t0 + part * (view.t1 - view.t0), view.t1 + part * (view.t1 - view.t0));

function laneOf(run, k) {
  const op = OPS[run.op[k]];
  return view.find.get(run)?.get((run.rank[k] * LANES.length + op.lane) * 2 + (op.isSend ? 1 : 0));
}

// Return the top and the height of a span's box. Two instructions that run together share a box. If the lane of the span is not
// drawn, return the top and the height of the compute lane of its rank.
function boxOf(run, k) {
  const lane = laneOf(run, k);
  if (!lane) {
    const block = view.blocks.find((b) => b.run === run && b.rank === run.rank[k]);
    return block && { y: block.y, high: block.work };
  }
  const half = run.half[k];
  return { y: lane.y + (half === 2 ? lane.high / 2 : 0), high: half ? lane.high / 2 : lane.high };
}

// Return what is at a point: a span, the idle time or the curves of a rank, or null.
function findTarget(x, y) {
  if (x < GUTTER_WIDTH || y < HEAD_HEIGHT) return null;
  const t = tOf(x), near = (3 * (view.t1 - view.t0)) / (view.wide - GUTTER_WIDTH), down = y - HEAD_HEIGHT + view.top;
  const lane = view.lanes.find((l) => down >= l.y && down < l.y + l.high);
  if (lane) {
    const { run } = lane;
    let best = null, least = near;
    for (let j = findFirst(lane.reach, t - near); j < lane.index.length; j++) {
      const k = lane.index[j];
      if (run.start[k] > t + near) break;
      const away = Math.max(run.start[k] - t, t - run.end[k], 0);
      const inHalf = !run.half[k] || run.half[k] === (down - lane.y < lane.high / 2 ? 1 : 2);
      if (inHalf && (away < least || (away === 0 && least > 0))) { best = k; least = away; }
    }
    if (best !== null) return { run, k: best };
  }
  const block = view.blocks.find((b) => down >= b.y && down < b.y + b.high);
  if (!block) return null;
  if (block.curve && down >= block.curve.y) return { run: block.run, rank: block.rank, t, curve: true };
  return down < block.y + block.work && t >= 0 && t <= block.run.total ? { run: block.run, rank: block.rank, t } : null;
}

// Return the idle interval of a rank's compute lane at a time: its start, its end, and the span that ends it, or -1.
function findGap(run, rank, t) {
  const lane = view.lanes.find((l) => l.run === run && l.rank === rank && l.lane === 0);
  let since = 0, next = -1;
  for (const k of lane ? lane.index : []) {
    if (run.start[k] > t) { next = k; break; }
    since = Math.max(since, run.end[k]);
  }
  return { since, until: next >= 0 ? run.start[next] : run.total, next };
}

// Move the view so that it contains a span. With `closer`, also zoom in until the label of the span is readable.
function bringIntoView(run, k, closer) {
  const length = run.end[k] - run.start[k], middle = (run.start[k] + run.end[k]) / 2;
  const span = view.t1 - view.t0;
  if (closer) {
    const wanted = Math.max(length * 12, longestSpan() * 1e-6);
    setTimeRange(middle - wanted / 2, middle + wanted / 2);
  } else if (run.start[k] < view.t0 || run.end[k] > view.t1) setTimeRange(middle - span / 2, middle + span / 2);
  const where = boxOf(run, k), room = view.high - HEAD_HEIGHT;
  if (where && (where.y < view.top || where.y + where.high > view.top + room))
    view.top = Math.max(0, Math.min(where.y - room / 2, view.height - room + 6));
}
