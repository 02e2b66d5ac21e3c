// Fills the slots of a sentence, as present/phrases.py writes its arguments.
"use strict";

const MOST_REQUESTS = 3;

function integer(value) {
  return value === null || value === undefined ? "-" : value.toLocaleString("en-US");
}

function counted(count, noun, plural) {
  return `${integer(count)} ${count === 1 ? noun : plural || `${noun}s`}`;
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
function sentencePieces(parts, values) {
  return parts.flatMap(part => {
    if (typeof part === "string") return [{ text: part }];
    if (part.is !== "slot") return [part];
    const value = values[part.name];
    if (part.kind === "requests") return requestPieces(value);
    if (part.kind === "request") return [{ is: "request", text: value }];
    return [{ text: part.kind === "count" ? counted(value, part.noun, part.plural) : integer(value) }];
  });
}
