// The mesh's page: a picture each second, drawn as it comes.

import { byId, describe, element, foreign, say } from "./elements.js";
import { drawLayers, stageRows } from "./layer_map.js";
import { ask, events, pause, withKey } from "./node_client.js";
import { drawRate } from "./rate_picture.js";
import { clockTime, count, duration, layerRange, listed, megabytes, milliseconds, number, shortPeer, statusOf } from "./words.js";

const FIRST_PAUSE_S = 1;
const LAST_PAUSE_S = 15;
let shown = null;

async function watch() {
  let pauseS = FIRST_PAUSE_S;
  for (;;) {
    try {
      const answer = await withKey(() => ask("/events", { headers: { accept: "text/event-stream" } }));
      for await (const data of events(answer)) {
        show(JSON.parse(data));
        pauseS = FIRST_PAUSE_S;
      }
      lost("This node ended the stream", pauseS);
    } catch (error) {
      lost(error instanceof TypeError ? "This node does not answer" : error.message, pauseS);
    }
    await pause(pauseS);
    pauseS = Math.min(2 * pauseS, LAST_PAUSE_S);
  }
}

function lost(why, pauseS) {
  say(byId("link"), `Asking again in ${Math.round(pauseS)} s.`);
  say(byId("verdict"), why);
  say(byId("verdict-why"), shown ? `What follows is how it was at ${clockTime(shown.at_ms)}.` : "");
  document.title = `${why} – Tessella`;
  document.body.dataset.readiness = "lost";
  document.body.classList.add("lost");
}

function show(picture) {
  shown = picture;
  document.body.classList.remove("lost");
  document.body.classList.add("shown");
  say(byId("link"), "live");
  verdict(picture);
  const { model, coverage, stages, num_stages: numStages, flights, ended, tokens_per_s: rate } = picture;
  whenNew(figures, picture, [rate.now, picture.credits, picture.proofs, picture.statuses, picture.num_flights, numStages]);
  whenNew(layers, picture, [model.total_layers, coverage, stages, flights.map(({ age_s: _, ...rest }) => rest)]);
  whenNew(stageTable, picture, [stages, numStages]);
  whenNew(requests, picture, [flights, ended.map(({ age_s: _, ...rest }) => rest), picture.num_flights]);
  whenNew(rates, picture, rate);
  whenNew(node, picture, [picture.node, picture.orchestrator, model.total_layers]);
  whenNew(account, picture, [picture.credits, picture.proofs, picture.orchestrator]);
}

const drawn = new Map();

/** Draws a part of the page when what it shows has changed: what somebody has selected there stays selected otherwise. */
function whenNew(draw, picture, shows) {
  const told = JSON.stringify(shows);
  if (drawn.get(draw) === told) return;
  drawn.set(draw, told);
  draw(picture);
}

function layers(picture) {
  say(byId("layers-said"), drawLayers(byId("layers"), byId("layers-key"), picture));
}

function stageTable(picture) {
  byId("stages").replaceChildren(...stageRows(picture));
}

function rates(picture) {
  say(byId("rate-said"), drawRate(byId("rate"), byId("rate-rows"), picture.tokens_per_s));
}

function verdict({ model, coverage, num_flights: flights }) {
  const { state, proven_ago_s: ago, missing } = model.readiness;
  const name = model.id ?? "This node's model";
  const holes = listed((missing.length ? missing : (coverage[0]?.holes ?? [])).map(layerRange));
  const under = flights ? `${count(flights, "request")} under way through this node.` : "No request is under way through this node.";
  const [title, why] = {
    ready: [`${name} answers`, under],
    old: [`${name} answered ${duration(ago ?? 0)} ago`, "Every layer is held, and nobody has asked since."],
    unproven: [`${name} has not been tried yet`, "Every layer is held; the first answer proves that they answer."],
    failed: [`${name} does not answer`, holes ? `The layers ${holes} did not answer the last try. It goes on trying.` : "The last try over a complete route failed. It goes on trying."],
    no_route: [`${name} does not answer`, `Nobody holds the layers ${holes}. Requests get 503 until somebody does.`],
  }[state];
  document.body.dataset.readiness = state;
  say(byId("verdict"), title);
  say(byId("verdict-why"), why);
  document.title = `${title} – Tessella`;
}

function figures(picture) {
  const { tokens_per_s: rate, credits, proofs, statuses, num_stages: stages } = picture;
  const others = Object.entries(statuses).filter(([status]) => status !== "Healthy").map(([status, n]) => `${n} ${statusOf(status).word}`);
  describe(byId("figures"), [
    ["Tokens a second", number(rate.now), "last 3 seconds"],
    ["Under way", String(picture.num_flights), picture.num_flights === 1 ? "request" : "requests"],
    ["Healthy stages", `${statuses.Healthy ?? 0} of ${stages}`, others.length ? listed(others) : stages ? "all of them" : "none is known"],
    ["Credits", credits ? number(credits.credits) : "–", credits ? `tier ${credits.tier}` : "no balance told yet"],
    ["Proofs", String(proofs.settled), `settled; ${proofs.open + proofs.pending} under way`],
  ]);
}

function requests({ flights, ended, num_flights: total }) {
  const rows = [...flights, ...ended].map((flight) =>
    element(
      "tr",
      { role: "row", class: flight.end === null ? null : "ended" },
      element("th", { role: "rowheader" }, flight.request_id === null ? "another caller's" : foreign(flight.request_id, { class: "peer" }), flight.tier ? element("span", { class: "tag" }, foreign(flight.tier)) : null),
      element("td", { role: "cell", class: "state" }, stateOf(flight)),
      element("td", { role: "cell", class: "wide" }, routeOf(flight.route)),
      element("td", { role: "cell", class: "number", "data-unit": "tokens" }, String(flight.tokens)),
      element("td", { role: "cell", class: "number", "data-unit": "a second" }, flight.tokens_per_s === null ? "–" : number(flight.tokens_per_s)),
      element("td", { role: "cell", class: "number", "data-unit": "reroutes" }, String(flight.reroutes)),
    ),
  );
  byId("requests-table").hidden = rows.length === 0;
  byId("requests").replaceChildren(...rows);
  const more = total - flights.length;
  say(byId("requests-said"), rows.length ? (more > 0 ? `and ${count(more, "request")} more` : "") : "None lately. Ask something on the chat page, or with any OpenAI client.");
}

function stateOf({ end, state, age_s: age }) {
  if (end === null) return `${{ waiting: "waits", reading: "reads", answering: "answers" }[state] ?? state}, ${duration(age)}`;
  const word = { stop: "finished", length: "at its length", cancelled: "left by its client" }[end];
  return word ?? element("span", { class: "failed" }, "failed: ", foreign(end));
}

function routeOf(route) {
  if (!route.length) return "–";
  return element(
    "ol",
    { class: "route" },
    ...route.map((hop) => element("li", { title: hop.peer_id }, element("span", { class: "at" }, layerRange(hop.layers)), " ", foreign(shortPeer(hop.peer_id)), " ", element("span", { class: "ms" }, hop.hop_ms > 0 ? milliseconds(hop.hop_ms) : "–"))),
  );
}

function node({ node: own, orchestrator, model }) {
  const device = own.device;
  const memory = device.memory_used_mb === null ? "–" : device.memory_total_mb === null ? megabytes(device.memory_used_mb) : `${megabytes(device.memory_used_mb)} of ${megabytes(device.memory_total_mb)}`;
  describe(byId("node"), [
    ["Peer", foreign(own.peer_id, { class: "peer" })],
    ["State", own.state],
    ["Holds", own.layer_ranges.length ? `layers ${listed(own.layer_ranges.map(layerRange))} of ${model.total_layers}` : "no layers"],
    ["Device", `${device.kind}, ${device.healthy ? "healthy" : "failing"}`, device.oom_streak ? count(device.oom_streak, "recent failure") : null],
    ["Memory of the stage", memory],
    ["Sessions", `${own.sessions} of ${own.max_sessions}`],
    ["Stalls", own.stalls ? `${own.stalls}, ${milliseconds(own.longest_stall_ms)} at most` : "none"],
    ["Orchestrator", orchestrator.peer_id === null ? "none" : orchestrator.reachable ? "answers" : `silent for ${duration(orchestrator.outage_s)}`, orchestrator.peer_id === null ? null : foreign(orchestrator.peer_id, { class: "peer" })],
  ]);
}

function account({ credits, proofs, orchestrator }) {
  describe(byId("account"), [
    ["Credits", credits ? number(credits.credits) : "not told yet"],
    ["Tier", credits ? credits.tier : "–"],
    ["Proofs settled", String(proofs.settled)],
    ["Proofs under way", String(proofs.open + proofs.pending)],
    ["Proofs held back", String(proofs.held)],
    ["Proofs refused", String(proofs.refused)],
    ["Tickets for an outage", String(orchestrator.tickets_held)],
  ]);
}

new ResizeObserver(() => {
  if (shown) [layers, rates].forEach((draw) => draw(shown));
}).observe(byId("layers"));

watch();
