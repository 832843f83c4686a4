// What the page knows comes from here: from the server, or in an exported page from the data inside it.

import { answerOffline } from "./offline.js";

let embedded = null;

/** Read the data inside an exported page, if this is one. */
export async function prepare() {
  const holder = document.getElementById("embedded");
  if (!holder) return;
  const packed = Uint8Array.from(atob(holder.textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  embedded = await new Response(stream).json();
}

export function isExport() {
  return embedded !== null;
}

export function queryOf(parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters ?? {})) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  return query;
}

/** GET api/<path> as JSON. Errors carry what the server said. */
export async function get(path, parameters, signal) {
  if (embedded) return answerOffline(embedded, path, parameters ?? {});
  return read(await fetch(`api/${path}?${queryOf(parameters)}`, { signal }));
}

export async function post(path, body) {
  const headers = { "content-type": "application/json" };
  return read(await fetch(`api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

/** A picture as {url, html}: an address for an <img>, or with html for a sandboxed frame. */
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
    // not JSON: the status has to do
  }
  throw new Error(detail);
}
