// Draw on the canvas. Spans that are too narrow for a box are drawn as the mean colour of each pixel.

const canvas = $("canvas"), pen = canvas.getContext("2d");
const strip = document.createElement("canvas"), stripPen = strip.getContext("2d");
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif";
let denseLanes = []; // the narrow spans of each lane, summed per pixel. `paintDense` draws and removes them.
let ratio = 1, colours = {}, fills = [], tints = [], tintChannels = null, idleHatch = null, boxHatch = null;

const isDark = () => host.classList.contains("dark");

function readTheme() {
  const style = getComputedStyle(host);
  for (const name of ["back", "panel", "line", "grid", "text", "soft", "hatch", "lane", "accent", "focus", "memory", "host", "disk"])
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  fills = DATA.fills[isDark() ? "dark" : "light"].map((own) => own.map(([fill, ink]) => ({ fill, ink })));
  tints = fills.flatMap((own) => Array.from({ length: SHADES }, (_, k) => own[k % own.length]));
  tintChannels = Uint8Array.from(tints.flatMap(({ fill }) => [1, 3, 5].map((at) => parseInt(fill.slice(at, at + 2), 16))));
  idleHatch = makeHatch(colours.hatch, 1);
  boxHatch = makeHatch("#fff", -1);
}

// Return a pattern of diagonal lines. They rise to the right if `rises` is 1, and to the left if it is -1.
function makeHatch(colour, rises) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8 * ratio;
  const t = tile.getContext("2d");
  t.scale(ratio, ratio);
  t.strokeStyle = colour;
  t.lineWidth = 0.9;
  t.beginPath();
  for (const d of [-8, 0, 8]) { t.moveTo(d - 1, rises > 0 ? 9 : -1); t.lineTo(d + 9, rises > 0 ? -1 : 9); }
  t.stroke();
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

const fillOf = (run, k) => tints[tintIndexOf(run, k)];

// Draw a lane of a rank. A span of 1.5 pixels or more is a box. A narrower span adds its share of each pixel to `denseLanes`. With
// a mask, draw only the spans in it, and draw each as a box.
function paintLane(lane, mask, y = lane.y - view.top + HEAD_HEIGHT) {
  const { run, index, reach, high, tint } = lane, { t0, t1 } = view;
  if (y > view.high || y + high < 0) return;
  const wide = Math.ceil((view.wide - GUTTER_WIDTH) * ratio), scale = (view.wide - GUTTER_WIDTH) / (view.t1 - view.t0);
  let bins = null, low = wide, top = 0;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let j = findFirst(reach, view.t0); j < index.length; j++) {
    const start = lane.start[j];
    if (start > t1) break;
    if (mask && !mask[index[j]]) continue;
    const x = (start - t0) * scale, w = (lane.end[j] - start) * scale, half = run.hasPairs ? run.half[index[j]] : 0;
    if (w * ratio >= 1.5) {
      const k = index[j], fill = tints[tint[j]];
      const left = Math.max(x, -4), right = Math.min(x + w, view.wide - GUTTER_WIDTH + 4);
      const gap = w > 3 && high > 4 ? 1 : w > 1.6 ? 0.5 : 0;
      const by = y + (half === 2 ? high / 2 : 0), bh = half ? high / 2 : high;
      pen.fillStyle = fill.fill;
      if (w > 9 && bh > 12) {
        pen.beginPath();
        pen.roundRect(GUTTER_WIDTH + left, by, right - left - gap, bh, 2.5);
        pen.fill();
      } else pen.fillRect(GUTTER_WIDTH + left, by, Math.max(right - left - gap, 1 / ratio), bh);
      if (OPS[run.op[k]].isHatched && w > 3) {
        pen.fillStyle = boxHatch;
        pen.fillRect(GUTTER_WIDTH + left, by, right - left - gap, bh);
      }
      if (bh >= 11 && w > 12) paintLabel(run, k, left, right - gap, by, bh, fill);
    } else if (mask) {
      pen.fillStyle = tints[tint[j]].fill;
      pen.fillRect(GUTTER_WIDTH + x, y + (half === 2 ? high / 2 : 0), Math.max(w, 1.5 / ratio), half ? high / 2 : high);
    } else {
      bins ||= new Float32Array(wide * 4);
      const a = Math.max(0, x * ratio), b = Math.min(wide, (x + w) * ratio), weight = half ? 0.5 : 1, at = tint[j] * 3;
      for (let bin = a | 0; bin < b; bin++) {
        const part = weight * (Math.min(b, bin + 1) - Math.max(a, bin)), cell = bin * 4;
        bins[cell] += part * tintChannels[at]; bins[cell + 1] += part * tintChannels[at + 1];
        bins[cell + 2] += part * tintChannels[at + 2]; bins[cell + 3] += part;
      }
      low = Math.min(low, a | 0); top = Math.max(top, Math.ceil(b));
    }
  }
  if (bins && top > low) denseLanes.push({ bins, low, top, y, high });
}

// Draw all lanes in `denseLanes` with one call of putImageData, because a call takes longer than its pixels.
function paintDense() {
  if (!denseLanes.length) return;
  const wide = Math.ceil((view.wide - GUTTER_WIDTH) * ratio), image = new ImageData(wide, denseLanes.length), out = image.data;
  denseLanes.forEach(({ bins, low, top }, row) => {
    for (let bin = low; bin < top; bin++) {
      const cell = bin * 4, to = (row * wide + bin) * 4, cover = bins[cell + 3];
      if (!cover) continue;
      for (let c = 0; c < 3; c++) out[to + c] = bins[cell + c] / cover;
      out[to + 3] = 255 * Math.min(cover, 1);
    }
  });
  strip.width = wide;
  strip.height = denseLanes.length;
  stripPen.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  denseLanes.forEach(({ low, top, y, high }, row) =>
    pen.drawImage(strip, low, row, top - low, 1, GUTTER_WIDTH + low / ratio, y, (top - low) / ratio, high));
  denseLanes = [];
}

function paintLabel(run, k, left, right, y, high, fill) {
  const op = OPS[run.op[k]], text = op.isCompute ? `${op.text}${run.mb[k]}` : op.text;
  const hasStageLabel = run.stagesPerRank > 1 && op.isCompute && high >= 25;
  const most = Math.min(13, high * (hasStageLabel ? 0.42 : 0.56)), fits = (right - left - 2) / (text.length * 0.62);
  const size = [most, most * 0.8, most * 0.65].find((size) => size <= fits); // only three sizes, so that the labels of a row look alike
  if (!size || size < 7.5) return;
  pen.fillStyle = fill.ink;
  pen.font = `${size}px ${FONT}`;
  const middle = GUTTER_WIDTH + (Math.max(left, 0) + Math.min(right, view.wide - GUTTER_WIDTH)) / 2;
  pen.fillText(text, middle, y + high * (hasStageLabel ? 0.36 : 0.53));
  if (!hasStageLabel) return;
  pen.globalAlpha *= 0.75;
  pen.font = `${size * 0.72}px ${FONT}`;
  pen.fillText(`s${run.stage[k]}`, middle, y + high * 0.74);
  pen.globalAlpha /= 0.75;
}

function paintCurve(block) {
  const { run, rank } = block, { high, pitch, strips } = block.curve, head = block.curve.y - view.top + HEAD_HEIGHT;
  if (head > view.high || head + strips * pitch < HEAD_HEIGHT) return;
  pen.fillStyle = colours.lane;
  for (let s = 0; s < strips; s++) pen.fillRect(xOf(0), head + s * pitch, xOf(run.total) - xOf(0), high);
  run.curves.forEach((curve, c) => {
    const y = head + Math.max(c - 1, 0) * pitch; // the curves of pairs in flight and of device memory share a strip
    const { times, values } = curve.ranks[rank], up = (v) => y + high - 1 - ((high - 3) * v) / (curve.most || 1);
    const from = Math.max(findFirst(times, view.t0) - 1, 0), line = new Path2D();
    let x = xOf(Math.max(from ? times[from] : 0, view.t0)), low = null, peak = null;
    line.moveTo(x, up(from || findFirst(times, view.t0) ? values[from] : 0));
    for (let j = from; j < times.length && times[j] <= view.t1; j++) {
      const to = xOf(times[j]);
      if (to - x < 0.5 && peak !== null) { peak = Math.max(peak, values[j]); low = Math.min(low, values[j]); continue; }
      if (peak !== null) { line.lineTo(x, up(peak)); line.lineTo(x, up(low)); line.lineTo(x, up(values[j - 1])); }
      line.lineTo(to, up(j ? values[j - 1] : 0));
      line.lineTo(to, up(values[j]));
      x = to; peak = low = values[j];
    }
    const end = xOf(Math.min(run.total, view.t1)), past = findFirst(times, view.t1);
    line.lineTo(end, up(past ? values[past - 1] : 0));
    pen.strokeStyle = colours[c ? curve.name : "focus"];
    pen.lineWidth = 1.25;
    pen.stroke(line);
    line.lineTo(end, y + high); line.lineTo(xOf(Math.max(0, view.t0)), y + high);
    pen.globalAlpha = 0.14;
    pen.fillStyle = pen.strokeStyle;
    pen.fill(line);
    pen.globalAlpha = 1;
  });
}

// Draw an arrow from the start of one span to the end of another.
function paintArrow(run, from, to, strong) {
  const a = boxOf(run, from), b = boxOf(run, to);
  if (!a || !b) return;
  const down = b.y > a.y, x0 = xOf(run.start[from]), x1 = xOf(run.end[to]);
  const y0 = (down ? a.y + a.high : a.y) - view.top + HEAD_HEIGHT, y1 = (down ? b.y : b.y + b.high) - view.top + HEAD_HEIGHT;
  if (Math.max(x0, x1) < GUTTER_WIDTH || Math.min(x0, x1) > view.wide) return;
  const tip = strong ? 6 : 4, bend = (y1 - y0) * 0.45;
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1);
  pen.stroke();
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x1 - tip * 0.55, y1 - Math.sign(bend || 1) * tip);
  pen.lineTo(x1 + tip * 0.55, y1 - Math.sign(bend || 1) * tip);
  pen.fill();
}

function paintArrows(run, list, strong) {
  pen.lineWidth = strong ? 1.8 : 1;
  for (const [from, to] of list) {
    const lane = OPS[run.op[from]].hasPeer ? OPS[run.op[from]].lane : run.op[from] ? 2 : 1;
    pen.strokeStyle = pen.fillStyle = fills[OPS.findIndex((o) => o.lane === lane && o.isSend)][0].fill;
    paintArrow(run, from, to, strong);
  }
}

// Draw a critical path: outline its boxes, and connect each box with the next by a line.
function paintChain(run, links) {
  pen.strokeStyle = pen.fillStyle = colours.accent;
  pen.lineWidth = 2;
  pen.lineJoin = "round";
  const line = new Path2D();
  let last = null;
  for (const k of links) {
    const where = boxOf(run, k);
    if (!where) continue;
    const y = where.y - view.top + HEAD_HEIGHT, x0 = xOf(run.start[k]), x1 = xOf(run.end[k]), middle = y + where.high / 2;
    if (x1 >= GUTTER_WIDTH - 20 && x0 <= view.wide + 20) {
      if (x1 - x0 >= 4 && where.high >= 6) {
        pen.beginPath();
        pen.roundRect(x0 + 0.5, y - 0.5, x1 - x0 - 2, where.high + 1, 2.5);
        pen.stroke();
      } else pen.fillRect(x0, y, Math.max(x1 - x0, 1), where.high);
    }
    if (last && Math.abs(last.y - middle) > 1 && x0 >= GUTTER_WIDTH - 500 && last.x <= view.wide + 500) {
      line.moveTo(last.x, last.y); line.lineTo(x0, middle);
    }
    last = { x: x1, y: middle };
  }
  pen.lineWidth = 1.25;
  pen.stroke(line);
}

function roundInterval(span, about) {
  const raw = span / about, power = 10 ** Math.floor(Math.log10(raw));
  return power * ([1, 2, 5, 10].find((step) => step * power >= raw) || 10);
}

function paintRuler() {
  const run = view.shown.find((r) => r.unit) || view.shown[0], every = roundInterval((view.t1 - view.t0) / run.scale, (view.wide - GUTTER_WIDTH) / 110) * run.scale;
  pen.font = `11px ${FONT}`;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  const unit = run.unit === "s" ? view.t1 - view.t0 : 1;
  pen.fillStyle = colours.soft;
  pen.fillText(run.unit ? "" : "units of cost", 12, OVERVIEW_HEIGHT + RULER_HEIGHT / 2);
  for (let step = Math.max(0, Math.ceil(view.t0 / every)); step * every <= Math.min(view.t1, longestSpan() * 1.0001); step++) {
    const x = Math.round(xOf(step * every) * ratio) / ratio;
    pen.fillStyle = colours.line;
    pen.fillRect(x, OVERVIEW_HEIGHT, 1, RULER_HEIGHT);
    pen.fillStyle = colours.grid;
    pen.fillRect(x, HEAD_HEIGHT, 1, view.high);
    pen.fillStyle = colours.soft;
    pen.fillText(formatTime(run, step * every, unit, every), x + 5, OVERVIEW_HEIGHT + RULER_HEIGHT / 2);
  }
}

// Draw the overview: the compute lanes of the shown runs, with a frame around the visible range of time. The lanes are drawn anew
// only if `overview` is null.
let overview = null;
function paintMap() {
  const wide = view.wide - GUTTER_WIDTH, all = longestSpan();
  if (!overview) {
    overview = document.createElement("canvas");
    overview.width = Math.ceil(wide * ratio); overview.height = Math.ceil((OVERVIEW_HEIGHT - 12) * ratio);
    const kept = { ...view }, main = pen.getTransform();
    const lanes = view.lanes.filter((l) => l.lane === 0), high = (OVERVIEW_HEIGHT - 12) / Math.max(lanes.length, 1);
    Object.assign(view, { t0: 0, t1: all, high: 1e9 });
    pen.clearRect(0, 0, view.wide, kept.high);
    lanes.forEach((lane, j) => paintLane({ ...lane, high: Math.max(high - (high > 3 ? 1 : 0), 0.5) }, null, j * high));
    paintDense();
    overview.getContext("2d").drawImage(canvas, GUTTER_WIDTH * ratio, 0, overview.width, overview.height, 0, 0, overview.width, overview.height);
    Object.assign(view, kept);
    pen.setTransform(main);
    pen.fillStyle = colours.back;
    pen.fillRect(0, 0, view.wide, view.high);
  }
  pen.fillStyle = colours.panel;
  pen.fillRect(0, 0, view.wide, OVERVIEW_HEIGHT);
  pen.drawImage(overview, GUTTER_WIDTH, 6, wide, OVERVIEW_HEIGHT - 12);
  const x0 = GUTTER_WIDTH + (Math.max(view.t0, 0) / all) * wide, x1 = GUTTER_WIDTH + (Math.min(view.t1, all) / all) * wide;
  pen.globalAlpha = 0.72;
  pen.fillStyle = colours.panel;
  pen.fillRect(GUTTER_WIDTH, 0, x0 - GUTTER_WIDTH, OVERVIEW_HEIGHT);
  pen.fillRect(x1, 0, view.wide - x1, OVERVIEW_HEIGHT);
  pen.globalAlpha = 1;
  pen.strokeStyle = colours.focus;
  pen.lineWidth = 1.5;
  pen.strokeRect(x0 + 0.75, 2, Math.max(x1 - x0 - 1.5, 2), OVERVIEW_HEIGHT - 4);
}

function paintGutter() {
  pen.fillStyle = colours.back;
  pen.fillRect(0, HEAD_HEIGHT, GUTTER_WIDTH, view.high);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  let free = -Infinity;
  for (const block of view.blocks) {
    const y = block.y - view.top + HEAD_HEIGHT, two = view.shown.length > 1;
    if (y > view.high || y + block.high < HEAD_HEIGHT) continue;
    const line = y + Math.min(block.work, 26) / 2, roomy = block.work >= 24, right = GUTTER_WIDTH - (two && !roomy ? 4 : 10);
    if (line - free < 12) continue;
    free = line;
    const under = y + Math.min(22, block.work - 5); // ends above the label of the next lane
    pen.fillStyle = colours.text;
    pen.font = `600 ${Math.min(12, Math.max(9, block.work * 0.6))}px ${FONT}`;
    const title = block.nth && two ? "" : `rank ${block.rank}`;
    if (two && !roomy) { pen.textAlign = "left"; pen.fillText(title, 2, line, 36); pen.textAlign = "right"; }
    else pen.fillText(title, right, roomy ? y + 8 : line);
    pen.fillStyle = colours.soft;
    pen.font = `${roomy ? 10.5 : 9}px ${FONT}`;
    const idle = `${formatPercent(block.run.idle[block.rank])} idle`;
    if (two) pen.fillText(block.run.label, right, !roomy ? line : block.nth ? y + 7 : under, roomy ? 62 : right - 40);
    else if (roomy) pen.fillText(idle, right, under);
    pen.font = `10.5px ${FONT}`;
    if (block.curve) block.run.curves.forEach((curve, c) => {
      const strip = Math.max(c - 1, 0) * block.curve.pitch;
      pen.fillStyle = colours[c ? curve.name : "focus"];
      const most = curve.ranks[block.rank].values.reduce((a, b) => Math.max(a, b), 0);
      const roomy = block.curve.high >= 24 || block.run.curves.length < 2;
      const line = c === 1 ? 20 : c ? block.curve.high / 2 : 8;
      if (roomy || c !== 1) pen.fillText(`${curve.name} ${formatAmount(most, curve.unit)}`, GUTTER_WIDTH - 10, block.curve.y + strip - view.top + HEAD_HEIGHT + line, GUTTER_WIDTH - 14);
    });
    pen.fillStyle = colours.soft;
    if (block.work >= 20 && block.bands) {
      pen.font = `9px ${FONT}`;
      pen.fillText("unsharded", GUTTER_WIDTH - 10, block.bands.y + (block.bands.high * block.run.bandRows) / 2 - view.top + HEAD_HEIGHT);
    }
    if (block.work >= 20) for (const { lane, y: top, high } of block.lanes.slice(1)) {
      pen.font = `9px ${FONT}`;
      pen.fillText(LANES[lane], GUTTER_WIDTH - 10, top + high / 2 - view.top + HEAD_HEIGHT);
    }
  }
}

// Draw a band for each stage of a rank while the stage is unsharded.
function paintBands({ run, bands }) {
  const shades = DATA.unshardedStages[isDark() ? "dark" : "light"];
  for (const { row, localStage, start, end } of bands.list) {
    const left = Math.max(xOf(start), GUTTER_WIDTH - 4), right = Math.min(xOf(end), view.wide + 4);
    if (right <= left) continue;
    pen.fillStyle = shades[localStage % shades.length];
    pen.fillRect(left, bands.y + row * bands.high - view.top + HEAD_HEIGHT, Math.max(right - left - 0.5, 1 / ratio), bands.high - (bands.high > 3 ? 1 : 0));
  }
}

// Draw everything. `state` has the selected span, the span under the pointer, and the search results.
function paint(state) {
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = colours.back;
  pen.fillRect(0, 0, view.wide, view.high);
  if (!view.shown.length) return;
  paintMap();
  paintRuler();
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER_WIDTH, HEAD_HEIGHT, view.wide - GUTTER_WIDTH, view.high - HEAD_HEIGHT);
  pen.clip();
  for (const block of view.blocks) for (const { lane, y, high } of block.lanes) {
    const top = y - view.top + HEAD_HEIGHT;
    if (top > view.high || top + high < HEAD_HEIGHT) continue;
    pen.fillStyle = colours.lane;
    pen.fillRect(xOf(0), top, xOf(block.run.total) - xOf(0), high);
    if (lane || high < 7) continue;
    pen.fillStyle = idleHatch;
    pen.fillRect(xOf(0), top, xOf(block.run.total) - xOf(0), high);
  }
  const { chosen, hover, found } = state;
  pen.globalAlpha = found || chosen ? 0.25 : 1;
  for (const lane of view.lanes) paintLane(lane, null);
  for (const block of view.blocks) if (block.bands) paintBands(block);
  paintDense();
  pen.globalAlpha = 1;
  for (const lane of view.lanes) {
    const mask = state.masks.get(lane.run);
    if (mask) paintLane(lane, mask);
  }
  for (const block of view.blocks) if (block.curve) paintCurve(block);
  if (view.messages) for (const run of view.shown) {
    const near = visibleMessages(run);
    if (near) paintArrows(run, near, false);
  }
  if (view.path) for (const run of view.shown) paintChain(run, (run.criticalPath ||= findCriticalPath(run)));
  if (chosen) {
    paintChain(chosen.run, state.chain);
    if (view.shown.includes(chosen.run)) paintArrows(chosen.run, state.exchanged.hops, true);
  }
  for (const one of [hover, chosen]) if (one && one.k !== undefined) {
    paintOutline(one, one === chosen);
    const twin = view.shown.length > 1 && counterpartOf(one.run, one.k);
    if (twin) paintOutline(twin, one === chosen);
  }
  if (state.cursor) { // a vertical line at the time of the pointer, through all runs
    pen.fillStyle = colours.focus;
    pen.fillRect(xOf(state.cursor), HEAD_HEIGHT, 1, view.high);
  }
  if (state.gap) paintGapOutline(state.gap);
  studio?.paint();
  pen.restore();
  paintGutter();
  pen.fillStyle = colours.line;
  pen.fillRect(0, OVERVIEW_HEIGHT, view.wide, 1);
  pen.fillRect(0, HEAD_HEIGHT - 1, view.wide, 1);
  if (state.marked) {
    const [a, b] = state.marked;
    pen.globalAlpha = 0.18;
    pen.fillStyle = colours.focus;
    pen.fillRect(Math.min(a, b), OVERVIEW_HEIGHT, Math.abs(b - a), view.high);
    pen.globalAlpha = 1;
  }
  const room = view.high - HEAD_HEIGHT;
  if (view.height > room) {
    pen.fillStyle = colours.line;
    pen.fillRect(view.wide - 7, HEAD_HEIGHT + (room * view.top) / view.height, 5, (room * room) / view.height);
  }
}

const MAX_ARROWS = 1500; // more arrows would hide the chart
function visibleMessages(run) {
  const near = listMessages(run).filter(([a, b]) => run.end[b] >= view.t0 && run.start[a] <= view.t1);
  return near.length <= MAX_ARROWS ? near : null;
}

function paintGapOutline({ run, rank, since, until }) {
  const block = view.blocks.find((b) => b.run === run && b.rank === rank);
  if (!block) return;
  pen.strokeStyle = colours.text;
  pen.lineWidth = 2.5;
  pen.setLineDash([5, 3]);
  pen.strokeRect(xOf(since), block.y - view.top + HEAD_HEIGHT - 1, xOf(until) - xOf(since) - 1, block.work + 2);
  pen.setLineDash([]);
}

function paintOutline({ run, k }, strong) {
  const where = view.shown.includes(run) && boxOf(run, k);
  if (!where) return;
  const x = xOf(run.start[k]), w = Math.max(xOf(run.end[k]) - x, 2);
  pen.strokeStyle = strong ? colours.text : colours.focus;
  pen.lineWidth = strong ? 2.5 : 2;
  pen.strokeRect(x - 0.5, where.y - view.top + HEAD_HEIGHT - 1, w, where.high + 2);
}
