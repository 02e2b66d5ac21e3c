// What the page carries, unpacked: engines with their columns, running sums for means, pyramids for peaks.
// Times are microseconds; a "row" is a step, or several of a very long trace.

const { integer, counted, duration, percent } = sentences;
const DATA = JSON.parse(document.getElementById("data").textContent);
const { states: STATES, by_step: BY_STEP, first_cause: FIRST_CAUSE } = DATA;
const COLOURED = ["kv_blocks", "max_num_seqs", "token_budget", "preempted_this_step"];
const WORK = ["decode", "prefill", "recompute"];
const PEAKS = ["running", "waiting", "kv_used", "preempted"];
const COLUMNS = ["step", "count", "trial", "cause", "requests", "kv_total", ...PEAKS];
const UNKNOWN = -1,
  NOBODY = -1; // of figures: not recorded; of causes: no request was refused
const MOST_LANES = 200,
  FONT = "12px system-ui, sans-serif";
const NOTHING_CHOSEN = "Click a step or a request.";
const causeWord = code => DATA.causes[code]?.word;
const stateWord = piece => piece.state.replace("_", " ");
const byId = id => document.getElementById(id);
const seconds = us =>
  (us / 1e6).toFixed(Math.max(1, Math.min(6, 7 - Math.floor(Math.log10(Math.max(1, view.end - view.begin))))));
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

let engines = [],
  stories = { at: [], html: [] },
  colours = {},
  finding = 0,
  chosen = null,
  fitted = false;
const whole = { begin: 0, end: 1 },
  view = { begin: 0, end: 1 };

async function unpacked() {
  const bytes = Uint8Array.from(atob(byId("packed").textContent.trim()), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const columns = {};
  let at = 0;
  for (const [name, count, written] of DATA.columns) {
    if (written === "texts") {
      const text = new TextDecoder().decode(raw.subarray(at, (at += count)));
      columns[name] = text ? text.split("\0") : [];
      continue;
    }
    const values = (columns[name] = new Float64Array(count));
    for (let i = 0, before = 0; i < count; i++) {
      let code = 0,
        unit = 1,
        byte;
      do {
        byte = raw[at++];
        code += (byte & 127) * unit;
        unit *= 128;
      } while (byte > 127);
      const value = code % 2 ? -(code + 1) / 2 : code / 2;
      before = values[i] = written === "differences" ? before + value : value;
    }
  }
  return columns;
}

// Times of each run since its first request or step, whichever was first.
function fromFirst(columns) {
  for (const run of DATA.runs.keys()) {
    const own = [...DATA.engines.keys()].filter(index => DATA.engines[index].run === run);
    const times = own
      .flatMap(index => [columns[`${index}.first`], columns[`${index}.gap`]])
      .filter(column => column.length);
    const first = Math.min(...times.map(column => column[0]));
    for (const index of own) {
      columns[`${index}.first`] = columns[`${index}.first`].map(us => us - first);
      if (columns[`${index}.gap`].length) columns[`${index}.gap`][0] -= first;
    }
  }
}

// One engine with its columns, running sums for means and pyramids for peaks.
function engineOf(told, index, columns) {
  const get = name => columns[`${index}.${name}`];
  const gap = get("gap"),
    length = get("length"),
    rows = gap.length;
  const begin = new Float64Array(rows),
    end = new Float64Array(rows),
    until = new Float64Array(rows);
  for (let i = 0, before = 0; i < rows; i++) {
    begin[i] = before + gap[i];
    end[i] = before = begin[i] + length[i];
  }
  for (let i = 0; i < rows; i++) until[i] = i + 1 < rows ? begin[i + 1] : end[i];
  const e = { ...told, index, rows, begin, end, until, label: labelOf(told), sums: {}, peaks: {} };
  for (const name of COLUMNS) e[name] = get(name);
  for (const name of WORK) e[name] = get(`${name}_tokens`);
  e.budget = get("token_budget");
  const known = (values, i) => Math.max(0, values[i]);
  const sum = value => {
    const s = new Float64Array(rows + 1);
    for (let i = 0; i < rows; i++) s[i + 1] = s[i] + value(i);
    return s;
  };
  e.used = i => known(e.decode, i) + known(e.prefill, i) + known(e.recompute, i);
  for (const name of WORK) e.sums[name] = sum(i => known(e[name], i));
  e.sums.budget = sum(i => known(e.budget, i));
  e.sums.scheduling = sum(i => known(get("offered_tokens"), i));
  e.sums.count = sum(i => e.count[i]);
  e.sums.preempted = sum(i => known(e.preempted, i));
  e.causes = [...new Set(e.cause)].sort((a, b) => a - b);
  for (const c of e.causes) {
    e.sums[`time${c}`] = sum(i => (e.cause[i] === c ? e.until[i] - begin[i] : 0));
    e.sums[`unused${c}`] = sum(i => (e.cause[i] === c ? Math.max(0, e.budget[i] - e.used(i)) : 0));
  }
  for (const name of PEAKS) e.peaks[name] = pyramid(e[name]);
  e.mostWaiting = peak(e.peaks.waiting, 0, rows - 1);
  e.mostRunning = peak(e.peaks.running, 0, rows - 1);
  e.blocks = rows ? e.kv_total.reduce((a, b) => Math.max(a, b), 0) : 0;
  e.step_top = rows ? e.budget.reduce((top, value, i) => Math.max(top, value / e.count[i]), 0) : 0;
  e.sentences = Object.fromEntries(
    ["stops", "preempted"].map(kind => [kind, wordsOf(told.words[kind], name => get(`${kind}.${name}`))]),
  );
  livesOf(e, get);
  return e;
}

// The sentences about steps: templates, columns that fill them, and where those of a step begin.
function wordsOf(templates, get) {
  const step = get("step"),
    named = get("named"),
    requests = new Float64Array(step.length + 1),
    first = new Map();
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
  const first = get("first"),
    pieces = get("pieces"),
    ids = get("ids"),
    kind = get("kind"),
    lasts = get("lasts"),
    tokens = get("tokens");
  let at = 0;
  e.ids = ids;
  e.known = new Set(ids);
  e.lives = ids.map((id, i) => {
    const life = { id, index: i, begin: first[i], end: first[i], pieces: [] };
    for (const last = at + pieces[i]; at < last; at++) {
      const cause = Math.floor(kind[at] / STATES.length);
      life.pieces.push({
        begin: life.end,
        end: life.end + lasts[at],
        state: STATES[kind[at] % STATES.length],
        cause,
        tokens: tokens[at],
      });
      life.end += lasts[at];
    }
    return life;
  });
}

function pyramid(values) {
  const levels = [values];
  for (let below = values; below.length > 1;) {
    const above = new Float64Array((below.length + 1) >> 1);
    for (let i = 0; i < above.length; i++)
      above[i] = Math.max(below[2 * i], 2 * i + 1 < below.length ? below[2 * i + 1] : -1);
    levels.push((below = above));
  }
  return levels;
}

function peak(levels, i, j) {
  // the largest of values i to j
  let most = -1;
  for (let level = 0; i <= j; level++, i >>= 1, j >>= 1) {
    const values = levels[level];
    if (i & 1) most = Math.max(most, values[i++]);
    if (!(j & 1)) most = Math.max(most, values[j--]);
  }
  return most;
}

// The last place whose value is at most this, in values that ascend; -1 before the first.
function lastAtMost(values, value) {
  let low = 0,
    high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// The last row that has begun; -1 before the first.
const rowAt = (e, us) => lastAtMost(e.begin, us);

// The row that a step is in; -1 for none.
function rowOf(e, step) {
  const i = lastAtMost(e.step, step);
  return i >= 0 && step < e.step[i] + e.count[i] ? i : -1;
}

// The sum of rows i to j, from running sums.
const between = (sums, i, j) => sums[j + 1] - sums[i];

const merged = spans =>
  spans.reduce((found, [begin, end]) => {
    // those less than 1 % of the run apart as one
    const last = found.at(-1);
    if (last && begin - last[1] < (whole.end - whole.begin) / 100) last[1] = Math.max(last[1], end);
    else found.push([begin, end]);
    return found;
  }, []);

// Times of a finding's steps: all that had its cause where the report names the first only.
function spansOf(e) {
  const found = DATA.findings[finding];
  if (!found || !found.ranks.includes(e.rank) || e.run) return [];
  if (e.spans?.of === found) return e.spans;
  const spans = [],
    add = (begin, end) => {
      const last = spans.at(-1);
      if (last?.[1] === begin) last[1] = end;
      else spans.push([begin, end]);
    };
  const code = DATA.causes.findIndex(cause => cause.word === found.cause);
  spans.by_cause = found.named < found.count && e.causes.includes(code);
  if (spans.by_cause) {
    for (let i = 0; i < e.rows; i++) if (e.cause[i] === code) add(e.begin[i], e.until[i]);
  } else if (found.rank === e.rank)
    for (const [first, last] of found.steps) {
      const i = rowOf(e, first),
        j = rowOf(e, last);
      if (i >= 0 && j >= 0) add(e.begin[i], e.end[j]);
    }
  spans.of = found;
  spans.whole = spans.by_cause || found.named >= found.count;
  return (e.spans = spans);
}
