// Sentences and figures as present/phrases.py and present/numbers.py write them, for the browser.
"use strict";

const sentences = (() => {
  const MOST_REQUESTS = 3;

  const grouped = value => value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  const integer = value => value === null || value === undefined ? "-" : grouped(value);
  const counted = (count, noun, plural) => `${integer(count)} ${count === 1 ? noun : plural || `${noun}s`}`;

  // Python rounds what lies exactly in the middle to the even digit, JavaScript away from zero. In binary only
  // odd multiples of a half, a quarter and an eighth lie there, for none, one and two digits.
  function fixed(value, digits) {
    const halves = value * 2 ** (digits + 1);
    if (!Number.isInteger(halves) || halves % 2 === 0) return value.toFixed(digits);
    const below = Math.floor(value * 10 ** digits);
    return ((below % 2 ? below + 1 : below) / 10 ** digits).toFixed(digits);
  }

  // Three digits that matter: 0.42, 12.3, 1,234; from a microsecond on, which is 0.001 ms.
  function number(value) {
    if (value === null || value === undefined) return "-";
    if (Number.isInteger(value)) return grouped(value);
    const size = Math.abs(value);
    if (size < 0.1) return String(Number(value.toPrecision(2)));
    return size < 10 ? fixed(value, 2) : size < 100 ? fixed(value, 1) : grouped(Number(fixed(value, 0)));
  }

  const duration = us => us >= 10_000_000 ? `${number(us / 1e6)} s` : `${number(us / 1e3)} ms`;

  function percent(fraction) {
    if (fraction === null || fraction === undefined) return "-";
    if (fraction > 0 && fraction < 0.005) return "<1 %";
    if (fraction > 0.995 && fraction < 1) return ">99 %";
    return `${fixed(100 * fraction, 0)} %`;
  }

  // Some ids of `count` requests: "a, b, c and 61 others".
  function requestPieces({ ids, count }) {
    const shown = ids.length === count && count <= MOST_REQUESTS + 1 ? ids : ids.slice(0, MOST_REQUESTS);
    const rest = count - shown.length;
    if (!shown.length) return [{ text: counted(count, "request") }];
    const listed = shown.flatMap((id, at) => {
      const between = at === shown.length - 1 && !rest ? " and " : ", ";
      return [...(at ? [{ text: between }] : []), { is: "request", text: id }];
    });
    return rest ? [...listed, { text: ` and ${counted(rest, "other")}` }] : listed;
  }

  // A sentence of present/step_templates.py as pieces {text, is}, to become text nodes, links and code elements.
  // `values`: slot to a number, a request's id, or {ids, count}.
  function pieces(parts, values) {
    return parts.flatMap(part => {
      if (typeof part === "string") return [{ text: part }];
      if (part.is !== "slot") return [part];
      const value = values[part.name];
      if (part.kind === "requests") return requestPieces(value);
      if (part.kind === "request") return [{ is: "request", text: value }];
      return [{ text: part.kind === "count" ? counted(value, part.noun, part.plural) : number(value) }];
    });
  }

  return { integer, counted, number, duration, percent, pieces };
})();
