// The mesh over the model's layers: who holds what, where nobody does, and which requests pass through. One axis for all of it.

import { element, shape } from "./elements.js";
import { count, layerRange, listed, milliseconds, number, shortPeer, statusOf } from "./words.js";

const LANE = 34; // pixels from one row of stages to the next
const BAR = 28;
const AXIS = 26;
const FLIGHT = 44;
const MAX_LANES = 12;
const MAX_FLIGHTS = 8;
const CHARACTER = 7.2; // of the marks' labels, in pixels: a label that does not fit is left to the table

/** Draws `picture` (see `bridge.mesh_picture`) into `frame`; returns one sentence about it. */
export function drawLayers(frame, legend, picture) {
  const total = picture.model.total_layers;
  if (!total) {
    frame.replaceChildren(element("p", { class: "empty" }, "No stage of a model is known yet."));
    legend.replaceChildren();
    return "";
  }
  const width = Math.max(frame.clientWidth, 240);
  const said = describeCoverage(picture);
  frame.replaceChildren(
    ...picture.coverage.map((coverage, index) => {
      const band = new Band(coverage, picture, width, total, index === 0);
      const caption = picture.coverage.length > 1 ? element("figcaption", {}, "Recipe ", element("bdi", {}, coverage.recipe)) : null;
      return element("figure", {}, caption, band.draw(index === 0 ? said : `The same for the recipe ${coverage.recipe}`));
    }),
  );
  legend.replaceChildren(...marksOf(picture));
  return said;
}

/** What the picture shows, in words. */
function describeCoverage(picture) {
  const best = picture.coverage[0];
  if (!best) return "";
  const serving = best.num_stages;
  const total = picture.model.total_layers;
  if (!serving) return `Nobody holds any of the ${total} layers.`;
  const holders = `${count(serving, "stage")} ${serving === 1 ? "holds" : "hold"}`;
  if (!best.holes.length) return `${holders} all ${total} layers; each layer ${replicas(best)}.`;
  return `${holders} part of ${total} layers. Nobody holds ${listed(best.holes.map(layerRange))}.`;
}

function replicas(coverage) {
  const held = coverage.segments.map((segment) => segment.replicas);
  const [least, most] = [Math.min(...held), Math.max(...held)];
  const times = (n) => (n === 1 ? "once" : n === 2 ? "twice" : `${n} times`);
  return least === most ? times(least) : `at least ${times(least)}`;
}

const serves = (stage) => (stage.status === "Healthy" || stage.status === "Saturated") && !stage.canary;

class Band {
  constructor(coverage, picture, width, total, withFlights) {
    this.coverage = coverage;
    this.width = width;
    this.total = total;
    const stages = picture.stages.filter((stage) => stage.recipe === coverage.recipe || (withFlights && !isDrawn(stage, picture)));
    const serving = packed(stages.filter(serves));
    const lanes = [...serving, ...(serving.length ? [] : [[]]), ...packed(stages.filter((stage) => !serves(stage)))];
    this.numServing = Math.min(Math.max(serving.length, 1), MAX_LANES); // the rows that a hole goes through
    this.hidden = lanes.slice(MAX_LANES).flat().length;
    this.lanes = lanes.slice(0, MAX_LANES);
    this.flights = withFlights ? picture.flights.filter((flight) => flight.route.length).slice(0, MAX_FLIGHTS) : [];
    this.passed = new Map();
    for (const peer of picture.flights.flatMap((flight) => [...new Set(flight.route.map((hop) => hop.peer_id))])) {
      this.passed.set(peer, (this.passed.get(peer) ?? 0) + 1);
    }
  }

  x(layer) {
    return (layer / this.total) * this.width;
  }

  draw(said) {
    const laneTop = AXIS;
    const laneHeight = this.lanes.length * LANE;
    const flightTop = laneTop + laneHeight + (this.flights.length ? 14 : 0);
    const height = flightTop + this.flights.length * FLIGHT;
    const drawing = shape("svg", { width: this.width, height, viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": said });
    drawing.append(
      shape("defs", {}, shape("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, shape("path", { d: "M0 0V6", class: "hatch" }))),
      ...this.coverage.holes.map((hole) => this.hole(hole, laneTop, this.numServing * LANE)),
      ...this.axis(laneTop, laneTop + laneHeight),
      ...this.lanes.flatMap((lane, index) => lane.map((stage) => this.stage(stage, laneTop + index * LANE + (LANE - BAR) / 2))),
      ...this.flights.map((flight, index) => this.flight(flight, flightTop + index * FLIGHT)),
    );
    return this.hidden ? element("div", {}, drawing, element("p", { class: "note" }, `and ${count(this.hidden, "stage")} more, in the table`)) : drawing;
  }

  /** Layer numbers where a stretch begins or ends, as far as there is room for them. */
  axis(top, bottom) {
    const edges = [...new Set([...this.coverage.segments.flatMap((segment) => segment.layers), 0, this.total])].sort((a, b) => a - b);
    const marks = [];
    let free = -Infinity;
    for (const edge of edges) {
      const at = this.x(edge);
      marks.push(shape("line", { x1: at, x2: at, y1: top - 4, y2: bottom, class: "tick" }));
      const label = String(edge);
      const wide = label.length * CHARACTER + 8;
      const last = edge === this.total;
      if (!last && (at - wide / 2 < free || at + wide / 2 > this.width - wide)) continue;
      free = at + wide / 2;
      marks.push(shape("text", { x: at, y: top - 9, class: "label", "text-anchor": edge === 0 ? "start" : last ? "end" : "middle" }, label));
    }
    return marks;
  }

  hole([start, end], top, height) {
    const [left, right] = [this.x(start), this.x(end)];
    const ground = { x: left + 1, y: top + 1, width: Math.max(right - left - 2, 2), height: height - 2, rx: 3 };
    const text = fitting([`layers ${start}–${end}: nobody`, `${start}–${end}: nobody`, "nobody"], right - left - 12);
    return shape(
      "g",
      { class: "hole", "data-hole": `${start}-${end}` },
      shape("title", {}, `Nobody holds the layers ${start}–${end}`),
      shape("rect", { ...ground, class: "hole-ground" }),
      shape("rect", { ...ground, fill: "url(#hatch)" }),
      text ? label(text, (left + right) / 2, top + LANE / 2, "hole-label", "middle") : null,
    );
  }

  stage(stage, top) {
    const [left, right] = [this.x(stage.layers[0]), this.x(stage.layers[1])];
    const status = statusOf(stage.status);
    const name = stage.own ? "this node" : shortPeer(stage.peer_id);
    const passing = this.passed.get(stage.peer_id) ?? 0;
    const more = [
      stage.canary ? "canary" : status.word === "healthy" ? null : status.word,
      passing ? count(passing, "route") : null,
    ].filter(Boolean);
    const text = fitting([[name, ...more].join(" · "), [name, ...more.slice(0, 1)].join(" · "), name], right - left - 16);
    return shape(
      "g",
      { class: `stage ${status.mark}${stage.own ? " own" : ""}` },
      shape("title", {}, `${stage.peer_id}\nlayers ${layerRange(stage.layers)}, ${status.word}, ${count(stage.queue_depth, "session")}`),
      shape("rect", { x: left + 1.5, y: top, width: Math.max(right - left - 3, 3), height: BAR, rx: 4 }),
      text ? label(text, left + 9, top + BAR / 2) : null,
    );
  }

  flight(flight, top) {
    const slowest = Math.max(...flight.route.map((hop) => hop.hop_ms), 0.001);
    const doing = { waiting: "waits for a place", reading: "reads its prompt", answering: flight.tokens_per_s === null ? "answers" : `${number(flight.tokens_per_s)} tokens a second` }[flight.state] ?? flight.state;
    const name = flight.request_id ?? "another caller";
    return shape(
      "g",
      { class: "flight" },
      shape("title", {}, `${name}: ${doing}`),
      label(fitting([`${name} · ${doing}`, doing], this.width) ?? "", 2, top + 8, "flight-name"),
      ...flight.route.flatMap((hop) => {
        const [left, right] = [this.x(hop.layers[0]), this.x(hop.layers[1])];
        const text = hop.hop_ms > 0 ? fitting([milliseconds(hop.hop_ms), number(hop.hop_ms)], right - left - 10) : null;
        const bar = shape("rect", { x: left + 1.5, y: top + 18, width: Math.max(right - left - 3, 3), height: 20, rx: 10, class: "hop" });
        bar.style.setProperty("--share", String(Math.round((100 * hop.hop_ms) / slowest)));
        return [bar, text ? label(text, (left + right) / 2, top + 28, "hop-label", "middle") : null].filter(Boolean);
      }),
    );
  }
}

function label(text, x, y, kind = "label-in", anchor = "start") {
  return shape("text", { x, y, class: kind, "text-anchor": anchor, "dominant-baseline": "central" }, text);
}

/** The first of these texts that fits into so many pixels. */
function fitting(texts, pixels) {
  return texts.find((text) => text.length * CHARACTER <= pixels) ?? null;
}

/** Rows of stages that do not overlap, each at its place as long as nothing changes. */
function packed(stages) {
  const inOrder = [...stages].sort((a, b) => a.layers[0] - b.layers[0] || a.layers[1] - b.layers[1] || (a.peer_id < b.peer_id ? -1 : 1));
  const lanes = [];
  for (const stage of inOrder) {
    const lane = lanes.find((each) => each.every((other) => other.layers[1] <= stage.layers[0] || stage.layers[1] <= other.layers[0]));
    if (lane) lane.push(stage);
    else lanes.push([stage]);
  }
  return lanes;
}

const isDrawn = (stage, picture) => picture.coverage.some((coverage) => coverage.recipe === stage.recipe);

/** The legend of the marks that are in the picture. */
function marksOf(picture) {
  const present = new Set(picture.stages.map((stage) => statusOf(stage.status).mark));
  const marks = [
    ["healthy", "healthy"],
    ["saturated", "full: sessions wait"],
    ["draining", "draining or loading"],
    ["stale", "silent"],
    ["offline", "offline"],
  ].filter(([mark]) => present.has(mark));
  if (picture.stages.some((stage) => stage.own)) marks.push(["own", "this node"]);
  if (picture.coverage.some((coverage) => coverage.holes.length)) marks.push(["hole", "nobody"]);
  if (picture.flights.some((flight) => flight.route.length)) marks.push(["hop", "a request's hop: the stronger the colour, the slower"]);
  return marks.map(([mark, word]) => element("li", {}, element("span", { class: `mark ${mark}`, "aria-hidden": "true" }), word));
}

/** Rows of the table behind the map. */
export function stageRows(picture) {
  const rows = picture.stages.map((stage) => {
    const status = statusOf(stage.status);
    return element(
      "tr",
      { role: "row" }, // the roles stay where a phone folds the table
      element("th", { role: "rowheader" }, element("bdi", { class: "peer", title: stage.peer_id }, stage.peer_id), stage.own ? element("span", { class: "tag" }, "this node") : null, stage.canary ? element("span", { class: "tag" }, "canary") : null),
      element("td", { role: "cell", class: "near", "data-term": "layers" }, layerRange(stage.layers)),
      element("td", { role: "cell", class: "near" }, element("span", { class: `mark ${status.mark}`, "aria-hidden": "true" }), status.word),
      element("td", { role: "cell", class: "number", "data-unit": "sessions" }, String(stage.queue_depth)),
      element("td", { role: "cell", class: "last" }, element("bdi", {}, stage.recipe)),
    );
  });
  const hidden = picture.num_stages - picture.stages.length;
  if (hidden > 0) rows.push(element("tr", { role: "row" }, element("td", { role: "cell", colspan: 5 }, `and ${count(hidden, "stage")} more`)));
  return rows;
}

