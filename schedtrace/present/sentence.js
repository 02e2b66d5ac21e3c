// Sentences and figures as model/message.py and model/numbers.py write them, for the browser.
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

  // Rounded, but first to four digits more: noise of its last bits decides no rounding.
  const settled = (value, digits) => fixed(Number(fixed(value, digits + 4)), digits);

  // What is measured, with three digits that matter: 0.42, 5.00, 12.3, 1,234. Counts are integers.
  function number(value) {
    if (value === null || value === undefined) return "-";
    if (Math.abs(fixed(value, 6)) < 0.1) return String(Number(Number(value.toPrecision(6)).toPrecision(2)));
    const [two, one] = [settled(value, 2), settled(value, 1)];
    return Math.abs(two) < 10 ? two : Math.abs(one) < 100 ? one : grouped(Number(settled(value, 0)));
  }

  // From 9,999.5 ms on, which would be written as 10,000 ms, in seconds.
  const duration = us => fixed(us, 1) >= 9_999_500 ? `${number(us / 1e6)} s` : `${number(us / 1e3)} ms`;

  function percent(fraction) {
    if (fraction === null || fraction === undefined) return "-";
    const of100 = Number(fixed(100 * fraction, 4));
    if (of100 > 0 && of100 <= 0.5) return "<1 %";
    if (of100 >= 99.5 && of100 < 100) return ">99 %";
    return `${fixed(of100, 0)} %`;
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

  // A sentence of present/report/step_sentences.py as pieces {text, is}, to become text nodes, links and code elements.
  // `values`: slot to a number, a request's id, or {ids, count}.
  function pieces(parts, values) {
    return parts.flatMap(part => {
      if (typeof part === "string") return [{ text: part }];
      if (part.is !== "slot") return [part];
      const value = values[part.name];
      if (part.kind === "requests") return requestPieces(value);
      if (part.kind === "request") return [{ is: "request", text: value }];
      return [{ text: part.kind === "count" ? counted(value, part.noun, part.plural) : integer(value) }];
    });
  }

  return { integer, counted, number, duration, percent, pieces };
})();
