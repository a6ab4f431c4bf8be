// Decode the runs in DATA: their packed columns become typed arrays. All scripts of the page together are the body of one
// function with the arguments `root` (the document, or the shadow root of a widget) and DATA.

const host = root.documentElement || root.host, $ = (id) => root.getElementById(id);
const { ops: OPS, lanes: LANES, causes: CAUSES } = DATA;
const TYPES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array };

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// Convert differences of successive values back to the values, modulo 2^32.
function decodeDeltas(column) {
  for (let k = 1; k < column.length; k++) column[k] += column[k - 1];
  return column;
}

async function loadRun(raw) {
  const buffer = await unpack(raw.packedColumns);
  const column = {};
  for (const [name, [type, at, count]] of Object.entries(raw.columns))
    column[name] = new TYPES[type](buffer, at, count);
  const n = raw.count, tick = raw.tick * raw.scale;
  const begin = decodeDeltas(column.start), start = new Float64Array(n), end = new Float64Array(n);
  const rank = new Uint16Array(n), mb = decodeDeltas(column.mb);
  for (let k = 0; k < n; k++) {
    start[k] = begin[k] * tick;
    end[k] = (begin[k] + column.length[k]) * tick;
  }
  raw.offsets.slice(1).forEach((hi, r) => rank.fill(r, raw.offsets[r], hi));
  const other = {}; // indices of related spans. A column has their distances from the span itself; 0 means none.
  const positions = (name) => column[name].map((distance, k) => (distance ? k + distance : -1));
  for (const name of ["criticalPredecessor", "partner"]) other[name] = positions(name);
  other.needs = Object.keys(column).filter((name) => name.startsWith("need")).map(positions);
  const curves = raw.curves.map((curve, c) => {
    const values = column[`values${c}`], ticks = column[`times${c}`];
    const ranks = curve.offsets.slice(1).map((hi, r) => {
      const lo = curve.offsets[r];
      return { times: Float64Array.from(decodeDeltas(ticks.subarray(lo, hi)), (t) => t * tick), values: values.subarray(lo, hi) };
    });
    return { name: curve.name, unit: curve.unit, most: values.reduce((a, b) => Math.max(a, b), 0), ranks };
  });
  const times = (ticks) => Float64Array.from(decodeDeltas(ticks), (t) => t * tick);
  const gaps = { cause: column.gapCause, awaited: column.gapAwaited, start: times(column.gapStart), end: times(column.gapEnd) };
  const bands = []; // the intervals in which stages are unsharded
  for (const name of ["bandStart", "bandEnd"]) decodeDeltas(column[name]);
  column.bandRank.forEach((rank, k) => bands.push({ rank, row: column.bandRow[k], localStage: column.bandLocalStage[k],
    start: column.bandStart[k] * tick, end: column.bandEnd[k] * tick }));
  return { ...raw, ...other, bands, op: column.op, stage: column.stage, half: column.half, mb, rank, start, end, curves, gaps,
    total: raw.span * raw.scale, hasPairs: column.half.includes(1) };
}

// Return the index of the colour of a span, which depends on its opcode and its local stage.
const SHADES = 8;
const tintIndexOf = (run, k) => run.op[k] * SHADES + (Math.max(run.stagesOnRank[run.rank[k]].indexOf(run.stage[k]), 0) % SHADES);

// Return the rows to draw. A row has the spans of one rank and lane; sends have their own row. `index` has the spans in order of
// their start. `reach` has the latest end of the spans up to each entry. A binary search in `reach` finds the first visible span.
function groupIntoRows(run) {
  const found = new Map();
  for (let k = 0; k < run.op.length; k++) {
    if (run.end[k] <= run.start[k]) continue;
    const op = OPS[run.op[k]];
    const key = (run.rank[k] * LANES.length + op.lane) * 2 + (op.isSend ? 1 : 0);
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(k);
  }
  return [...found].map(([key, list]) => {
    const index = Int32Array.from(list).sort((a, b) => run.start[a] - run.start[b] || a - b);
    const reach = new Float64Array(index.length);
    let most = -Infinity;
    index.forEach((k, j) => { reach[j] = most = Math.max(most, run.end[k]); });
    return { run, rank: Math.floor(key / (2 * LANES.length)), lane: (key >> 1) % LANES.length, isSend: key & 1, index, reach,
      start: Float64Array.from(index, (k) => run.start[k]), end: Float64Array.from(index, (k) => run.end[k]),
      tint: Uint8Array.from(index, (k) => tintIndexOf(run, k)) };
  }).sort((a, b) => a.rank - b.rank || a.lane - b.lane || a.isSend - b.isSend);
}

// Return the index of the first entry of `sorted` that is at least `value`.
function findFirst(sorted, value) {
  let lo = 0, hi = sorted.length;
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (sorted[mid] < value) lo = mid + 1; else hi = mid;
  }
  return lo;
}
