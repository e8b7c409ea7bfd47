// Asks the node that served this page, with the API key where one is needed.

import { byId, element } from "./elements.js";

const KEPT_AS = "tessella-api-key"; // in this tab alone, and gone with it

/** The node wants a key, or another one. */
class KeyNeeded extends Error {}

/** fetch, with the key. Throws KeyNeeded, an Error with the node's own message, or fetch's own errors. */
export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEPT_AS);
  if (key) headers.set("authorization", `Bearer ${key}`);
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  if (answer.ok) return answer;
  const message = await messageOf(answer);
  throw answer.status === 401 ? new KeyNeeded(message) : new Error(message);
}

async function messageOf(answer) {
  try {
    return String((await answer.json()).error.message);
  } catch {
    return `the node answered with status ${answer.status}`;
  }
}

/** The data of each server-sent event of an answer, until it ends. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const blocks = held.split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Asks the reader for an API key, in the page's form #key; settles once there is one to try. */
function askForKey(why) {
  const form = byId("key");
  const input = element("input", { id: "key-input", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "key-why" });
  form.replaceChildren(
    element("p", { id: "key-why" }, sessionStorage.getItem(KEPT_AS) ? `That key does not do: ${why}` : "This node asks for an API key. It stays in this tab."),
    element("label", { for: "key-input" }, "API key"),
    input,
    element("button", { type: "submit", class: "main" }, "Use it"),
  );
  form.hidden = false;
  input.focus();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEPT_AS, input.value.trim());
      form.hidden = true;
      resolve();
    };
  });
}

/** Runs `attempt`, and again with each key that the reader gives, until one will do. */
export async function withKey(attempt) {
  for (;;) {
    try {
      return await attempt();
    } catch (error) {
      if (!(error instanceof KeyNeeded)) throw error;
      await askForKey(error.message);
    }
  }
}

export const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
