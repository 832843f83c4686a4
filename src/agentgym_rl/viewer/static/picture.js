// Pictures of environments. They may contain text of a model, so they are shown where no script can run: as an image,
// or in a sandboxed frame.

import { getPicture } from "./api.js";
import { fill, h } from "./dom.js";

/** Create a box for pictures. `show(path, parameters)` replaces the picture. */
export function pictureBox(label) {
  const node = h("div", { class: "picture", "aria-live": "polite" });
  let current = null;
  let release = null;
  let requested = 0;

  async function show(path, parameters) {
    const request = ++requested;
    current?.abort();
    current = new AbortController();
    const waiting = setTimeout(() => request === requested && node.classList.add("waiting"), 150);
    try {
      const picture = await getPicture(path, parameters, current.signal);
      if (request !== requested) return;
      await insert(picture, request);
    } catch (error) {
      if (request === requested && error.name !== "AbortError") {
        fill(node, h("p", { class: "no-picture" }, h("span", {}, "No picture"), h("small", {}, error.message)));
      }
    } finally {
      clearTimeout(waiting);
      if (request === requested) node.classList.remove("waiting");
    }
  }

  async function insert(picture, request) {
    if (picture.html) {
      fill(node, h("iframe", { sandbox: "", src: `${picture.url}#now`, title: label, class: "drawn", loading: "lazy" }));
    } else {
      const image = h("img", { alt: label, class: "drawn", src: picture.url });
      try {
        await image.decode();
      } catch {
        throw new Error("the environment's picture is not a valid image");
      }
      if (request !== requested) return;
      fill(node, image);
    }
    if (release) URL.revokeObjectURL(release);
    release = picture.release ? picture.url : null;
  }

  function clear() {
    requested++;
    current?.abort();
    fill(node);
    node.classList.remove("waiting");
  }

  function dispose() {
    requested++;
    current?.abort();
    if (release) URL.revokeObjectURL(release);
  }

  return { node, show, clear, dispose };
}
