// Elements out of values. Text goes in as text nodes, always: there is no function here that takes markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element; `attributes` with null, undefined or false are left out, `true` is an empty one. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Text that came from a peer or from a program: it cannot change the direction of what stands around it. */
export function foreign(text, attributes = {}) {
  return element("bdi", attributes, String(text));
}

/** Say `text` in `node`, unless it says that already: a screen reader would read it again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** Fill a <dl> with [term, description, note]s, each in a <div>. */
export function describe(list, rows) {
  list.replaceChildren(
    ...rows.map(([term, value, note]) =>
      element("div", {}, element("dt", {}, term), element("dd", {}, value), note ? element("dd", { class: "note" }, note) : null),
    ),
  );
}
