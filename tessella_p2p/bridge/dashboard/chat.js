// The chat page: one conversation, kept in this page alone; each answer with the way that it took.

import { byId, element, foreign, say } from "./elements.js";
import { ask, events, pause, withKey } from "./node_client.js";
import { layerRange, milliseconds, number, shortPeer } from "./words.js";

const LOOK_AGAIN_S = 5;
const form = byId("ask");
const prompt = byId("prompt");
const talk = byId("talk");
const messages = [];
let running = null;

/** Lists the models that are answered for, and goes on looking while there is none. */
async function findModels() {
  for (;;) {
    try {
      const { data } = await (await withKey(() => ask("/v1/models"))).json();
      offer(data.map((model) => String(model.id)));
      if (data.length) return say(byId("link"), "ready");
      say(byId("link"), "nothing answers right now");
    } catch (error) {
      say(byId("link"), error instanceof TypeError ? "the node does not answer" : error.message);
    }
    await pause(LOOK_AGAIN_S);
  }
}

function offer(ids) {
  const select = byId("model");
  select.replaceChildren(...ids.map((id) => element("option", { value: id }, id)));
  select.disabled = ids.length < 2;
  settle();
}

function settle() {
  byId("send").disabled = running !== null || !byId("model").value;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("clear").hidden = running !== null || messages.length === 0;
  const { model, temperature, limit } = settings();
  say(byId("settings"), model ? `${model} · temperature ${temperature} · at most ${limit} tokens` : "Settings");
  prompt.rows = Math.min(8, prompt.value.split("\n").length);
}

/** What is asked beside the messages. */
function settings() {
  const temperature = byId("temperature").valueAsNumber;
  return { model: byId("model").value, temperature: Number.isNaN(temperature) ? 0.7 : temperature, limit: byId("max-tokens").valueAsNumber || 512 };
}

async function send() {
  const text = prompt.value.trim();
  if (!text || running || !byId("model").value) return;
  messages.push({ role: "user", content: text });
  talk.append(element("div", { class: "said mine" }, element("h2", { class: "unseen" }, "You"), element("p", { class: "text" }, text)));
  prompt.value = "";
  await answer(new Answer(talk));
}

async function answer(shown) {
  running = new AbortController();
  settle();
  talk.setAttribute("aria-busy", "true");
  try {
    await stream(shown, running.signal);
    shown.finish();
  } catch (error) {
    if (error.name === "AbortError") shown.end("stopped by you");
    else shown.fail(error instanceof TypeError ? "the connection to the node broke" : error.message);
  }
  running = null;
  talk.setAttribute("aria-busy", "false");
  if (shown.text) messages.push({ role: "assistant", content: shown.text });
  else messages.pop(); // what got no answer is not asked again with the next question
  settle();
  prompt.focus();
}

async function stream(shown, signal) {
  const { model, temperature, limit } = settings();
  const body = { model, messages, stream: true, temperature, max_tokens: limit, tessella: true };
  const response = await withKey(() =>
    ask("/v1/chat/completions", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal }),
  );
  shown.route(routeOf(response.headers.get("x-tessella-route") ?? ""));
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(String(chunk.error.message));
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) shown.add(choice.delta.content);
    if (choice?.finish_reason) shown.reason = choice.finish_reason;
    if (chunk.tessella) shown.tell(chunk.tessella);
  }
  throw new Error("the node ended the answer early");
}

/** The hops in the header x-tessella-route (RFC 9651): what is known of a route before the answer's end. */
function routeOf(header) {
  return header
    .split(",")
    .map((item) => /^\s*"?([^";\s]+)"?;layers="(\d+)-(\d+)"(?:;ms=([\d.]+))?/.exec(item))
    .filter(Boolean)
    .map(([, peer, start, end, ms]) => ({ peer_id: peer, layers: [Number(start), Number(end)], hop_ms: Number(ms ?? 0) }));
}

/** One answer on the page. */
class Answer {
  constructor(place) {
    this.text = "";
    this.reason = null;
    this.node = document.createTextNode("");
    this.foot = element("div", { class: "foot" }, element("p", { class: "state" }, "waiting for the first token"));
    this.way = null;
    this.box = element("div", { class: "said theirs" }, element("h2", { class: "unseen" }, "Answer"), element("p", { class: "text", dir: "auto" }, this.node), this.foot);
    place.append(this.box);
    this.box.scrollIntoView({ block: "end" });
  }

  add(text) {
    const follows = atEnd();
    if (!this.text) this.say("");
    this.text += text;
    this.node.appendData(text);
    if (follows) this.box.scrollIntoView({ block: "end" });
  }

  route(hops) {
    if (!hops.length) return;
    const way = drawRoute(hops);
    if (this.way) this.way.replaceWith(way);
    else this.foot.append(way);
    this.way = way;
  }

  tell({ route, timings, tier, paid, request_id: id }) {
    const follows = atEnd();
    this.route(route);
    const parts = [
      `${number(timings.tokens_per_s)} tokens a second`,
      `first token after ${milliseconds(timings.ttft_ms)}`,
      paid ? `paid, tier ${tier}` : `unpaid, tier ${tier}`,
    ];
    this.foot.append(element("p", { class: "told" }, `${parts.join(" · ")} · `, foreign(id, { class: "peer" })));
    if (follows) this.box.scrollIntoView({ block: "end" });
  }

  finish() {
    this.say(this.reason === "length" ? "ends here: as many tokens as were asked for" : "");
  }

  end(word) {
    this.say(word);
  }

  fail(message) {
    this.box.classList.add("failed");
    this.say(`No ${this.text ? "more" : "answer"}: ${message}`);
  }

  say(text) {
    const state = this.foot.querySelector(".state");
    say(state, text);
    state.hidden = !text;
  }
}

function atEnd() {
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 48;
}

/** The stages of a route, as wide as their layers; the milliseconds are those of a step. */
function drawRoute(hops) {
  const slowest = Math.max(...hops.map((hop) => hop.hop_ms), 0.001);
  return element(
    "ol",
    { class: "way", "aria-label": "Route of this answer" },
    ...hops.map((hop) => {
      const item = element(
        "li",
        { title: hop.peer_id },
        element("span", { class: "at" }, element("span", { class: "unseen" }, "layers "), layerRange(hop.layers)),
        foreign(shortPeer(hop.peer_id), { class: "who" }),
        element("span", { class: "ms" }, hop.hop_ms > 0 ? milliseconds(hop.hop_ms) : "–"),
      );
      item.style.setProperty("--layers", String(hop.layers[1] - hop.layers[0]));
      item.style.setProperty("--share", String(Math.round((100 * hop.hop_ms) / slowest)));
      return item;
    }),
  );
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
form.addEventListener("input", settle);
document.querySelector(".under").addEventListener("input", settle);
byId("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("clear").addEventListener("click", () => {
  messages.length = 0;
  talk.replaceChildren();
  settle();
  prompt.focus();
});

settle();
findModels();
