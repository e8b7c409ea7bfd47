// Tokens a second over the last minutes, one bar a second.

import { element, shape } from "./elements.js";
import { number } from "./words.js";

const HEIGHT = 96;
const FOOT = 20;
const STEP_S = 15; // of the table's rows

/** Draws the history (oldest first, one value a second) into `frame`; returns one sentence about it. */
export function drawRate(frame, rows, { now, history }) {
  const most = Math.max(...history, 0);
  frame.hidden = rows.closest("details").hidden = most === 0;
  if (!most) return `None within ${history.length / 60} minutes.`;
  const width = Math.max(frame.clientWidth, 240);
  const said = `${number(now)} now, ${number(most)} at most within ${history.length / 60} minutes.`;
  const top = niceTop(most);
  const step = width / history.length;
  const bottom = HEIGHT - FOOT;
  const y = (value) => bottom - (value / top) * (bottom - 14);
  const drawing = shape("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": said });
  drawing.append(
    shape("line", { x1: 0, x2: width, y1: bottom + 0.5, y2: bottom + 0.5, class: "base" }),
    shape("line", { x1: 0, x2: width, y1: y(top), y2: y(top), class: "tick" }),
    shape("text", { x: 0, y: y(top) - 4, class: "label" }, String(top)),
    ...history.map((value, second) => (value > 0 ? shape("rect", { x: second * step, y: y(value), width: Math.max(step - (step > 3 ? 1 : 0.25), 0.5), height: bottom - y(value), class: "rate" }) : null)).filter(Boolean),
    shape("text", { x: 0, y: HEIGHT - 4, class: "label" }, `${history.length / 60} minutes ago`),
    shape("text", { x: width, y: HEIGHT - 4, class: "label", "text-anchor": "end" }, "now"),
  );
  frame.replaceChildren(drawing);
  rows.replaceChildren(...meansOf(history).map(([from, to, mean]) => element("tr", {}, element("th", { scope: "row" }, `${from} to ${to}`), element("td", { class: "number" }, number(mean)))));
  return said;
}

function meansOf(history) {
  const newest = [...history].reverse();
  const means = [];
  for (let from = 0; from < newest.length; from += STEP_S) {
    const part = newest.slice(from, from + STEP_S);
    means.push([from, from + part.length, part.reduce((sum, value) => sum + value, 0) / part.length]);
  }
  return means;
}

/** 1, 2 or 5 times a power of ten, above `value`. */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 5, 10].find((step) => step * power >= value) ?? 10);
}
