// Sentences about a step, a request and a part of the run, for the details and for screen readers.

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
const requestHash = id => `#request=${encodeURIComponent(id).replace(/[!'()*]/g, mark => `%${mark.charCodeAt(0).toString(16).toUpperCase()}`)}`; // as step_link in renderers/html.py
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

function closing() {
  const button = element("button", "Close");
  button.type = "button"; button.className = "close"; button.title = "Esc";
  button.addEventListener("click", ACTIONS.none);
  return button;
}

function show(...nodes) {
  byId("details").classList.toggle("chosen", nodes.length > 1);
  byId("details").replaceChildren(...(nodes.length > 1 ? [closing()] : []), ...nodes); byId("details").scrollTop = 0;
}
