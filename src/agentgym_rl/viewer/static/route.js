// Addresses: every view has one, after the #.

/** link("episode", "runs/a", "step_000001.3", {turn: 2}) -> "#/episode/runs%2Fa/step_000001.3?turn=2". */
export function link(page, ...parts) {
  const last = parts.at(-1);
  const query = last !== null && typeof last === "object" ? parts.pop() : {};
  const path = [page, ...parts].map(encodeURIComponent).join("/");
  return `#/${path}${queryText(query)}`;
}

function queryText(query) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parameters.set(name, value);
  }
  return parameters.size ? `?${parameters}` : "";
}

/** Return the page, its parts and its query. `set` changes the query without leaving the page. */
export function readRoute() {
  const text = location.hash.replace(/^#\/?/, "");
  const [path, search = ""] = text.split("?");
  const [page = "", ...parts] = path.split("/").filter(Boolean).map(decode);
  const query = new URLSearchParams(search);
  let shown = location.hash;
  return {
    page,
    parts,
    query,
    set(changes) {
      if (location.hash !== shown) return; // the user left while this page was loading
      for (const [name, value] of Object.entries(changes)) {
        if (value === null || value === undefined || value === "") query.delete(name);
        else query.set(name, value);
      }
      const address = link(page || "runs", ...parts, Object.fromEntries(query));
      history.replaceState(null, "", address);
      shown = location.hash;
    },
  };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
