// Answers of the server's API, computed from the data in an exported page.

const FACETS = ["kind", "step", "env", "subset", "stop", "success", "horizon"];

const ORDERS = {
  step: (a, b) => b.step - a.step,
  oldest: (a, b) => a.step - b.step,
  reward: (a, b) => b.reward - a.reward || b.step - a.step,
  worst: (a, b) => a.reward - b.reward || b.step - a.step,
  turns: (a, b) => b.turns - a.turns || b.step - a.step,
  sampled: (a, b) => b.sampled - a.sampled || b.step - a.step,
  seconds: (a, b) => b.seconds - a.seconds || b.step - a.step,
};

export function answerOffline(data, path, parameters) {
  const run = parameters.run;
  if (path === "overview") return data.overview;
  if (path === "changes") return { stamps: {}, index: data.overview.index };
  if (path === "run") return need(data.runs[run], "run");
  if (path === "metrics") return need(data.metrics[run], "run");
  if (path === "eval") return need(data.evals[run], "evaluation");
  if (path === "episodes") return page(ordered(rowsOf(data, run, parameters), parameters.order), parameters);
  if (path === "groups") return page(groupsOf(rowsOf(data, run, parameters), parameters), parameters);
  if (path === "facets") return facetsOf(data.rows[run] ?? [], parameters);
  if (path === "episode") return need(data.episodes[run]?.[parameters.key], "episode in this file");
  if (path === "same_task") return sameTask(data, parameters);
  if (path === "shared_tasks") return sharedTasks(data, parameters);
  if (path === "frame") return frameOf(data, parameters);
  throw new Error("an exported page cannot play episodes: start agentgym-rl view");
}

function need(value, name) {
  if (value === undefined || value === null) throw new Error(`no such ${name}`);
  return value;
}

function matches(row, parameters, except) {
  return [...FACETS, "item"].every((name) => {
    const wanted = parameters[name];
    if (name === except || wanted === undefined || wanted === null || wanted === "") return true;
    if (name === "subset") return row.subset.split(", ").includes(String(wanted));
    if (name === "success") return row.success === (String(wanted) === "true" || String(wanted) === "1");
    return String(row[name]) === String(wanted);
  });
}

function rowsOf(data, run, parameters) {
  return need(data.rows[run], "run").filter((row) => matches(row, parameters, ""));
}

function ordered(rows, order = "step") {
  return rows.toSorted(ORDERS[order] ?? ORDERS.step); // stable: rows of one step are stored in the server's order
}

function page(rows, { offset = 0, limit = 100 }) {
  return { total: rows.length, rows: rows.slice(Number(offset), Number(offset) + Number(limit)) };
}

function groupsOf(rows, { mixed }) {
  const groups = new Map();
  for (const row of rows) {
    const name = `${row.key.slice(0, row.key.lastIndexOf("."))} ${row.team}`;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  const summaries = [...groups.values()].map((members) => {
    const rewards = members.map((row) => row.reward);
    const { key, step, kind, team, env, item, subset } = members[0];
    return {
      key, step, kind, team, env, item, subset,
      horizon: Math.max(...members.map((row) => row.horizon)),
      size: members.length,
      successes: members.filter((row) => row.success).length,
      reward: rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length,
      spread: Math.max(...rewards) - Math.min(...rewards),
      members: members.map((row) => [row.success, row.reward]),
    };
  });
  const kept = String(mixed) === "true" ? summaries.filter((group) => group.spread > 1e-6) : summaries;
  return kept.sort((a, b) => b.step - a.step);
}

function facetsOf(rows, parameters) {
  const answer = {};
  for (const name of FACETS) {
    const counts = new Map();
    for (const row of rows.filter((candidate) => matches(candidate, parameters, name))) {
      const values = name === "subset" ? row.subset.split(", ") : [name === "success" ? Number(row.success) : row[name]];
      for (const value of values) if (value !== "") counts.set(value, (counts.get(value) ?? 0) + 1);
    }
    answer[name] = [...counts].sort(([a], [b]) => (a < b ? -1 : 1));
  }
  return answer;
}

function sameTask(data, { env, item }) {
  return Object.entries(data.rows).flatMap(([run, rows]) =>
    ordered(rows.filter((row) => row.env === env && String(row.item) === String(item))).map((row) => ({ ...row, run })),
  );
}

const MAX_SHARED_TASKS = 200;

function sharedTasks(data, { left, right }) {
  const sameRun = left === right;
  const byTask = (run, last) => {
    const episodes = new Map();
    for (const row of ordered(need(data.rows[run], "run"), sameRun ? "oldest" : "step")) {
      const task = JSON.stringify([row.env, row.item]);
      if (last || !episodes.has(task)) episodes.set(task, row);
    }
    return episodes;
  };
  const [leftRows, rightRows] = [byTask(left, false), byTask(right, sameRun)];
  const side = ({ key, kind, step, stop, success, reward, turns }) => ({ key, kind, step, stop, success, reward, turns });
  const rows = [...leftRows].filter(([task, row]) => rightRows.has(task) && !(sameRun && rightRows.get(task).key === row.key))
    .map(([task, row]) => ({ env: row.env, item: row.item, left: side(row), right: side(rightRows.get(task)) }))
    .sort((a, b) => (a.left.success === a.right.success) - (b.left.success === b.right.success) || (a.env < b.env ? -1 : a.env > b.env ? 1 : a.item - b.item));
  return { total: rows.length, rows: rows.slice(0, MAX_SHARED_TASKS) };
}

function frameOf(data, { run, key, turn }) {
  const frames = data.frames[run]?.[key];
  if (!frames) throw new Error("pictures of this episode were not exported");
  const frame = frames[turn];
  if (frame === undefined) throw new Error("this turn has no picture");
  if (typeof frame === "string") throw new Error(frame);
  return data.pictures[frame];
}
