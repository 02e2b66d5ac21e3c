// The rows of requests: which are drawn, and the pieces of their lives.

// The requests in view by arrival: all, or evenly many of them.
function lanesOf(e) {
  const seen = e.lives.filter(life => life.begin < view.end && life.end > view.begin);
  if (seen.length <= MOST_LANES) return { lanes: seen, of: seen.length };
  return {
    lanes: Array.from({ length: MOST_LANES }, (_, i) => seen[Math.floor((i * seen.length) / MOST_LANES)]),
    of: seen.length,
  };
}

function drawRequests(context, box, panel, e) {
  const { lanes, of } = lanesOf(e),
    height = Math.min(16, panel.height / Math.max(1, lanes.length));
  lanes.forEach((life, i) => {
    const y = panel.y + i * height,
      tall = Math.max(1, height - (height > 4 ? 1 : 0));
    for (const piece of life.pieces)
      if (piece.end > view.begin && piece.begin < view.end) drawPiece(context, box, e, piece, y, tall);
    if (chosen?.life === life) {
      context.strokeStyle = colours.link;
      context.lineWidth = 2;
      context.strokeRect(box.left, y - 1, box.width, tall + 2);
    }
    if (height >= 11 && !box.narrow) {
      context.fillStyle = colours["dim-text"];
      context.textAlign = "left";
      context.font = "11px system-ui, sans-serif";
      context.fillText(life.id.length > 17 ? `${life.id.slice(0, 16)}…` : life.id, 0, y + height / 2, box.left - 4);
      context.font = FONT;
    }
  });
  e.lanes = { lanes, height, y: panel.y };
  frame(context, box, panel);
  if (height >= 11 && !box.narrow) return;
  const all = of < e.lives.length ? of : e.request_count,
    some = lanes.length < of || e.lives.length < e.request_count;
  title(context, box, panel, "requests", some ? `${integer(lanes.length)} of ${integer(all)}` : integer(of));
}

function drawPiece(context, box, e, piece, y, tall) {
  const left = Math.max(box.left, box.x(piece.begin)),
    right = Math.min(box.left + box.width, box.x(piece.end));
  const bar = (from, to, colour, share = 1) => {
    context.fillStyle = colour;
    context.fillRect(from, y + (tall * (1 - share)) / 2, Math.max(0.7, to - from), tall * share);
  };
  if (piece.state === "waiting" && piece.cause === BY_STEP) {
    // the cause of each step of the wait
    for (let i = Math.max(0, rowAt(e, box.us(left))), from = left; from < right;) {
      let j = i;
      while (j + 1 < e.rows && e.cause[j + 1] === e.cause[i] && e.until[j] < piece.end) j++;
      if (box.x(e.until[j]) - from < 0.7) j = Math.max(j, rowAt(e, box.us(from + 0.7)));
      const to = j + 1 < e.rows ? Math.min(right, box.x(e.until[j])) : right;
      bar(from, to, causeColour(e.cause[i]));
      from = Math.max(to, from + 0.1);
      i = Math.min(j + 1, e.rows - 1);
    }
  } else if (piece.state === "waiting") bar(left, right, causeColour(piece.cause - FIRST_CAUSE));
  else if (piece.state === "stalled") bar(left, right, causeColour(piece.cause - FIRST_CAUSE), 0.5);
  else if (piece.state !== "not_recorded") bar(left, right, colours[piece.state], piece.state === "front_end" ? 0.5 : 1);
}
