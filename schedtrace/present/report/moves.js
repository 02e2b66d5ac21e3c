// Zooming, choosing, addresses, pointers, keys; and the start of it all.

let leastSpan = 20;
const lengthOf = (begin, end) => clamp(end - begin, leastSpan, whole.end - whole.begin);

function setView(begin, length) {
  view.begin = clamp(begin, whole.begin, whole.end - length);
  view.end = view.begin + length;
}

function zoomTo(begin, end, how = "replace") {
  const length = lengthOf(begin, end);
  setView((begin + end) / 2 - length / 2, length);
  remember(how);
  redraw();
}

const zoomBy = (factor, at = (view.begin + view.end) / 2, how) =>
  zoomTo(at - (at - view.begin) * factor, at + (view.end - at) * factor, how);
const moveBy = share =>
  zoomTo(view.begin + share * (view.end - view.begin), view.end + share * (view.end - view.begin));

function remember(how) {
  const parts = []; // of the address
  if (chosen?.life) parts.push(requestHash(chosen.life.id).slice(1));
  if (chosen?.row !== undefined) parts.push(`step=${chosen.e.step[chosen.row]}&rank=${chosen.e.rank}`);
  if (chosen?.e.run) parts.push(`run=${chosen.e.run}`);
  if (view.begin > whole.begin || view.end < whole.end)
    parts.push(`t=${(view.begin / 1e6).toFixed(6)}-${(view.end / 1e6).toFixed(6)}`);
  const hash = `#${parts.join("&")}`;
  if (hash === (location.hash || "#")) return;
  if (how === "push") history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
}

function follow() {
  // what the address asks for
  const asks = new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B")),
    time = /^(-?[\d.]+)-(-?[\d.]+)$/.exec(asks.get("t") ?? "");
  const of = engines.filter(e => e.run === Number(asks.get("run") ?? 0));
  chosen = null;
  let span = time ? [1e6 * time[1], 1e6 * time[2]] : null;
  if (asks.has("step")) {
    const e = of.find(one => one.rank === Number(asks.get("rank") ?? 0)),
      row = e ? rowOf(e, Number(asks.get("step"))) : -1;
    if (row >= 0) {
      chosen = { e, row };
      open(e);
      span ??= [e.begin[Math.max(0, row - 20)], e.until[Math.min(e.rows - 1, row + 20)]];
      showStep(e, row);
    } else {
      const why = "it belongs to the warm-up or to another part of the trace.";
      show(element("p", `Step ${asks.get("step")} is not in the picture: ${why}`));
    }
  } else if (asks.has("request")) {
    const found = of.flatMap(e => e.lives.filter(life => life.id === asks.get("request")).map(life => ({ e, life })));
    if (found.length) {
      const { e, life } = (chosen = found[0]),
        rim = (life.end - life.begin) / 20;
      open(e);
      span ??= [life.begin - rim, life.end + rim];
      showLife(e, life);
    } else show(element("p", `Request ${asks.get("request")} is not in the picture.`));
  } else show(element("p", NOTHING_CHOSEN));
  const [begin, end] = span && span.every(Number.isFinite) && span[1] > span[0] ? span : [whole.begin, whole.end];
  setView(begin, lengthOf(begin, end));
  redraw();
}

function choose(e, what) {
  chosen = { e, ...what };
  if (what.life) showLife(e, what.life);
  else showStep(e, what.row);
  remember("push");
  redraw();
}

function nextStep(by) {
  const e = chosen?.e ?? engines[0];
  if (!e?.rows) return;
  const middle = rowAt(e, (view.begin + view.end) / 2),
    row = clamp(chosen?.row === undefined ? middle : chosen.row + by, 0, e.rows - 1);
  chosen = { e, row };
  if (e.begin[row] < view.begin || e.until[row] > view.end) {
    const half = (view.end - view.begin) / 2;
    zoomTo(e.begin[row] - half, e.begin[row] + half);
  }
  showStep(e, row);
  remember("replace");
  redraw();
}

function showFinding(at) {
  finding = at;
  const spans = engines.map(e => [e, spansOf(e)]).find(([, one]) => one.length);
  document
    .querySelectorAll("[data-finding]")
    .forEach((button, i) => button.setAttribute("aria-pressed", String(i === at)));
  if (!spans) return redraw();
  const [e, all] = spans,
    found = DATA.findings[at],
    begin = all[0][0],
    end = all.at(-1)[1],
    rim = (end - begin) / 20;
  open(e);
  const listed = all.by_cause
    ? `; marked are all that left requests waiting for ${found.cause}`
    : found.named < found.count
      ? `; the first ${found.named} of them are marked`
      : "";
  show(
    element("h2", found.title),
    element(
      "p",
      `${integer(found.count)} steps show it${listed}, from ${seconds(begin)} to ${seconds(end)} s. The first: `,
      link(`step ${found.steps[0][0]}`, `#step=${found.steps[0][0]}&rank=${found.rank}`),
    ),
  );
  chosen = null;
  zoomTo(begin - rim, end + rim, "push");
}

function open(e) {
  if (!e.open) {
    e.open = true;
    e.toggle?.setAttribute("aria-expanded", "true");
  }
}

function pointing(canvas, boxOf, select) {
  const down = new Map();
  const brush = canvas.parentElement.appendChild(element("div"));
  brush.className = "brush";
  brush.hidden = true;
  let start = null,
    spread = 0;
  const x = event => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointerdown", event => {
    down.set(event.pointerId, x(event));
    canvas.setPointerCapture(event.pointerId);
    start = { x: x(event), begin: view.begin, end: view.end, moved: false };
    if (down.size === 2) {
      const [a, b] = [...down.values()];
      spread = Math.abs(a - b);
      start.two = true;
      start.middle = boxOf().us((a + b) / 2);
    }
  });
  canvas.addEventListener("pointermove", event => {
    const box = boxOf();
    if (!box) return;
    if (!down.has(event.pointerId)) return select(event, "hover");
    down.set(event.pointerId, x(event));
    const by = x(event) - start.x;
    start.moved ||= Math.abs(by) > 4;
    if (down.size === 2) {
      const [a, b] = [...down.values()],
        factor = spread / Math.max(8, Math.abs(a - b));
      zoomTo(start.middle - (start.middle - start.begin) * factor, start.middle + (start.end - start.middle) * factor);
    } else if (start.two) return;
    else if (event.pointerType === "touch" && canvas.id !== "map") {
      // one finger moves
      const shift = (-by / box.width) * (start.end - start.begin);
      if (start.moved) zoomTo(start.begin + shift, start.end + shift);
    } else if (start.moved) {
      brush.hidden = false;
      brush.style.left = `${canvas.offsetLeft + Math.min(start.x, x(event))}px`;
      brush.style.width = `${Math.abs(by)}px`;
      brush.style.top = `${canvas.offsetTop}px`;
      brush.style.height = `${canvas.clientHeight}px`;
    }
  });
  const up = event => {
    if (!down.delete(event.pointerId) || down.size) return;
    brush.hidden = true;
    const box = boxOf(),
      [from, to] = [start.x, x(event)].sort((a, b) => a - b);
    if (
      event.type === "pointercancel" ||
      start.two ||
      (start.moved && event.pointerType === "touch" && canvas.id !== "map")
    )
      return remember("replace");
    if (start.moved) zoomTo(box.us(Math.max(from, box.left)), box.us(to), "push");
    else select(event, "click");
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => {
    byId("under").textContent = "\u00a0";
  });
  canvas.addEventListener(
    "wheel",
    event => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!sideways && !event.ctrlKey && !event.metaKey && canvas.id !== "map") return; // the wheel alone scrolls the page
      event.preventDefault();
      if (sideways) moveBy(event.deltaX / 800);
      else zoomBy(Math.exp(clamp(event.deltaY, -100, 100) / 200), boxOf().us(x(event)));
    },
    { passive: false },
  );
}

function onEngine(e, event, kind) {
  const at = e.canvas.getBoundingClientRect(),
    x = event.clientX - at.left,
    y = event.clientY - at.top;
  const lane = e.open && y >= e.lanes.y ? e.lanes.lanes[Math.floor((y - e.lanes.y) / e.lanes.height)] : null;
  const row = x < e.box.left && !lane ? -1 : rowAt(e, e.box.us(x));
  const under = lane
    ? `request ${lane.id}: ${lane.pieces.find(piece => piece.end > e.box.us(x) && piece.begin <= e.box.us(x))?.state.replace("_", " ") ?? "not here"}`
    : row >= 0
      ? briefly(e, row)
      : "\u00a0";
  byId("under").textContent = under;
  if (kind === "click" && lane) choose(e, { life: lane });
  else if (kind === "click" && row >= 0) choose(e, { row });
}

const ACTIONS = {
  in: () => zoomBy(0.5),
  out: () => zoomBy(2),
  left: () => moveBy(-0.25),
  right: () => moveBy(0.25),
  all: () => zoomTo(whole.begin, whole.end, "push"),
  home: () => moveBy(-1e9),
  end: () => moveBy(1e9),
  none: () => {
    chosen = null;
    show(element("p", NOTHING_CHOSEN));
    remember("push");
    redraw();
  },
  previous: () => nextStep(-1),
  next: () => nextStep(1),
  fit: () => {
    fitted = !fitted;
    document.querySelector("[data-do=fit]").setAttribute("aria-pressed", String(fitted));
    redraw();
  },
};
const KEYS = {
  "+": "in",
  "=": "in",
  "-": "out",
  ArrowLeft: "left",
  ArrowRight: "right",
  0: "all",
  Home: "home",
  End: "end",
  "[": "previous",
  "]": "next",
  y: "fit",
  Escape: "none",
};

function listen() {
  document.addEventListener("keydown", event => {
    const action = KEYS[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("summary, .wide")) return;
    event.preventDefault();
    ACTIONS[action]();
  });
  byId("tools").addEventListener("click", event => ACTIONS[event.target.closest("button")?.dataset.do]?.());
  byId("findings")?.addEventListener("click", event => {
    const at = event.target.closest("button")?.dataset.finding;
    if (at !== undefined) showFinding(Number(at));
  });
  pointing(
    byId("map"),
    () => byId("map").box,
    (event, kind) => {
      if (kind !== "click") return;
      const middle = byId("map").box.us(event.clientX - byId("map").getBoundingClientRect().left),
        half = (view.end - view.begin) / 2;
      zoomTo(middle - half, middle + half, "push");
    },
  );
  document.addEventListener("click", event => {
    // a link to a step or a request, from wherever it stands
    const anchor = event.target.closest("a[href^='#']"),
      hash = anchor?.getAttribute("href"),
      { step, lastStep, rank } = anchor?.dataset ?? {};
    if (!hash || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const e = engines.find(one => !one.run && one.rank === Number(rank)),
      to = e && lastStep > step ? rowOf(e, Number(lastStep)) : -1;
    history.pushState(null, "", hash);
    follow();
    if (to >= 0 && chosen) {
      const from = e.begin[chosen.row],
        rim = (e.end[to] - from) / 20;
      zoomTo(from - rim, e.end[to] + rim);
    }
    byId("tools").scrollIntoView({ block: "start" });
  });
  window.addEventListener("hashchange", follow);
  window.addEventListener("popstate", follow);
  new ResizeObserver(redraw).observe(byId("timeline"));
  const dark = matchMedia("(prefers-color-scheme: dark)"),
    repaint = () => {
      readColours();
      legend();
      redraw();
    };
  dark.addEventListener("change", repaint);
  byId("theme").addEventListener("click", event => {
    const root = document.documentElement,
      next = { undefined: "light", light: "dark", dark: undefined }[root.dataset.theme];
    if (next) root.dataset.theme = next;
    else delete root.dataset.theme;
    event.currentTarget.textContent = `Colours: ${next ?? "system"}`;
    repaint();
  });
}

function addEngine(e) {
  const box = byId("engines").appendChild(element("section")),
    heading = element("h2", e.label);
  box.className = "engine";
  heading.append(element("span", sentence(e, whole.begin, whole.end)));
  if (engines.length > 2) {
    e.toggle = element("button", "Show all panels");
    e.toggle.type = "button";
    e.toggle.addEventListener("click", () => {
      e.open = !e.open;
      e.toggle.setAttribute("aria-expanded", String(e.open));
      e.toggle.textContent = e.open ? "Show less" : "Show all panels";
      redraw();
    });
    heading.append(e.toggle);
  }
  e.canvas = element("canvas");
  e.canvas.setAttribute("role", "img");
  e.canvas.tabIndex = 0;
  e.canvas.setAttribute(
    "aria-label",
    `Timeline${e.label ? ` of ${e.label}` : ""}: ${sentence(e, whole.begin, whole.end)}.`,
  );
  box.append(heading, e.canvas);
  pointing(
    e.canvas,
    () => e.box,
    (event, kind) => onEngine(e, event, kind),
  );
}

function trialsOf(e) {
  const found = [];
  for (let i = 0; i < e.rows; i++)
    if (e.trial[i] >= 0 && (!i || e.trial[i] !== e.trial[i - 1])) found.push({ trial: e.trial[i], us: e.begin[i] });
  return found.length > 1 ? found : [];
}

// The median time from a row's begin to the next: the mean would count hours in which the engine was idle.
const usualStep = e => e.until.map((us, i) => us - e.begin[i]).sort()[e.rows >> 1];

async function start() {
  const columns = await unpacked();
  stories = { at: columns["stories.at"] ?? [], html: columns["stories.html"] ?? [] };
  if (DATA.from_first) fromFirst(columns);
  engines = DATA.engines.map((told, index) => engineOf(told, index, columns));
  const moments = engines.flatMap(e => [e.rows ? e.begin[0] : Infinity, e.lives[0]?.begin ?? Infinity]),
    ends = engines.flatMap(e => [
      e.rows ? e.until[e.rows - 1] : -Infinity,
      ...e.lives.map(life => life.end),
    ]);
  whole.begin = Math.min(...moments);
  whole.end = Math.max(...ends);
  if (!(whole.end > whole.begin)) {
    whole.begin = Number.isFinite(whole.begin) ? whole.begin : 0;
    whole.end = whole.begin + 1e6;
  }
  Object.assign(view, whole);
  leastSpan = Math.max(
    20,
    engines.reduce(
      (least, e) => Math.min(least, e.rows ? usualStep(e) / 2 : Infinity),
      (whole.end - whole.begin) / 10,
    ),
  );
  engines.forEach((e, i) => {
    e.open = engines.length <= 2 || i === 0;
    e.trials = trialsOf(e);
    e.first_of_run = engines.findIndex(one => one.run === e.run) === i;
  });
  readColours();
  legend();
  engines.forEach(addEngine);
  listen();
  follow();
  document.querySelector("[data-finding]")?.setAttribute("aria-pressed", "true");
  draw();
  if (chosen) byId("tools").scrollIntoView({ block: "start" }); // whoever follows an address wants to see it
  byId("engines").dataset.painted = String(Math.round(performance.now()));
  window.schedtrace = { engines, stories, view, whole, zoomTo, draw, sumsOf };
}

start().catch(error => {
  byId("engines").textContent = `The timeline cannot be drawn: ${error.message}`;
  throw error;
});
