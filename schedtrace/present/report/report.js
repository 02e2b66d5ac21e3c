"use strict";
// The timeline of the report page. Times are microseconds; a "row" is a step, or several of a very long trace.
(() => {
const DATA = JSON.parse(document.getElementById("data").textContent);
const { states: STATES, by_step: BY_STEP, first_cause: FIRST_CAUSE } = DATA;
const COLOURED = ["kv_blocks", "max_num_seqs", "token_budget", "preempted_this_step"];
const WORK = ["decode", "prefill", "recompute"];
const NOBODY = -1;                       // of causes: no request was refused
const MOST_LANES = 200, FONT = "12px system-ui, sans-serif";
const NOTHING = "Click a step or a request.";
const byId = id => document.getElementById(id);
const number = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const seconds = us => (us / 1e6).toFixed(Math.max(1, Math.min(6, 7 - Math.floor(Math.log10(Math.max(1, view.end - view.begin))))));
const percent = share => Number.isFinite(share) ? `${number.format(100 * share)} %` : "-";
const duration = us => us >= 1e6 ? `${(us / 1e6).toFixed(2)} s` : `${number.format(us / 1e3)} ms`;
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

let engines = [], stories = { at: [], html: [] }, colours = {}, finding = 0, chosen = null, fitted = false;
const whole = { begin: 0, end: 1 }, view = { begin: 0, end: 1 };

// ---- data ---------------------------------------------------------------------------------------------

async function unpacked() {
  const bytes = Uint8Array.from(atob(byId("packed").textContent.trim()), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const columns = {};
  let at = 0;
  for (const [name, count, written] of DATA.columns) {
    if (written === "texts") {
      const text = new TextDecoder().decode(raw.subarray(at, at += count));
      columns[name] = text ? text.split("\0") : [];
      continue;
    }
    const values = columns[name] = new Float64Array(count);
    for (let i = 0, before = 0; i < count; i++) {
      let code = 0, unit = 1, byte;
      do { byte = raw[at++]; code += (byte & 127) * unit; unit *= 128; } while (byte > 127);
      const value = code % 2 ? -(code + 1) / 2 : code / 2;
      before = values[i] = written === "differences" ? before + value : value;
    }
  }
  return columns;
}

// One engine with its columns, running sums for means and pyramids for peaks.
function engineOf(told, index, columns) {
  const get = name => columns[`${index}.${name}`];
  const gap = get("gap"), length = get("length"), rows = gap.length;
  const begin = new Float64Array(rows), end = new Float64Array(rows), until = new Float64Array(rows);
  for (let i = 0, before = 0; i < rows; i++) { begin[i] = before + gap[i]; end[i] = before = begin[i] + length[i]; }
  for (let i = 0; i < rows; i++) until[i] = i + 1 < rows ? begin[i + 1] : end[i];
  const e = { ...told, index, rows, begin, end, until, label: labelOf(told), sums: {}, peaks: {} };
  for (const name of ["step", "count", "trial", "requests", "running", "waiting", "kv_used", "kv_total", "preempted", "cause"]) e[name] = get(name);
  e.decode = get("decode_tokens"); e.prefill = get("prefill_tokens"); e.recompute = get("recompute_tokens"); e.budget = get("token_budget");
  const known = (values, i) => Math.max(0, values[i]);
  const sum = value => { const s = new Float64Array(rows + 1); for (let i = 0; i < rows; i++) s[i + 1] = s[i] + value(i); return s; };
  e.used = i => known(e.decode, i) + known(e.prefill, i) + known(e.recompute, i);
  for (const name of WORK) e.sums[name] = sum(i => known(e[name], i));
  e.sums.budget = sum(i => known(e.budget, i));
  e.sums.scheduling = sum(i => e.requests[i] > 0 ? known(e.budget, i) : 0);
  e.sums.count = sum(i => e.count[i]);
  e.sums.preempted = sum(i => known(e.preempted, i));
  e.causes = [...new Set(e.cause)].sort((a, b) => a - b);
  for (const c of e.causes) {
    e.sums[`time${c}`] = sum(i => e.cause[i] === c ? e.until[i] - begin[i] : 0);
    e.sums[`unused${c}`] = sum(i => e.cause[i] === c ? Math.max(0, e.budget[i] - e.used(i)) : 0);
  }
  for (const name of ["running", "waiting", "kv_used", "preempted"]) e.peaks[name] = pyramid(e[name]);
  e.mostWaiting = peak(e.peaks.waiting, 0, rows - 1); e.mostRunning = peak(e.peaks.running, 0, rows - 1);
  e.blocks = rows ? e.kv_total.reduce((a, b) => Math.max(a, b), 0) : 0;
  e.step_top = rows ? e.budget.reduce((top, value, i) => Math.max(top, value / e.count[i]), 0) : 0;
  for (const kind of ["stops", "lost"]) e[kind] = wordsOf(told.words[kind], name => get(`${kind}.${name}`));
  livesOf(e, get);
  return e;
}

// The sentences about steps: templates, columns that fill them, and where those of a step begin.
function wordsOf(templates, get) {
  const step = get("step"), named = get("named"), requests = new Float64Array(step.length + 1), first = new Map();
  for (let k = step.length - 1; k >= 0; k--) first.set(step[k], k);
  if (named) for (let k = 0; k < step.length; k++) requests[k + 1] = requests[k] + named[k];
  return { templates, get, step, first, requests };
}

function labelOf(told) {
  const ranks = DATA.engines.filter(one => one.run === told.run).length > 1 ? `rank ${told.rank}` : "";
  return [DATA.runs.length > 1 ? DATA.runs[told.run].label : "", ranks].filter(Boolean).join(", ");
}

// A request's pieces follow each other without a gap: ``from[i]`` to ``from[i + 1]``.
function livesOf(e, get) {
  const first = get("first"), pieces = get("pieces"), ids = get("ids"), kind = get("kind"), lasts = get("lasts"), tokens = get("tokens");
  let at = 0;
  e.ids = ids;
  e.lives = ids.map((id, i) => {
    const life = { id, index: i, begin: first[i], end: first[i], pieces: [] };
    for (const last = at + pieces[i]; at < last; at++) {
      const cause = Math.floor(kind[at] / STATES.length);
      life.pieces.push({ begin: life.end, end: life.end + lasts[at], state: STATES[kind[at] % STATES.length], cause, tokens: tokens[at] });
      life.end += lasts[at];
    }
    return life;
  });
}

function pyramid(values) {
  const levels = [values];
  for (let below = values; below.length > 1;) {
    const above = new Float64Array(below.length + 1 >> 1);
    for (let i = 0; i < above.length; i++) above[i] = Math.max(below[2 * i], 2 * i + 1 < below.length ? below[2 * i + 1] : -1);
    levels.push(below = above);
  }
  return levels;
}

function peak(levels, i, j) { // the largest of values i to j
  let most = -1;
  for (let level = 0; i <= j; level++, i >>= 1, j >>= 1) {
    const values = levels[level];
    if (i & 1) most = Math.max(most, values[i++]);
    if (!(j & 1)) most = Math.max(most, values[j--]);
  }
  return most;
}

function rowAt(e, us) { // the last row that has begun; -1 before the first
  let low = 0, high = e.rows;
  while (low < high) { const middle = low + high >> 1; if (e.begin[middle] <= us) low = middle + 1; else high = middle; }
  return low - 1;
}

function rowOf(e, step) { // the row that a step is in; -1 for none
  let low = 0, high = e.rows;
  while (low < high) { const middle = low + high >> 1; if (e.step[middle] <= step) low = middle + 1; else high = middle; }
  return low && step < e.step[low - 1] + e.count[low - 1] ? low - 1 : -1;
}

// ---- colours ------------------------------------------------------------------------------------------

function readColours() {
  const probe = document.body.appendChild(document.createElement("i"));
  for (const name of ["background", "text", "dim-text", "line", "link", ...WORK, "preempted", ...COLOURED, "other", "nobody", "front_end", "kv"]) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

function causeColour(code) {
  const word = DATA.causes[code]?.word;
  return colours[word === undefined || word === "next_step" ? "nobody" : COLOURED.includes(word) ? word : "other"];
}

function legend() {
  const swatch = (name, text, title) => {
    const item = document.createElement("span"), svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const rect = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "rect"));
    for (const [key, value] of Object.entries({ width: 11, height: 11, fill: colours[name] })) rect.setAttribute(key, value);
    svg.setAttribute("aria-hidden", "true");
    item.append(svg, text); item.title = title ?? "";
    return item;
  };
  const line = (title, items) => { const p = document.createElement("p"), b = document.createElement("b"); b.textContent = title; p.append(b, ...items); return p; };
  const seen = new Set(engines.flatMap(e => e.causes));
  for (const e of engines) for (const life of e.lives) for (const piece of life.pieces) if (piece.cause >= FIRST_CAUSE) seen.add(piece.cause - FIRST_CAUSE);
  const words = DATA.causes.filter((cause, code) => seen.has(code) && cause.word !== "next_step");
  const own = COLOURED.flatMap(word => words.filter(cause => cause.word === word)).map(cause => swatch(cause.word, cause.word, cause.meaning));
  const others = words.filter(cause => !COLOURED.includes(cause.word)).map(cause => cause.word);
  byId("legend").replaceChildren(
    line("Work", [swatch("decode", "decode"), swatch("prefill", "prefill"), swatch("recompute", "recompute"), swatch("preempted", "preempted"), swatch("front_end", "front end")]),
    line("Waiting, and budget unused, for", [...own, ...(others.length ? [swatch("other", others.join(", "))] : []), swatch("nobody", "nobody refused")]));
}

// ---- panels -------------------------------------------------------------------------------------------

// Where the panels of an engine are: a gutter for labels at the left, or a line above each where it is narrow.
function layout(canvas, e) {
  const width = canvas.clientWidth, narrow = width < 600, head = narrow ? 15 : 0;
  const box = { left: narrow ? 0 : 112, width: 0, narrow, head, panels: {} };
  box.width = Math.max(50, width - box.left - (narrow ? 0 : 8));
  let y = 0;
  for (const [name, height] of Object.entries(e.open ? { axis: 18, ribbon: 20, steps: 16, budget: 112, queue: 120, kv: 50, requests: 300 } : { axis: 18, ribbon: 20, queue: 60 })) {
    y += name === "axis" || name === "steps" ? 0 : name === "ribbon" && narrow ? head + 4 : head;
    box.panels[name] = { y, height };
    y += height + (name === "ribbon" || name === "steps" ? 2 : 10);
  }
  box.height = y + 8;
  box.x = us => box.left + (us - view.begin) / (view.end - view.begin) * box.width;
  box.us = x => view.begin + (x - box.left) / box.width * (view.end - view.begin);
  return box;
}

function prepared(canvas, height) { // a context in CSS pixels
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT; context.textBaseline = "middle";
  return context;
}

// For each column of pixels the rows i to j that are seen there, and whether row j began there.
function columnsOf(e, box) {
  const found = [], right = box.left + box.width;
  let next = rowAt(e, box.us(box.left)) + 1;
  for (let x = box.left; x < right; x++) {
    const end = box.us(x + 1), i = next - 1;
    while (next < e.rows && e.begin[next] < end) next = next - i > 64 ? Math.max(next + 1, Math.min(rowAt(e, end - 1e-3) + 1, e.rows)) : next + 1;
    if (next - 1 >= 0) found.push({ x, i: Math.max(0, i), j: next - 1, fresh: next - 1 > i, from: Math.max(0, i + (next - 1 > i ? 1 : 0)) });
  }
  return found;
}

function title(context, box, panel, text, more = "") {
  context.textAlign = "left";
  const y = box.narrow ? panel.y - (text === "waiting for" ? 12 : 8) : panel.y + 8;
  context.fillStyle = colours.text; context.fillText(text, 0, y);
  context.fillStyle = colours["dim-text"];
  if (box.narrow) context.fillText(more, context.measureText(`${text}  `).width, y); else context.fillText(more, 0, y + 15);
}

function frame(context, box, panel) {
  context.strokeStyle = colours.line; context.lineWidth = 1;
  context.strokeRect(box.left + .5, panel.y + .5, box.width - 1, panel.height - 1);
}

function drawAxis(context, box, panel, e) {
  const about = (view.end - view.begin) / Math.max(2, box.width / 110), unit = 10 ** Math.floor(Math.log10(about));
  const every = unit * ([1, 2, 5, 10].find(times => times * unit >= about) ?? 10), digits = Math.max(0, 6 - Math.floor(Math.log10(every) + 1e-9));
  context.textAlign = "center"; context.fillStyle = colours["dim-text"]; context.strokeStyle = colours.line;
  for (let us = Math.ceil(view.begin / every) * every; us <= view.end; us += every) {
    const x = Math.round(box.x(us)) + .5, text = `${(us / 1e6).toFixed(Math.min(6, digits))} s`, half = context.measureText(text).width / 2;
    context.beginPath(); context.moveTo(x, panel.y + panel.height); context.lineTo(x, box.height); context.stroke();
    if (x - half >= box.left - 20 && x + half <= box.left + box.width + 8) context.fillText(text, x, panel.y + 9);
  }
}

// The share of each cause in the time of each column.
function drawRibbon(context, box, panel, e, columns) {
  for (const { x, i, j } of columns) {
    const all = Math.max(1, e.causes.reduce((sum, c) => sum + e.sums[`time${c}`][j + 1] - e.sums[`time${c}`][i], 0));
    let y = panel.y;
    for (const c of e.causes) {
      const height = (e.sums[`time${c}`][j + 1] - e.sums[`time${c}`][i]) / all * panel.height;
      if (height > 0) { context.fillStyle = causeColour(c); context.fillRect(x, y, 1, height); y += height; }
    }
  }
}

function drawSteps(context, box, panel, e) {
  const first = Math.max(0, rowAt(e, view.begin)), last = rowAt(e, view.end);
  const each = box.width / Math.max(1, last - first + 1);
  if (each < 4) return title(context, box, panel, "", "");
  for (let i = Math.max(0, first - 1); i <= last; i++) { // steps in flight at the same time lie in two lanes
    const x = Math.max(box.left, box.x(e.begin[i])), width = Math.max(1, Math.min(box.left + box.width, box.x(e.end[i])) - x - 1);
    const y = panel.y + (i % 2 ? panel.height / 2 : 0);
    if (box.x(e.end[i]) <= box.left) continue;
    context.fillStyle = e.requests[i] > 0 ? colours.kv : colours.nobody;
    context.fillRect(x, y, width, panel.height / 2 - 1);
    if (width > 46 && panel.height >= 28) { context.fillStyle = colours.text; context.textAlign = "left"; context.fillText(e.step[i], x + 2, y + panel.height / 4); }
  }
  title(context, box, { y: panel.y - (box.narrow ? -16 : 0) }, box.narrow ? "" : "steps");
}

function drawBudget(context, box, panel, e, columns) {
  let top = e.step_top;
  if (fitted) top = Math.max(1, 1.1 * columns.reduce((most, { from, j }) => {
    const steps = e.sums.count[j + 1] - e.sums.count[from];
    return Math.max(most, WORK.reduce((sum, name) => sum + e.sums[name][j + 1] - e.sums[name][from], 0) / steps);
  }, 0));
  if (!top) return title(context, box, panel, "token budget", "not recorded");
  for (const { x, from, j, fresh } of columns) {
    if (!fresh && box.us(x) >= e.end[j]) continue; // idle: the step before is over
    const scale = panel.height / top / (e.sums.count[j + 1] - e.sums.count[from]);
    let y = panel.y + panel.height;
    const stack = (sums, colour, tint) => {
      const height = Math.min(y - panel.y, (sums[j + 1] - sums[from]) * scale);
      if (height <= 0) return;
      context.globalAlpha = tint; context.fillStyle = colour; context.fillRect(x, y -= height, 1, height);
    };
    for (const name of WORK) stack(e.sums[name], colours[name], 1);
    for (const c of e.causes) stack(e.sums[`unused${c}`], causeColour(c), c === NOBODY ? 1 : .55);
  }
  context.globalAlpha = 1;
  frame(context, box, panel);
  title(context, box, panel, "token budget", fitted ? `to ${number.format(top)} of ${number.format(e.step_top)}` : `${number.format(top)} a step`);
}

// Running upwards, waiting downwards in the colours of causes, a tick below where requests were preempted.
function drawQueue(context, box, panel, e, columns) {
  const most = Math.max(1, e.mostRunning, e.seats <= 4 * e.mostRunning ? e.seats : 0), waiting = Math.max(1, e.mostWaiting);
  const up = clamp(most / (most + waiting), .3, .75) * panel.height, zero = panel.y + up, down = panel.height - up;
  for (const { x, i, j, from, fresh } of columns) {
    const height = peak(e.peaks.running, i, j) / most * up;
    context.fillStyle = colours.decode; if (height > 0) context.fillRect(x, zero - height, 1, height);
    const queued = peak(e.peaks.waiting, i, j) / waiting * down;
    if (queued > 0) {
      const all = Math.max(1, e.causes.reduce((sum, c) => sum + e.sums[`time${c}`][j + 1] - e.sums[`time${c}`][i], 0));
      let y = zero;
      for (const c of e.causes) {
        const part = (e.sums[`time${c}`][j + 1] - e.sums[`time${c}`][i]) / all * queued;
        if (part > 0) { context.fillStyle = c === NOBODY ? colours.front_end : causeColour(c); context.fillRect(x, y, 1, part); y += part; }
      }
    }
    if (fresh && peak(e.peaks.preempted, from, j) > 0) { context.fillStyle = colours.preempted; context.fillRect(x - .5, panel.y + panel.height + 1, 2, 7); }
  }
  context.fillStyle = colours.text; context.fillRect(box.left, zero, box.width, 1);
  title(context, box, panel, "running", e.seats ? `up to ${number.format(e.mostRunning)} of ${number.format(e.seats)}` : `up to ${number.format(e.mostRunning)}`);
  if (box.narrow) { context.textAlign = "right"; context.fillStyle = colours["dim-text"]; context.fillText(`waiting up to ${number.format(e.mostWaiting)}`, box.width, panel.y - 8); }
  else if (panel.height > 100) title(context, box, { y: Math.max(zero, panel.y + 34) }, "waiting", `up to ${number.format(e.mostWaiting)}`);
}

function drawKv(context, box, panel, e, columns) {
  if (!(e.blocks > 0)) return title(context, box, panel, "KV blocks", "not recorded");
  context.fillStyle = colours.kv;
  for (const { x, i, j } of columns) {
    const height = peak(e.peaks.kv_used, i, j) / e.blocks * panel.height;
    if (height > 0) context.fillRect(x, panel.y + panel.height - height, 1, height);
  }
  frame(context, box, panel);
  title(context, box, panel, "KV blocks", `of ${number.format(e.blocks)}`);
}

// The requests in view by arrival: all, or evenly many of them.
function lanesOf(e) {
  const seen = e.lives.filter(life => life.begin < view.end && life.end > view.begin);
  if (seen.length <= MOST_LANES) return { lanes: seen, of: seen.length };
  return { lanes: Array.from({ length: MOST_LANES }, (_, i) => seen[Math.floor(i * seen.length / MOST_LANES)]), of: seen.length };
}

function drawRequests(context, box, panel, e) {
  const { lanes, of } = lanesOf(e), height = Math.min(16, panel.height / Math.max(1, lanes.length));
  lanes.forEach((life, i) => {
    const y = panel.y + i * height, tall = Math.max(1, height - (height > 4 ? 1 : 0));
    for (const piece of life.pieces) if (piece.end > view.begin && piece.begin < view.end) drawPiece(context, box, e, piece, y, tall);
    if (chosen?.life === life) { context.strokeStyle = colours.link; context.lineWidth = 2; context.strokeRect(box.left, y - 1, box.width, tall + 2); }
    if (height >= 11 && !box.narrow) {
      context.fillStyle = colours["dim-text"]; context.textAlign = "left";
      context.font = "11px system-ui, sans-serif";
      context.fillText(life.id.length > 17 ? `${life.id.slice(0, 16)}…` : life.id, 0, y + height / 2, box.left - 4);
      context.font = FONT;
    }
  });
  e.lanes = { lanes, height, y: panel.y };
  frame(context, box, panel);
  if (height < 11 || box.narrow) title(context, box, panel, "requests", lanes.length < of || e.lives.length < e.request_count ? `${number.format(lanes.length)} of ${number.format(of < e.lives.length ? of : e.request_count)}` : number.format(of));
}

function drawPiece(context, box, e, piece, y, tall) {
  const left = Math.max(box.left, box.x(piece.begin)), right = Math.min(box.left + box.width, box.x(piece.end));
  const bar = (from, to, colour, share = 1) => { context.fillStyle = colour; context.fillRect(from, y + tall * (1 - share) / 2, Math.max(.7, to - from), tall * share); };
  if (piece.state === "waiting" && piece.cause === BY_STEP) { // the cause of each step of the wait
    for (let i = Math.max(0, rowAt(e, box.us(left))), from = left; from < right;) {
      let j = i;
      while (j + 1 < e.rows && e.cause[j + 1] === e.cause[i] && e.until[j] < piece.end) j++;
      if (box.x(e.until[j]) - from < .7) j = Math.max(j, rowAt(e, box.us(from + .7)));
      const to = j + 1 < e.rows ? Math.min(right, box.x(e.until[j])) : right;
      bar(from, to, causeColour(e.cause[i])); from = Math.max(to, from + .1); i = Math.min(j + 1, e.rows - 1);
    }
  } else if (piece.state === "waiting") bar(left, right, causeColour(piece.cause - FIRST_CAUSE));
  else if (piece.state === "stalled") bar(left, right, causeColour(piece.cause - FIRST_CAUSE), .5);
  else bar(left, right, colours[piece.state], piece.state === "front_end" ? .5 : 1);
}

// The steps of the chosen finding above the ribbon; lines through all panels at the ends of their longest run.
function drawBrackets(context, box, e) {
  const spans = spansOf(e);
  context.fillStyle = colours.text;
  for (const [begin, end] of spans) {
    const left = Math.max(box.left, box.x(begin)), right = Math.min(box.left + box.width, box.x(end));
    if (right > box.left && left < box.left + box.width) context.fillRect(left, box.panels.ribbon.y - 4, Math.max(1, right - left), 3);
  }
  const longest = spans.whole && merged(spans).reduce((best, span) => !best || span[1] - span[0] > best[1] - best[0] ? span : best, null);
  context.strokeStyle = colours.text; context.setLineDash([2, 3]); context.lineWidth = 1;
  for (const us of longest ?? []) line(context, box, us);
  context.setLineDash([]);
}

function line(context, box, us, from = box.panels.ribbon.y - 4) {
  const x = Math.round(box.x(us)) + .5;
  if (x < box.left || x > box.left + box.width) return;
  context.beginPath(); context.moveTo(x, from); context.lineTo(x, box.height); context.stroke();
}

const merged = spans => spans.reduce((found, [begin, end]) => { // those less than 1 % of the run apart as one
  const last = found.at(-1);
  if (last && begin - last[1] < (whole.end - whole.begin) / 100) last[1] = Math.max(last[1], end); else found.push([begin, end]);
  return found;
}, []);

// Times of a finding's steps: all that had its cause where the report names the first only.
function spansOf(e) {
  const found = DATA.findings[finding];
  if (!found || !found.ranks.includes(e.rank) || e.run) return [];
  if (e.spans?.of === found) return e.spans;
  const spans = [], add = (begin, end) => { const last = spans.at(-1); if (last?.[1] === begin) last[1] = end; else spans.push([begin, end]); };
  const code = DATA.causes.findIndex(cause => cause.word === found.cause);
  spans.by_cause = found.named < found.count && e.causes.includes(code);
  if (spans.by_cause) {
    for (let i = 0; i < e.rows; i++) if (e.cause[i] === code) add(e.begin[i], e.until[i]);
  } else if (found.rank === e.rank) for (const [first, last] of found.steps) {
    const i = rowOf(e, first), j = rowOf(e, last);
    if (i >= 0 && j >= 0) add(e.begin[i], e.end[j]);
  }
  spans.of = found; spans.whole = spans.by_cause || found.named >= found.count;
  return e.spans = spans;
}

function drawMarks(context, box, e) {
  context.strokeStyle = colours["dim-text"]; context.lineWidth = 1; context.textAlign = "left";
  for (const begun of e.trials) { line(context, box, begun.us, 18); const x = box.x(begun.us); if (x >= box.left - 1 && x < box.left + box.width - 40) { context.fillStyle = colours["dim-text"]; context.fillText(`trial ${begun.trial}`, x + 3, box.height - 5); } }
  for (const mark of DATA.marks ?? []) {
    const i = mark.run === e.run && e.first_of_run ? rowOf(e, mark.step) : -1;
    if (i < 0) continue;
    context.strokeStyle = colours.link; context.lineWidth = 2; line(context, box, e.begin[i], 0);
    const x = box.x(e.begin[i]), text = `first difference: step ${mark.step}`, right = x + context.measureText(text).width > box.left + box.width;
    context.fillStyle = colours.link; context.textAlign = right ? "right" : "left";
    if (x >= box.left && x <= box.left + box.width) context.fillText(text, x + (right ? -5 : 5), box.height - 5);
  }
  if (chosen?.e === e && chosen.row !== undefined) {
    const left = Math.max(box.left, box.x(e.begin[chosen.row])), right = Math.min(box.left + box.width, box.x(e.until[chosen.row]));
    context.globalAlpha = .18; context.fillStyle = colours.link;
    if (right >= left) context.fillRect(left, 0, Math.max(2, right - left), box.height);
    context.globalAlpha = 1;
  }
}

function drawEngine(e) {
  const box = e.box = layout(e.canvas, e), context = prepared(e.canvas, box.height);
  const columns = columnsOf(e, box), panels = box.panels;
  drawAxis(context, box, panels.axis, e);
  drawRibbon(context, box, panels.ribbon, e, columns);
  title(context, box, panels.ribbon, "waiting for");
  if (e.open) {
    drawSteps(context, box, panels.steps, e);
    drawBudget(context, box, panels.budget, e, columns);
    drawKv(context, box, panels.kv, e, columns);
    drawRequests(context, box, panels.requests, e);
  }
  drawQueue(context, box, panels.queue, e, columns);
  drawBrackets(context, box, e);
  drawMarks(context, box, e);
}

function drawMap() {
  const canvas = byId("map"), box = { left: canvas.clientWidth < 600 ? 0 : 112, height: 28 }, shown = { ...view };
  box.width = Math.max(50, canvas.clientWidth - box.left - (box.left ? 8 : 0));
  const context = prepared(canvas, box.height), each = (box.height - 6) / engines.length;
  Object.assign(view, whole);
  box.us = x => whole.begin + (x - box.left) / box.width * (whole.end - whole.begin);
  box.x = us => box.left + (us - whole.begin) / (whole.end - whole.begin) * box.width;
  engines.forEach((e, i) => drawRibbon(context, box, { y: 3 + i * each, height: each }, e, columnsOf(e, box)));
  Object.assign(view, shown);
  if (box.left) title(context, { narrow: false }, { y: 6 }, "whole run");
  const left = box.x(view.begin), right = Math.max(left + 3, box.x(view.end));
  context.fillStyle = colours.background; context.globalAlpha = .7;
  context.fillRect(box.left, 0, left - box.left, box.height); context.fillRect(right, 0, box.left + box.width - right, box.height);
  context.globalAlpha = 1; context.strokeStyle = colours.text; context.lineWidth = 2;
  context.strokeRect(left + 1, 1, right - left - 2, box.height - 2);
  canvas.box = box;
}

function draw() {
  drawMap();
  engines.forEach(drawEngine);
  byId("view").textContent = `${seconds(view.begin)} to ${seconds(view.end)} s`;
}

let asked = 0;
function redraw() { if (!asked) asked = requestAnimationFrame(() => { asked = 0; draw(); }); }

// ---- words --------------------------------------------------------------------------------------------

function sumsOf(e, begin, end) {
  const i = Math.max(0, rowAt(e, begin)), j = rowAt(e, end), of = name => j < i ? 0 : e.sums[name][j + 1] - e.sums[name][i];
  const tokens = WORK.reduce((sum, name) => sum + of(name), 0);
  return { steps: of("count"), preemptions: of("preempted"), use: tokens / of("scheduling"), decode: of("decode"), prefill: of("prefill"), recompute: of("recompute"), waiting: e.causes.filter(c => c !== NOBODY).map(c => [DATA.causes[c].word, of(`time${c}`)]) };
}

function sentence(e, begin, end) {
  const sums = sumsOf(e, begin, end), waits = sums.waiting.filter(([, us]) => us > 0).sort((a, b) => b[1] - a[1]);
  return `${number.format(sums.steps)} steps, ${number.format(e.request_count)} requests, ${percent(sums.use)} of the token budget used, ` +
    `${number.format(sums.preemptions)} preemptions` + (waits.length ? `; requests refused for ${waits.map(([word, us]) => `${word} during ${duration(us)}`).join(", ")}` : "");
}

function rowWords(e, i) {
  if (e.count[i] > 1) return `steps ${e.step[i]}-${e.step[i] + e.count[i] - 1}`;
  return `step ${e.step[i]}`;
}

function briefly(e, i) {
  const cause = DATA.causes[e.cause[i]]?.word;
  return `${rowWords(e, i)}: ${WORK.map(name => `${name} ${number.format(Math.max(0, e[name][i]))}`).join(", ")} of ${number.format(e.budget[i])} tokens; running ${e.running[i]}, waiting ${e.waiting[i]}${cause ? ` for ${cause}` : ""}`;
}

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function tableOf(rows) {
  const table = element("table");
  for (const [head, ...cells] of rows) { const row = table.insertRow(); row.append(element("th", String(head))); for (const cell of cells) row.insertCell().append(cell); }
  const wide = element("div", "", table);
  wide.className = "wide";
  return wide;
}

function link(text, hash) { const made = element("a", text); made.href = hash; return made; }
const requestHash = id => `#request=${encodeURIComponent(id)}`;
const path = e => DATA.runs[e.run].path;

const integer = value => value === -1 ? "-" : number.format(value);
const requestLink = (e, place) => place >= 0 ? link(e.ids[place], requestHash(e.ids[place])) : "a request that is not drawn";

// "a, b, c and 61 others", as every page of schedtrace writes it.
function namedRequests(e, places, count) {
  const counted = (n, one) => `${number.format(n)} ${one}${n === 1 ? "" : "s"}`;
  const shown = places.length === count && count <= 4 ? places : places.slice(0, 3), rest = count - shown.length;
  if (!shown.length) return [counted(count, "request")];
  const words = shown.flatMap((place, k) => [k ? k === shown.length - 1 && !rest ? " and " : ", " : "", requestLink(e, place)]);
  return rest ? [...words, ` and ${counted(rest, "other")}`] : words;
}

// The sentences of one kind about the step of a row.
function sentences(e, i, kind) {
  const words = e[kind], found = [], free = e.kv_total[i] - e.kv_used[i], left = e.budget[i] - e.used(i);
  if (e.count[i] > 1) return found;
  for (let k = words.first.get(e.step[i]) ?? Infinity; words.step[k] === e.step[i]; k++) {
    const of = name => name === "free" ? free - words.get("free")[k] : name === "left" ? left - words.get("left")[k] : words.get(name)[k];
    found.push(element("p", "", ...words.templates[words.get("template")[k]].map(part => {
      if (typeof part === "string") return [part];
      if (part.code !== undefined) return [element("code", part.code)];
      if (part.kind === "request") return [requestLink(e, of(part.slot))];
      if (part.kind === "requests") return namedRequests(e, [...words.get("request").slice(words.requests[k], words.requests[k + 1])], of("count"));
      return [integer(of(part.slot)) + (part.kind === "count" ? ` ${of(part.slot) === 1 ? part.one : part.many}` : "")];
    }).flat()));
  }
  return found;
}

function showStep(e, i) {
  if (showStory(e, `step=${e.step[i]}&rank=${e.rank}`)) return;
  const known = value => value < 0 ? "not recorded" : number.format(value), trial = e.trial[i] >= 0 ? ` of trial ${e.trial[i]}` : "";
  const used = e.budget[i] < 0 ? "not recorded" : `${number.format(e.used(i))} of ${number.format(e.budget[i])} tokens of budget, ${number.format(e.budget[i] - e.used(i))} left, by ${known(e.requests[i])} requests: ${WORK.map(name => `${known(e[name][i])} ${name}`).join(", ")}`;
  const lost = sentences(e, i, "lost"), stops = sentences(e, i, "stops");
  const rows = [
    ["time", `${(e.begin[i] / 1e6).toFixed(3)} s; its output was back after ${duration(e.end[i] - e.begin[i])}`],
    ["used", used],
    ...(lost.length ? [["preempted", element("div", "", ...lost)]] : []),
    ["stopped", stops.length ? element("div", "", ...stops) : DATA.causes[e.cause[i]]?.word ?? "no exit was recorded"],
    ["after", `${known(e.running[i])} running, ${known(e.waiting[i])} waiting, ${known(e.kv_used[i])} of ${known(e.kv_total[i])} KV blocks used`]];
  const command = `schedtrace step ${path(e)} ${e.step[i]}${e.rank ? ` --engine ${e.rank}` : ""}`;
  const heading = rowWords(e, i);
  show(element("h2", heading[0].toUpperCase() + heading.slice(1) + trial + (e.label ? ` (${e.label})` : "")), tableOf(rows), element("p", "All of it: ", element("code", command)));
}

// The whole page of ``schedtrace step`` or ``request``, which the report has for what its findings name.
function showStory(e, at) {
  const k = e.run ? -1 : stories.at.indexOf(at);
  if (k < 0) return false;
  const story = element("div");
  story.className = "page";
  story.innerHTML = stories.html[k]; // made by the same templates as the report below, which escape all of it
  show(story, element("p"));
  return true;
}

function showLife(e, life) {
  if (showStory(e, requestHash(life.id).slice(1))) return;
  const rows = life.pieces.map(piece => {
    const cause = piece.cause >= FIRST_CAUSE ? ` (${DATA.causes[piece.cause - FIRST_CAUSE].word})` : piece.cause === BY_STEP ? ` (${causesWithin(e, piece).join(", ")})` : "";
    return [`${(piece.begin / 1e6).toFixed(6)} s`, piece.state.replace("_", " ") + cause, duration(piece.end - piece.begin), piece.tokens > 0 ? `${number.format(piece.tokens)} tokens` : ""];
  });
  show(element("h2", `Request ${life.id}` + (e.label ? ` (${e.label})` : "")), tableOf(rows), element("p", "All of it: ", element("code", `schedtrace request ${path(e)} ${life.id}`)));
}

function causesWithin(e, piece) {
  const words = new Set();
  for (let i = Math.max(0, rowAt(e, piece.begin)); i < e.rows && e.begin[i] < piece.end; i++) if (e.cause[i] >= 0) words.add(DATA.causes[e.cause[i]].word);
  return [...words];
}

function show(...nodes) {
  byId("details").classList.toggle("chosen", nodes.length > 1);
  byId("details").replaceChildren(...nodes); byId("details").scrollTop = 0;
}

// ---- moving -------------------------------------------------------------------------------------------

function zoomTo(begin, end, how = "replace") {
  const least = Math.max(20, leastSpan), length = clamp(end - begin, least, whole.end - whole.begin);
  const middle = (begin + end) / 2;
  view.begin = clamp(middle - length / 2, whole.begin, whole.end - length);
  view.end = view.begin + length;
  remember(how);
  redraw();
}
let leastSpan = 20;

const zoomBy = (factor, at = (view.begin + view.end) / 2, how) => zoomTo(at - (at - view.begin) * factor, at + (view.end - at) * factor, how);
const moveBy = share => zoomTo(view.begin + share * (view.end - view.begin), view.end + share * (view.end - view.begin));

function remember(how) {
  const parts = []; // of the address
  if (chosen?.life) parts.push(requestHash(chosen.life.id).slice(1));
  if (chosen?.row !== undefined) parts.push(`step=${chosen.e.step[chosen.row]}&rank=${chosen.e.rank}`);
  if (chosen?.e.run) parts.push(`run=${chosen.e.run}`);
  if (view.begin > whole.begin || view.end < whole.end) parts.push(`t=${(view.begin / 1e6).toFixed(6)}-${(view.end / 1e6).toFixed(6)}`);
  const hash = `#${parts.join("&")}`;
  if (hash === (location.hash || "#")) return;
  if (how === "push") history.pushState(null, "", hash); else history.replaceState(null, "", hash);
}

function follow() { // what the address asks for
  const asks = new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B")), time = /^(-?[\d.]+)-(-?[\d.]+)$/.exec(asks.get("t") ?? "");
  const of = engines.filter(e => e.run === Number(asks.get("run") ?? 0));
  chosen = null;
  let span = time ? [1e6 * time[1], 1e6 * time[2]] : null;
  if (asks.has("step")) {
    const e = of.find(one => one.rank === Number(asks.get("rank") ?? 0)), row = e ? rowOf(e, Number(asks.get("step"))) : -1;
    if (row >= 0) { chosen = { e, row }; open(e); span ??= [e.begin[Math.max(0, row - 20)], e.until[Math.min(e.rows - 1, row + 20)]]; showStep(e, row); }
    else show(element("p", `Step ${asks.get("step")} is not in the picture: it belongs to the warm-up or to another part of the trace.`));
  } else if (asks.has("request")) {
    for (const e of of) { const life = e.lives.find(one => one.id === asks.get("request")); if (life) { chosen = { e, life }; break; } }
    if (chosen) { const { e, life } = chosen, rim = (life.end - life.begin) / 20; open(e); span ??= [life.begin - rim, life.end + rim]; showLife(e, life); }
    else show(element("p", `Request ${asks.get("request")} is not in the picture.`));
  } else show(element("p", NOTHING));
  const [begin, end] = span && span.every(Number.isFinite) && span[1] > span[0] ? span : [whole.begin, whole.end];
  const length = clamp(end - begin, Math.max(20, leastSpan), whole.end - whole.begin);
  view.begin = clamp(begin, whole.begin, whole.end - length); view.end = view.begin + length;
  redraw();
}

function choose(e, what) {
  chosen = { e, ...what };
  if (what.life) showLife(e, what.life); else showStep(e, what.row);
  remember("push"); redraw();
}

function nextStep(by) {
  const e = chosen?.e ?? engines[0], middle = rowAt(e, (view.begin + view.end) / 2);
  const row = clamp(chosen?.row === undefined ? middle : chosen.row + by, 0, e.rows - 1);
  if (!e.rows) return;
  chosen = { e, row };
  if (e.begin[row] < view.begin || e.until[row] > view.end) { const half = (view.end - view.begin) / 2; zoomTo(e.begin[row] - half, e.begin[row] + half); }
  showStep(e, row); remember("replace"); redraw();
}

function showFinding(at) {
  finding = at;
  const spans = engines.map(e => [e, spansOf(e)]).find(([, one]) => one.length);
  document.querySelectorAll("[data-finding]").forEach((button, i) => button.setAttribute("aria-pressed", String(i === at)));
  if (!spans) return redraw();
  const [e, all] = spans, found = DATA.findings[at], begin = all[0][0], end = all.at(-1)[1], rim = (end - begin) / 20;
  open(e);
  const listed = all.by_cause ? `; marked are all that left requests waiting for ${found.cause}` : found.named < found.count ? `; the first ${found.named} of them are marked` : "";
  show(element("h2", found.title), element("p", `${number.format(found.count)} steps show it${listed}, from ${seconds(begin)} to ${seconds(end)} s. The first: `, link(`step ${found.steps[0][0]}`, `#step=${found.steps[0][0]}&rank=${found.rank}`)));
  chosen = null;
  zoomTo(begin - rim, end + rim, "push");
}

function open(e) { if (!e.open) { e.open = true; e.toggle?.setAttribute("aria-expanded", "true"); } }

// ---- input --------------------------------------------------------------------------------------------

function pointing(canvas, boxOf, select) {
  const down = new Map();
  const brush = canvas.parentElement.appendChild(element("div"));
  brush.className = "brush"; brush.hidden = true;
  let start = null, spread = 0;
  const x = event => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointerdown", event => {
    down.set(event.pointerId, x(event));
    canvas.setPointerCapture(event.pointerId);
    start = { x: x(event), begin: view.begin, end: view.end, moved: false };
    if (down.size === 2) { const [a, b] = [...down.values()]; spread = Math.abs(a - b); start.two = true; start.middle = boxOf().us((a + b) / 2); }
  });
  canvas.addEventListener("pointermove", event => {
    const box = boxOf();
    if (!box) return;
    if (!down.has(event.pointerId)) return select(event, "hover");
    down.set(event.pointerId, x(event));
    const by = x(event) - start.x;
    start.moved ||= Math.abs(by) > 4;
    if (down.size === 2) {
      const [a, b] = [...down.values()], factor = spread / Math.max(8, Math.abs(a - b));
      zoomTo(start.middle - (start.middle - start.begin) * factor, start.middle + (start.end - start.middle) * factor);
    } else if (start.two) return;
    else if (event.pointerType === "touch" && canvas.id !== "map") { // one finger moves
      const shift = -by / box.width * (start.end - start.begin);
      if (start.moved) zoomTo(start.begin + shift, start.end + shift);
    } else if (start.moved) {
      brush.hidden = false;
      brush.style.left = `${canvas.offsetLeft + Math.min(start.x, x(event))}px`; brush.style.width = `${Math.abs(by)}px`;
      brush.style.top = `${canvas.offsetTop}px`; brush.style.height = `${canvas.clientHeight}px`;
    }
  });
  const up = event => {
    if (!down.delete(event.pointerId) || down.size) return;
    brush.hidden = true;
    const box = boxOf(), [from, to] = [start.x, x(event)].sort((a, b) => a - b);
    if (event.type === "pointercancel" || start.two || (start.moved && event.pointerType === "touch" && canvas.id !== "map")) return remember("replace");
    if (start.moved) zoomTo(box.us(Math.max(from, box.left)), box.us(to), "push"); else select(event, "click");
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => { byId("under").textContent = "\u00a0"; });
  canvas.addEventListener("wheel", event => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && !event.ctrlKey && !event.metaKey && canvas.id !== "map") return; // the wheel alone scrolls the page
    event.preventDefault();
    if (sideways) moveBy(event.deltaX / 800); else zoomBy(Math.exp(clamp(event.deltaY, -100, 100) / 200), boxOf().us(x(event)));
  }, { passive: false });
}

function onEngine(e, event, kind) {
  const at = e.canvas.getBoundingClientRect(), x = event.clientX - at.left, y = event.clientY - at.top;
  const lane = e.open && y >= e.lanes.y ? e.lanes.lanes[Math.floor((y - e.lanes.y) / e.lanes.height)] : null;
  const row = x < e.box.left && !lane ? -1 : rowAt(e, e.box.us(x));
  const under = lane ? `request ${lane.id}: ${lane.pieces.find(piece => piece.end > e.box.us(x) && piece.begin <= e.box.us(x))?.state.replace("_", " ") ?? "not here"}` : row >= 0 ? briefly(e, row) : "\u00a0";
  byId("under").textContent = under;
  if (kind === "click" && lane) choose(e, { life: lane }); else if (kind === "click" && row >= 0) choose(e, { row });
}

const ACTIONS = {
  in: () => zoomBy(.5), out: () => zoomBy(2), left: () => moveBy(-.25), right: () => moveBy(.25),
  all: () => zoomTo(whole.begin, whole.end, "push"), home: () => moveBy(-1e9), end: () => moveBy(1e9),
  none: () => { chosen = null; show(element("p", NOTHING)); remember("push"); redraw(); },
  previous: () => nextStep(-1), next: () => nextStep(1),
  fit: () => { fitted = !fitted; document.querySelector("[data-do=fit]").setAttribute("aria-pressed", String(fitted)); redraw(); },
};
const KEYS = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all", Home: "home", End: "end", "[": "previous", "]": "next", y: "fit", Escape: "none" };

function listen() {
  document.addEventListener("keydown", event => {
    const action = KEYS[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("summary, .wide")) return;
    event.preventDefault(); ACTIONS[action]();
  });
  byId("tools").addEventListener("click", event => ACTIONS[event.target.closest("button")?.dataset.do]?.());
  byId("findings")?.addEventListener("click", event => { const at = event.target.closest("button")?.dataset.finding; if (at !== undefined) showFinding(Number(at)); });
  pointing(byId("map"), () => byId("map").box, (event, kind) => {
    if (kind !== "click") return;
    const middle = byId("map").box.us(event.clientX - byId("map").getBoundingClientRect().left), half = (view.end - view.begin) / 2;
    zoomTo(middle - half, middle + half, "push");
  });
  document.addEventListener("click", event => { // a link to a step or a request, from wherever it stands
    const anchor = event.target.closest("a[href^='#']"), hash = anchor?.getAttribute("href"), { step, lastStep, rank } = anchor?.dataset ?? {};
    if (!hash || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const e = engines.find(one => !one.run && one.rank === Number(rank)), to = e && lastStep > step ? rowOf(e, Number(lastStep)) : -1;
    history.pushState(null, "", hash); follow();
    if (to >= 0 && chosen) { const from = e.begin[chosen.row], rim = (e.end[to] - from) / 20; zoomTo(from - rim, e.end[to] + rim); }
    byId("tools").scrollIntoView({ block: "start" });
  });
  window.addEventListener("hashchange", follow);
  window.addEventListener("popstate", follow);
  new ResizeObserver(redraw).observe(byId("timeline"));
  const dark = matchMedia("(prefers-color-scheme: dark)"), repaint = () => { readColours(); legend(); redraw(); };
  dark.addEventListener("change", repaint);
  byId("theme").addEventListener("click", event => {
    const root = document.documentElement, next = { undefined: "light", light: "dark", dark: undefined }[root.dataset.theme];
    if (next) root.dataset.theme = next; else delete root.dataset.theme;
    event.currentTarget.textContent = `Colours: ${next ?? "system"}`;
    repaint();
  });
}

function addEngine(e) {
  const box = byId("engines").appendChild(element("section")), heading = element("h2", e.label);
  box.className = "engine";
  heading.append(element("span", sentence(e, whole.begin, whole.end)));
  if (engines.length > 2) {
    e.toggle = element("button", "Show all panels"); e.toggle.type = "button";
    e.toggle.addEventListener("click", () => { e.open = !e.open; e.toggle.setAttribute("aria-expanded", String(e.open)); e.toggle.textContent = e.open ? "Show less" : "Show all panels"; redraw(); });
    heading.append(e.toggle);
  }
  e.canvas = element("canvas");
  e.canvas.setAttribute("role", "img"); e.canvas.tabIndex = 0;
  e.canvas.setAttribute("aria-label", `Timeline${e.label ? ` of ${e.label}` : ""}: ${sentence(e, whole.begin, whole.end)}.`);
  box.append(heading, e.canvas);
  pointing(e.canvas, () => e.box, (event, kind) => onEngine(e, event, kind));
}

function trialsOf(e) {
  const found = [];
  for (let i = 0; i < e.rows; i++) if (e.trial[i] >= 0 && (!i || e.trial[i] !== e.trial[i - 1])) found.push({ trial: e.trial[i], us: e.begin[i] });
  return found.length > 1 ? found : [];
}

async function start() {
  const columns = await unpacked();
  stories = { at: columns["stories.at"] ?? [], html: columns["stories.html"] ?? [] };
  engines = DATA.engines.map((told, index) => engineOf(told, index, columns));
  const moments = engines.flatMap(e => [e.rows ? e.begin[0] : Infinity, e.lives[0]?.begin ?? Infinity]), ends = engines.flatMap(e => [e.rows ? e.until[e.rows - 1] : -Infinity, ...e.lives.slice(-MOST_LANES).map(life => life.end)]);
  whole.begin = Math.min(...moments); whole.end = Math.max(...ends);
  if (!(whole.end > whole.begin)) { whole.begin = Number.isFinite(whole.begin) ? whole.begin : 0; whole.end = whole.begin + 1e6; }
  Object.assign(view, whole);
  leastSpan = Math.max(20, engines.reduce((least, e) => Math.min(least, e.rows ? (e.until[e.rows - 1] - e.begin[0]) / e.rows / 2 : Infinity), (whole.end - whole.begin) / 10));
  engines.forEach((e, i) => { e.open = engines.length <= 2 || i === 0; e.trials = trialsOf(e); e.first_of_run = engines.findIndex(one => one.run === e.run) === i; });
  readColours(); legend(); engines.forEach(addEngine); listen(); follow();
  document.querySelector("[data-finding]")?.setAttribute("aria-pressed", "true");
  draw();
  byId("engines").dataset.painted = String(Math.round(performance.now()));
  window.schedtrace = { engines, view, whole, zoomTo, draw, sumsOf };
}

start().catch(error => { byId("engines").textContent = `The timeline cannot be drawn: ${error.message}`; throw error; });
})();
