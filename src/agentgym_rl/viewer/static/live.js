// Polls the server for changes while the page is visible.

import { get, isExport } from "./api.js";

const POLL_INTERVAL_MS = 2000;

/** Call `onChange({runs, index})` after every poll; runs is a Set of changed ids. Return a function that stops it. */
export async function watch(onChange) {
  if (isExport()) return () => {};
  let stamps = null;
  let indexStamp = null;
  let timer = 0;
  let ended = false;

  async function poll() {
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
      if (!ended) onChange({ runs: changed, index: changes.index, grown, lost: false });
    } catch {
      if (!ended) onChange({ runs: new Set(), index: null, grown: false, lost: true });
    }
  }

  async function loop() {
    if (!document.hidden) await poll();
    if (!ended) timer = setTimeout(loop, POLL_INTERVAL_MS);
  }
  // A caller that awaits the first poll gets every later change exactly once.
  await loop();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}
