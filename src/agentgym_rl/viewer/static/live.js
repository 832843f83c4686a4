// Asks the server every few seconds what has changed, while somebody is looking.

import { get, isExport } from "./api.js";

const PAUSE_MS = 2000;

/** Calls `tell({runs, index})` after a change; runs is a Set of the ids that changed. Returns a function that ends it. */
export async function watch(tell) {
  if (isExport()) return () => {};
  let stamps = null;
  let indexStamp = null;
  let timer = 0;
  let ended = false;

  async function look() {
    try {
      const changes = await get("changes");
      const changed = new Set();
      for (const [run, stamp] of Object.entries(changes.stamps)) {
        if (stamps && String(stamps[run]) !== String(stamp)) changed.add(run);
      }
      if (stamps && Object.keys(stamps).some((run) => !(run in changes.stamps))) changed.add("");
      const grown = indexStamp !== null && changes.index.stamp !== indexStamp;
      stamps = changes.stamps;
      indexStamp = changes.index.stamp;
      if (!ended) tell({ runs: changed, index: changes.index, grown, lost: false });
    } catch {
      if (!ended) tell({ runs: new Set(), index: null, grown: false, lost: true });
    }
  }

  async function loop() {
    if (!document.hidden) await look();
    if (!ended) timer = setTimeout(loop, PAUSE_MS);
  }
  // Whoever waits for the first look sees every change after it, and none twice.
  await loop();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}
