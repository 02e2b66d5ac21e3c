// Sentences about a step, a request and a part of the run, for the details and for screen readers.

function sumsOf(e, begin, end) {
  const i = Math.max(0, rowAt(e, begin)),
    j = rowAt(e, end),
    of = name => (j < i ? 0 : between(e.sums[name], i, j));
  const tokens = WORK.reduce((sum, name) => sum + of(name), 0);
  return {
    steps: of("count"),
    preemptions: of("preempted"),
    use: of("scheduling") ? tokens / of("scheduling") : null,
    decode: of("decode"),
    prefill: of("prefill"),
    recompute: of("recompute"),
    waiting: e.causes.filter(c => c !== NOBODY).map(c => [causeWord(c), of(`time${c}`)]),
  };
}

function sentence(e, begin, end) {
  const sums = sumsOf(e, begin, end),
    waits = sums.waiting.filter(([, us]) => us > 0).sort((a, b) => b[1] - a[1]);
  const parts = [
    counted(sums.steps, "step"),
    e.knows.includes("LIVES") && counted(e.request_count, "request"),
    sums.use !== null && `${percent(sums.use)} of the token budget used`,
    e.knows.includes("PREEMPTIONS") && counted(sums.preemptions, "preemption"),
  ]; // what is not recorded is not said
  return (
    parts.filter(Boolean).join(", ") +
    (waits.length
      ? `; requests refused for ${waits.map(([word, us]) => `${word} during ${duration(us)}`).join(", ")}`
      : "")
  );
}

function rowWords(e, i) {
  if (e.count[i] > 1) return `steps ${e.step[i]}-${e.step[i] + e.count[i] - 1}`;
  return `step ${e.step[i]}`;
}

function briefly(e, i) {
  const cause = causeWord(e.cause[i]);
  return `${rowWords(e, i)}: ${WORK.map(name => `${name} ${integer(Math.max(0, e[name][i]))}`).join(", ")} of ${integer(e.budget[i])} tokens; running ${e.running[i]}, waiting ${e.waiting[i]}${cause ? ` for ${cause}` : ""}`;
}

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function tableOf(rows) {
  const table = element("table");
  for (const [head, ...cells] of rows) {
    const row = table.insertRow();
    row.append(element("th", String(head)));
    for (const cell of cells) row.insertCell().append(cell);
  }
  const wide = element("div", "", table);
  wide.className = "wide";
  return wide;
}

function link(text, hash) {
  const made = element("a", text);
  made.href = hash;
  return made;
}
const requestHash = id =>
  `#request=${encodeURIComponent(id).replace(/[!'()*]/g, mark => `%${mark.charCodeAt(0).toString(16).toUpperCase()}`)}`; // as step_link in renderers/html.py
const path = e => DATA.runs[e.run].path;

// A sentence as nodes: text, code, and links to requests of the picture.
function written(e, template, values) {
  return sentences.pieces(template, values).map(({ is, text }) => {
    if (is === "request" && e.known.has(text)) return link(text, requestHash(text));
    return is && is !== "request" ? element("code", text) : text;
  });
}

// The sentences of one kind about the step of a row.
function sentencesOf(e, i, kind) {
  const { get, step, first, requests, templates } = e.sentences[kind],
    found = [];
  if (e.count[i] > 1) return found;
  const id = place => e.ids[place] ?? "a request that is not drawn";
  for (let k = first.get(e.step[i]) ?? Infinity; step[k] === e.step[i]; k++) {
    const known = name => (get(name)[k] === UNKNOWN ? null : get(name)[k]);
    const values =
      kind === "stops"
        ? {
            requests: { ids: [...get("request").slice(requests[k], requests[k + 1])].map(id), count: get("count")[k] },
            needed: known("needed") ?? 0,
            free: e.kv_total[i] - e.kv_used[i] - get("free")[k],
            left: e.budget[i] - e.used(i) - get("left")[k],
          }
        : {
            victim: id(get("victim")[k]),
            for: id(get("for")[k]),
            lost: known("lost"),
            needed: known("needed") ?? 0,
            freed: known("freed"),
            times: known("times"),
          };
    found.push(element("p", "", ...written(e, templates[get("template")[k]], values)));
  }
  return found;
}

function showStep(e, i) {
  if (showStory(e, `step=${e.step[i]}&rank=${e.rank}`)) return;
  const known = name => (e[name][i] === UNKNOWN ? null : e[name][i]),
    trial = e.trial[i] === UNKNOWN ? "" : ` of trial ${e.trial[i]}`;
  const scheduled = e.requests[i] > 0,
    left = e.budget[i] === UNKNOWN ? null : e.budget[i] - e.used(i);
  const used = written(e, e.words.used[scheduled ? 0 : 1], {
    tokens: e.used(i),
    budget: known("budget"),
    left,
    requests: e.requests[i],
  });
  const blocks = known("kv_used") === null ? 2 : 0,
    after = {
      running: known("running"),
      waiting: known("waiting"),
      free: e.kv_total[i] - e.kv_used[i],
      total: e.kv_total[i],
    };
  const lost = sentencesOf(e, i, "preempted"),
    stops = sentencesOf(e, i, "stops");
  const rows = [
    [
      "time",
      `${(e.begin[i] / 1e6).toFixed(3)} s; its output was back after ${duration(e.end[i] - e.begin[i])}`,
    ],
    [
      "used",
      element("div", "", ...used, `: ${WORK.map(name => `${integer(known(name))} ${name}`).join(", ")}`),
    ],
    ...(lost.length ? [["preempted", element("div", "", ...lost)]] : []),
    [
      "stopped",
      stops.length ? element("div", "", ...stops) : (causeWord(e.cause[i]) ?? "no exit was recorded"),
    ],
    ["after", element("div", "", ...written(e, e.words.crowd[blocks], after))],
  ];
  const heading = rowWords(e, i);
  const command = `step ${path(e)} ${e.step[i]}${e.rank ? ` --engine ${e.rank}` : ""}`;
  showRows(e, heading[0].toUpperCase() + heading.slice(1) + trial, rows, command);
}

// What is known of a step or a request, and the command that shows all of it.
function showRows(e, heading, rows, command) {
  show(
    element("h2", heading + (e.label ? ` (${e.label})` : "")),
    tableOf(rows),
    element("p", "All of it: ", element("code", `schedtrace ${command}`)),
  );
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
    const causes = piece.cause === BY_STEP ? causesWithin(e, piece) : [causeWord(piece.cause - FIRST_CAUSE)];
    const cause = piece.cause === BY_STEP || piece.cause >= FIRST_CAUSE ? ` (${causes.join(", ")})` : "";
    return [
      `${(piece.begin / 1e6).toFixed(6)} s`,
      stateWord(piece) + cause,
      duration(piece.end - piece.begin),
      piece.tokens > 0 ? `${integer(piece.tokens)} tokens` : "",
    ];
  });
  showRows(e, `Request ${life.id}`, rows, `request ${path(e)} ${life.id}`);
}

function causesWithin(e, piece) {
  const words = new Set();
  for (let i = Math.max(0, rowAt(e, piece.begin)); i < e.rows && e.begin[i] < piece.end; i++)
    if (e.cause[i] >= 0) words.add(causeWord(e.cause[i]));
  return [...words];
}

function closing() {
  const button = element("button", "Close");
  button.type = "button";
  button.className = "close";
  button.title = "Esc";
  button.addEventListener("click", ACTIONS.none);
  return button;
}

function show(...nodes) {
  byId("details").classList.toggle("chosen", nodes.length > 1);
  byId("details").replaceChildren(...(nodes.length > 1 ? [closing()] : []), ...nodes);
  byId("details").scrollTop = 0;
}
