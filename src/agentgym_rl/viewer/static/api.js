// Data access: from the server, or in an exported page from the embedded data.

import { answerOffline } from "./offline.js";

let embedded = null;

/** Load the embedded data if this is an exported page. */
export async function prepare() {
  const element = document.getElementById("embedded");
  if (!element) return;
  const packed = Uint8Array.from(atob(element.textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  embedded = await new Response(stream).json();
}

export function isExport() {
  return embedded !== null;
}

function queryOf(parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters ?? {})) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  return query;
}

/** GET api/<path> as JSON. Errors have the message of the server. */
export async function get(path, parameters, signal) {
  if (embedded) return answerOffline(embedded, path, parameters ?? {});
  return read(await fetch(`api/${path}?${queryOf(parameters)}`, { signal }));
}

export async function post(path, body) {
  const headers = { "content-type": "application/json" };
  return read(await fetch(`api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

/** Return a picture as {url, html}: the address of an <img>, or if `html` is true of a sandboxed frame. */
export async function getPicture(path, parameters, signal) {
  if (embedded) {
    const frame = answerOffline(embedded, path, parameters);
    const blob = new Blob([frame.binary ? fromBase64(frame.data) : frame.data], { type: frame.type });
    return { url: URL.createObjectURL(blob), html: frame.type === "text/html", release: true };
  }
  const address = `api/${path}?${queryOf(parameters)}`;
  const response = await fetch(address, { signal });
  if (!response.ok) await read(response);
  const type = response.headers.get("content-type") ?? "";
  if (type.startsWith("text/html")) return { url: address, html: true };
  return { url: URL.createObjectURL(await response.blob()), html: false, release: true };
}

function fromBase64(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

async function read(response) {
  if (response.ok) return response.json();
  let detail = `${response.status} ${response.statusText}`;
  try {
    detail = (await response.json()).detail ?? detail;
  } catch {
    // not JSON: report the status
  }
  throw new Error(detail);
}
