// Construction of elements. Text is always inserted as text: no code of this page parses markup from a string.

import { isolated } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      if (typeof value !== "function") throw new Error(`${name} needs a function`);
      element.addEventListener(name.slice(2), value);
    } else if (name === "href" && !String(value).startsWith("#")) {
      throw new Error("links must stay on this page");
    } else if (name === "style") {
      for (const [property, setting] of Object.entries(value)) element.style.setProperty(property, setting);
    } else if (name === "value" || name === "checked" || name === "disabled") {
      element[name] = value;
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(isolated(String(child))));
  }
}

/** Create an HTML element: h("button", { class: "x", onclick: f }, "text", other). */
export function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function s(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** Return what `make` returns, or a warning if a damaged file makes it fail. */
export function guarded(name, make) {
  try {
    return make();
  } catch (error) {
    return message("warning", `${name} cannot be shown: ${error.message}`);
  }
}

/** Replace the content of `element`. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

export function select(options, value, onchange, label) {
  const node = h(
    "select",
    { "aria-label": label, onchange: () => onchange(node.value) },
    options.map(([option, text]) => h("option", { value: option }, text)),
  );
  node.value = value;
  return node;
}

/** Create a row of buttons of which one is selected. */
export function segmented(options, value, onchange, label) {
  const node = h("div", { class: "segmented", role: "radiogroup", "aria-label": label });
  const buttons = options.map(([option, text, title]) =>
    h("button", { type: "button", role: "radio", title, onclick: () => choose(option, true) }, text),
  );
  function choose(selected, notify) {
    options.forEach(([option], i) => buttons[i].setAttribute("aria-checked", String(option === selected)));
    if (notify) onchange(selected);
  }
  node.append(...buttons);
  choose(value, false);
  node.choose = choose;
  return node;
}

export function message(kind, ...children) {
  return h("div", { class: `message ${kind}`, role: kind === "error" ? "alert" : "status" }, ...children);
}
