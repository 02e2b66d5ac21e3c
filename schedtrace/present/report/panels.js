// The picture: colours, where the panels are, and a function that draws each.

function readColours() {
  const probe = document.body.appendChild(element("i"));
  const painted = ["preempted", ...COLOURED, "other", "nobody", "front_end", "kv"];
  for (const name of ["background", "text", "dim-text", "line", "link", ...WORK, ...painted]) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

function causeColour(code) {
  const word = causeWord(code);
  return colours[word === undefined || word === "next_step" ? "nobody" : COLOURED.includes(word) ? word : "other"];
}

function legend() {
  const swatch = (name, text, title = "") => {
    const [svg, rect] = ["svg", "rect"].map(tag => document.createElementNS("http://www.w3.org/2000/svg", tag));
    for (const [key, value] of Object.entries({ width: 11, height: 11, fill: colours[name] }))
      rect.setAttribute(key, value);
    svg.setAttribute("aria-hidden", "true");
    svg.append(rect);
    const item = element("span", "", svg, text);
    item.title = title;
    return item;
  };
  const line = (title, items) => element("p", "", element("b", title), ...items);
  const seen = new Set(engines.flatMap(e => e.causes));
  for (const e of engines)
    for (const life of e.lives)
      for (const piece of life.pieces) if (piece.cause >= FIRST_CAUSE) seen.add(piece.cause - FIRST_CAUSE);
  const words = DATA.causes.filter((cause, code) => seen.has(code) && cause.word !== "next_step");
  const own = COLOURED.flatMap(word => words.filter(cause => cause.word === word)).map(cause =>
    swatch(cause.word, cause.word, cause.meaning),
  );
  const others = words.filter(cause => !COLOURED.includes(cause.word)).map(cause => cause.word);
  byId("legend").replaceChildren(
    line("Work", [...[...WORK, "preempted"].map(name => swatch(name, name)), swatch("front_end", "front end")]),
    line("Waiting, and budget unused, for", [
      ...own,
      ...(others.length ? [swatch("other", others.join(", "))] : []),
      swatch("nobody", "none refused"),
    ]),
  );
}

// Where times are drawn: right of a gutter for labels, unless the canvas is narrow.
function timeBox(canvas, span) {
  const narrow = canvas.clientWidth < 600,
    left = narrow ? 0 : 112;
  const box = { left, narrow, width: Math.max(50, canvas.clientWidth - left - (narrow ? 0 : 8)) };
  box.x = us => left + ((us - span.begin) / (span.end - span.begin)) * box.width;
  box.us = x => span.begin + ((x - left) / box.width) * (span.end - span.begin);
  return box;
}

// Where the panels of an engine are; where it is narrow, each has a line above it for its label.
function layout(e) {
  const box = { ...timeBox(e.canvas, view), panels: {} },
    head = box.narrow ? 15 : 0;
  let y = 0;
  for (const [name, height] of Object.entries(
    e.open
      ? { axis: 18, ribbon: 20, steps: 16, budget: 112, queue: 120, kv: 50, requests: 300 }
      : { axis: 18, ribbon: 20, queue: 60 },
  )) {
    y += name === "axis" || name === "steps" ? 0 : name === "ribbon" && box.narrow ? head + 4 : head;
    box.panels[name] = { y, height };
    y += height + (name === "ribbon" || name === "steps" ? 2 : 10);
  }
  box.height = y + 8;
  return box;
}

function prepared(canvas, height) {
  // a context in CSS pixels
  const ratio = window.devicePixelRatio || 1,
    width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  return context;
}

// For each column of pixels the rows i to j that are seen there, and whether row j began there.
function columnsOf(e, box) {
  const found = [],
    right = box.left + box.width;
  let next = rowAt(e, box.us(box.left)) + 1;
  for (let x = box.left; x < right; x++) {
    const end = box.us(x + 1),
      i = next - 1;
    while (next < e.rows && e.begin[next] < end)
      next = next - i > 64 ? Math.max(next + 1, Math.min(rowAt(e, end - 1e-3) + 1, e.rows)) : next + 1;
    if (next - 1 >= 0)
      found.push({
        x,
        i: Math.max(0, i),
        j: next - 1,
        fresh: next - 1 > i,
        from: Math.max(0, i + (next - 1 > i ? 1 : 0)),
      });
  }
  return found;
}

function title(context, box, panel, text, more = "") {
  context.textAlign = "left";
  const y = box.narrow ? panel.y - (text === "waiting for" ? 12 : 8) : panel.y + 8;
  context.fillStyle = colours.text;
  context.fillText(text, 0, y);
  context.fillStyle = colours["dim-text"];
  if (box.narrow) context.fillText(more, context.measureText(`${text}  `).width, y);
  else context.fillText(more, 0, y + 15);
}

function frame(context, box, panel) {
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.strokeRect(box.left + 0.5, panel.y + 0.5, box.width - 1, panel.height - 1);
}

function drawAxis(context, box, panel, e) {
  const about = (view.end - view.begin) / Math.max(2, box.width / 110),
    unit = 10 ** Math.floor(Math.log10(about));
  const every = unit * ([1, 2, 5, 10].find(times => times * unit >= about) ?? 10),
    digits = Math.max(0, 6 - Math.floor(Math.log10(every) + 1e-9));
  context.textAlign = "center";
  context.lineWidth = 1;
  context.fillStyle = colours["dim-text"];
  context.strokeStyle = colours.line;
  for (let us = Math.ceil(view.begin / every) * every; us <= view.end; us += every) {
    const x = Math.round(box.x(us)) + 0.5,
      text = `${(us / 1e6).toFixed(Math.min(6, digits))} s`,
      half = context.measureText(text).width / 2;
    context.beginPath();
    context.moveTo(x, panel.y + panel.height);
    context.lineTo(x, box.height);
    context.stroke();
    const [before, after] = box.narrow ? [0, 0] : [20, 8];
    if (x - half >= box.left - before && x + half <= box.left + box.width + after)
      context.fillText(text, x, panel.y + 9);
  }
}

// The share of each cause in the time of a column, from y downwards.
function drawCauses(context, e, { x, i, j }, y, height, colourOf = causeColour) {
  const times = e.causes.map(c => between(e.sums[`time${c}`], i, j)),
    all = Math.max(
      1,
      times.reduce((sum, us) => sum + us, 0),
    );
  e.causes.forEach((c, k) => {
    const part = (times[k] / all) * height;
    if (part <= 0) return;
    context.fillStyle = colourOf(c);
    context.fillRect(x, y, 1, part);
    y += part;
  });
}

function drawRibbon(context, panel, e, columns) {
  for (const column of columns) drawCauses(context, e, column, panel.y, panel.height);
}

function drawSteps(context, box, panel, e) {
  const first = Math.max(0, rowAt(e, view.begin)),
    last = rowAt(e, view.end);
  const each = box.width / Math.max(1, last - first + 1);
  if (each < 4) return title(context, box, panel, "", "");
  for (let i = Math.max(0, first - 1); i <= last; i++) {
    // steps in flight at the same time lie in two lanes
    const x = Math.max(box.left, box.x(e.begin[i])),
      width = Math.max(1, Math.min(box.left + box.width, box.x(e.end[i])) - x - 1);
    const y = panel.y + (i % 2 ? panel.height / 2 : 0);
    if (box.x(e.end[i]) <= box.left) continue;
    context.fillStyle = e.requests[i] > 0 ? colours.kv : colours.nobody;
    context.fillRect(x, y, width, panel.height / 2 - 1);
    if (width > 46 && panel.height >= 28) {
      context.fillStyle = colours.text;
      context.textAlign = "left";
      context.fillText(e.step[i], x + 2, y + panel.height / 4);
    }
  }
  title(context, box, { y: panel.y - (box.narrow ? -16 : 0) }, box.narrow ? "" : "steps");
}

function usedAStep(e, { from, j }) {
  return WORK.reduce((sum, name) => sum + between(e.sums[name], from, j), 0) / between(e.sums.count, from, j);
}

function drawBudget(context, box, panel, e, columns) {
  let top = e.step_top;
  if (fitted)
    top = Math.max(1, 1.1 * columns.reduce((most, column) => Math.max(most, usedAStep(e, column)), 0));
  if (!top) return title(context, box, panel, "token budget", "not recorded");
  for (const { x, from, j, fresh } of columns) {
    if (!fresh && box.us(x) >= e.end[j]) continue; // idle: the step before is over
    const scale = panel.height / top / between(e.sums.count, from, j);
    let y = panel.y + panel.height;
    const stack = (sums, colour, tint) => {
      const height = Math.min(y - panel.y, between(sums, from, j) * scale);
      if (height <= 0) return;
      context.globalAlpha = tint;
      context.fillStyle = colour;
      context.fillRect(x, (y -= height), 1, height);
    };
    for (const name of WORK) stack(e.sums[name], colours[name], 1);
    for (const c of e.causes) stack(e.sums[`unused${c}`], causeColour(c), c === NOBODY ? 1 : 0.55);
  }
  context.globalAlpha = 1;
  frame(context, box, panel);
  const shown = fitted ? `to ${integer(top)} of ${integer(e.step_top)}` : `${integer(top)} a step`;
  title(context, box, panel, "token budget", shown);
}

// Running upwards, waiting downwards in the colours of causes, a tick below where requests were preempted.
function drawQueue(context, box, panel, e, columns) {
  if (e.mostRunning < 0) return title(context, box, panel, "running", "not recorded");
  const most = Math.max(1, e.mostRunning, e.seats <= 4 * e.mostRunning ? e.seats : 0),
    waiting = Math.max(1, e.mostWaiting);
  const up = clamp(most / (most + waiting), 0.3, 0.75) * panel.height,
    zero = panel.y + up,
    down = panel.height - up;
  const colourOf = c => (c === NOBODY ? colours.front_end : causeColour(c));
  for (const column of columns) {
    const { x, i, j, from, fresh } = column;
    const height = (peak(e.peaks.running, i, j) / most) * up;
    context.fillStyle = colours.decode;
    if (height > 0) context.fillRect(x, zero - height, 1, height);
    const queued = (peak(e.peaks.waiting, i, j) / waiting) * down;
    if (queued > 0) drawCauses(context, e, column, zero, queued, colourOf);
    if (fresh && peak(e.peaks.preempted, from, j) > 0) {
      context.fillStyle = colours.preempted;
      context.fillRect(x - 0.5, panel.y + panel.height + 1, 2, 7);
    }
  }
  context.fillStyle = colours.text;
  context.fillRect(box.left, zero, box.width, 1);
  const seats = e.seats ? ` of ${integer(e.seats)}` : "";
  title(context, box, panel, "running", `up to ${integer(e.mostRunning)}${seats}`);
  if (box.narrow) {
    context.textAlign = "right";
    context.fillStyle = colours["dim-text"];
    context.fillText(`waiting up to ${integer(e.mostWaiting)}`, box.width, panel.y - 8);
  } else if (panel.height > 100)
    title(context, box, { y: Math.max(zero, panel.y + 34) }, "waiting", `up to ${integer(e.mostWaiting)}`);
}

function drawKv(context, box, panel, e, columns) {
  if (!(e.blocks > 0)) return title(context, box, panel, "KV blocks", "not recorded");
  context.fillStyle = colours.kv;
  for (const { x, i, j } of columns) {
    const height = (peak(e.peaks.kv_used, i, j) / e.blocks) * panel.height;
    if (height > 0) context.fillRect(x, panel.y + panel.height - height, 1, height);
  }
  frame(context, box, panel);
  title(context, box, panel, "KV blocks", `of ${integer(e.blocks)}`);
}

// The steps of the chosen finding above the ribbon; lines through all panels at the ends of their longest run.
function drawBrackets(context, box, e) {
  const spans = spansOf(e);
  context.fillStyle = colours.text;
  for (const [begin, end] of spans) {
    const left = Math.max(box.left, box.x(begin)),
      right = Math.min(box.left + box.width, box.x(end));
    if (right > box.left && left < box.left + box.width)
      context.fillRect(left, box.panels.ribbon.y - 4, Math.max(1, right - left), 3);
  }
  const longest = (spans.whole ? merged(spans) : []).reduce(
    (best, span) => (!best || span[1] - span[0] > best[1] - best[0] ? span : best),
    null,
  );
  context.strokeStyle = colours.text;
  context.setLineDash([2, 3]);
  context.lineWidth = 1;
  for (const us of longest && 10 * (longest[1] - longest[0]) > whole.end - whole.begin ? longest : [])
    line(context, box, us);
  context.setLineDash([]);
}

function line(context, box, us, from = box.panels.ribbon.y - 4) {
  const x = Math.round(box.x(us)) + 0.5;
  if (x < box.left || x > box.left + box.width) return;
  context.beginPath();
  context.moveTo(x, from);
  context.lineTo(x, box.height);
  context.stroke();
}

function drawMarks(context, box, e) {
  context.strokeStyle = colours["dim-text"];
  context.lineWidth = 1;
  context.textAlign = "left";
  for (const begun of e.trials) {
    line(context, box, begun.us, 18);
    const x = box.x(begun.us);
    if (x >= box.left - 1 && x < box.left + box.width - 40) {
      context.fillStyle = colours["dim-text"];
      context.fillText(`trial ${begun.trial}`, x + 3, box.height - 5);
    }
  }
  for (const mark of DATA.marks) {
    const i = mark.run === e.run && e.first_of_run ? rowOf(e, mark.step) : -1;
    if (i < 0) continue;
    context.strokeStyle = colours.link;
    context.lineWidth = 2;
    line(context, box, e.begin[i], 0);
    const x = box.x(e.begin[i]),
      text = `first difference: step ${mark.step}`,
      right = x + context.measureText(text).width > box.left + box.width;
    context.fillStyle = colours.link;
    context.textAlign = right ? "right" : "left";
    if (x >= box.left && x <= box.left + box.width) context.fillText(text, x + (right ? -5 : 5), box.height - 5);
  }
  if (chosen?.e === e && chosen.row !== undefined) {
    const left = Math.max(box.left, box.x(e.begin[chosen.row])),
      right = Math.min(box.left + box.width, box.x(e.until[chosen.row]));
    context.strokeStyle = colours.link;
    context.lineWidth = 2;
    if (right >= left) context.strokeRect(left - 1, 1, Math.max(2, right - left) + 1, box.height - 10);
  }
}

function drawEngine(e) {
  const box = (e.box = layout(e)),
    context = prepared(e.canvas, box.height);
  const columns = columnsOf(e, box),
    panels = box.panels;
  drawAxis(context, box, panels.axis, e);
  drawRibbon(context, panels.ribbon, e, columns);
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
  const canvas = byId("map"),
    box = { ...timeBox(canvas, whole), height: 28 };
  const context = prepared(canvas, box.height),
    each = (box.height - 6) / engines.length;
  engines.forEach((e, i) => drawRibbon(context, { y: 3 + i * each, height: each }, e, columnsOf(e, box)));
  if (!box.narrow) title(context, box, { y: 6 }, "whole run");
  const left = box.x(view.begin),
    right = Math.max(left + 3, box.x(view.end));
  context.fillStyle = colours.background;
  context.globalAlpha = 0.7;
  context.fillRect(box.left, 0, left - box.left, box.height);
  context.fillRect(right, 0, box.left + box.width - right, box.height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.text;
  context.lineWidth = 2;
  context.strokeRect(left + 1, 1, right - left - 2, box.height - 2);
  canvas.box = box;
}

function draw() {
  drawMap();
  engines.forEach(drawEngine);
  byId("view").textContent = `${seconds(view.begin)} to ${seconds(view.end)} s`;
}

let asked = 0;
function redraw() {
  if (!asked)
    asked = requestAnimationFrame(() => {
      asked = 0;
      draw();
    });
}
