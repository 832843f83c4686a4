// The environment's own picture. It may hold text of a model, so it is shown where script cannot run: as an image, or
// in a sandboxed frame of its own origin.

import { getPicture } from "./api.js";
import { fill, h } from "./dom.js";

/** A box that shows one picture after another; `show(path, parameters)` changes it. */
export function pictureBox(label) {
  const node = h("div", { class: "picture", "aria-live": "polite" });
  let current = null;
  let release = null;
  let wanted = 0;

  async function show(path, parameters) {
    const mine = ++wanted;
    current?.abort();
    current = new AbortController();
    const waiting = setTimeout(() => mine === wanted && node.classList.add("waiting"), 150);
    try {
      const picture = await getPicture(path, parameters, current.signal);
      if (mine !== wanted) return;
      await place(picture, mine);
    } catch (error) {
      if (mine === wanted && error.name !== "AbortError") {
        fill(node, h("p", { class: "no-picture" }, h("span", {}, "No picture"), h("small", {}, error.message)));
      }
    } finally {
      clearTimeout(waiting);
      if (mine === wanted) node.classList.remove("waiting");
    }
  }

  async function place(picture, mine) {
    if (picture.html) {
      fill(node, h("iframe", { sandbox: "", src: `${picture.url}#now`, title: label, class: "drawn", loading: "lazy" }));
    } else {
      const image = h("img", { alt: label, class: "drawn", src: picture.url });
      try {
        await image.decode();
      } catch {
        throw new Error("the environment drew something that is no image");
      }
      if (mine !== wanted) return;
      fill(node, image);
    }
    if (release) URL.revokeObjectURL(release);
    release = picture.release ? picture.url : null;
  }

  function clear() {
    wanted++;
    current?.abort();
    fill(node);
    node.classList.remove("waiting");
  }

  function dispose() {
    wanted++;
    current?.abort();
    if (release) URL.revokeObjectURL(release);
  }

  return { node, show, clear, dispose };
}
