// The stream of changes, and the versions of a row. Reads server-sent events by fetch, which can
// send the token in a header; an EventSource would need it in the address, and so in logs.

import { element, duration, number } from "./draw.js";

const WORDS = { c: "insert", r: "read", u: "update", d: "delete", t: "truncate", m: "message" };
const MOST_ROWS = 200;
const AGAIN_MS = 2000;

const text = (value) => (value === null ? "null" : typeof value === "string" ? value : JSON.stringify(value));

export function row(before, after, unchanged = [], word = "unchanged") {
  const list = element("div", { class: "row" });
  for (const name of new Set([...Object.keys(before ?? {}), ...Object.keys(after ?? {}), ...unchanged])) {
    const item = element("span", {}, element("b", {}, `${name}=`));
    const old = before?.[name], now = after?.[name];
    if (unchanged.includes(name)) item.append(`(${word})`);
    else if (before && after && name in before && name in after && text(old) !== text(now)) item.append(element("del", {}, text(old)), " → ", element("ins", {}, text(now)));
    else if (before && after && name in before && name in after) continue;
    else item.append(text(after && name in after ? now : old));
    list.append(item);
  }
  return list;
}

function change(found, explain) {
  const at = new Date(found.at_ms);
  const head = element("div", { class: "head" },
    element("span", { class: `op ${/^[a-z]$/.test(found.op) ? found.op : ""}` }, WORDS[found.op] ?? found.op),
    element("strong", {}, found.table || found.prefix || ""),
    element("span", { class: "code" }, found.key ? Object.entries(found.key).map(([name, value]) => `${name}=${text(value)}`).join(" ") : ""),
    element("span", { class: "quiet" }, `${at.toLocaleTimeString()} · seq ${found.seq} · ${found.lsn} · published after ${duration(found.late_ms / 1000)}`));
  if (found.key_text && found.table) {
    const button = element("button", { type: "button", class: "link", "aria-label": `Explain ${found.table}` }, "explain");
    button.addEventListener("click", () => explain(found.table, found.key_text));
    head.append(button);
  }
  const item = element("li", {}, head, row(found.before, found.after, found.unchanged));
  if (found.dead) item.append(element("div", { class: "quiet" }, `too large for its topic, see cdc dead: ${found.dead.join(", ")}`));
  return item;
}

export function follow(request, explain) {
  const list = document.getElementById("tail"), note = document.getElementById("tail-note"), pause = document.getElementById("pause");
  let paused = false, stop = null, waiting = [], skipped = 0, generation = 0;

  const show = (found) => {
    list.prepend(change(found, explain));
    while (list.children.length > MOST_ROWS) list.lastChild.remove();
  };
  const on = {
    change(found) {
      if (!paused) return show(found);
      waiting.push(found);
      if (waiting.length > MOST_ROWS) waiting.shift();
    },
    rate(found) {
      skipped += found.skipped;
      const left = found.arrived - found.kept;
      const parts = [`${found.per_second} changes/s`];
      if (found.per_second > found.most_per_second) parts.push(`sampled: at most ${found.most_per_second}/s are shown`);
      if (left > 0) parts.push(`${number(left)} were not shown since the console started`);
      if (skipped) parts.push(`${number(skipped)} more were skipped by this page`);
      if (paused) parts.push(`paused, ${waiting.length} newer`);
      if (found.error) parts.unshift(`not following: ${found.error}`);
      note.textContent = parts.join(" · ");
    },
  };
  async function run(mine) {
    const ops = [...document.querySelectorAll("[name=op]:checked")].map((each) => each.value).join(",");
    const query = new URLSearchParams({ table: document.getElementById("tail-table").value.trim(), key: document.getElementById("tail-key").value.trim(), ops: ops || "none" });
    stop = new AbortController();
    try {
      const answer = await request(`api/tail?${query}`, { signal: stop.signal });
      if (!answer.ok) throw new Error((await answer.json()).error);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = "";;) {
        const { value, done } = await reader.read();
        if (done) throw new Error("the console has ended the stream");
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const [, kind, data] = /^event: (\w+)\ndata: (.*)$/s.exec(block) ?? [];
          if (kind && mine === generation) on[kind]?.(JSON.parse(data));
        }
      }
    } catch (error) {
      if (mine !== generation) return;
      note.textContent = `the stream is interrupted: ${error.message}`;
      setTimeout(() => { if (mine === generation) run(mine); }, AGAIN_MS);
    }
  }
  const restart = () => { generation += 1; stop?.abort(); list.replaceChildren(); waiting = []; run(generation); };
  let typed = 0;
  const form = document.getElementById("tail-form");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => { clearTimeout(typed); typed = setTimeout(restart, 300); });
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", paused);
    pause.textContent = paused ? "Continue" : "Pause";
    if (!paused) { waiting.forEach(show); waiting = []; }
  });
  restart();
}

// Older versions have the values that a newer one does not carry, because Postgres did not send them.
export function joined(older, newer) {
  const all = [...older, ...newer];
  all.forEach((each, place) => {
    const row = place ? all[place - 1].after : null;
    if (!row || !each.after) return;
    const known = each.unknown.filter((name) => each.unsent?.includes(name) && name in row);
    known.forEach((name) => { each.after[name] = row[name]; });
    each.unknown = each.unknown.filter((name) => !known.includes(name));
  });
  return all;
}

// How far back a topic was searched, with the button that goes on; nothing of an archive.
export function reach(searched, further) {
  if (!searched) return [];
  const events = `${number(searched.events)} events of the topic were searched`;
  const lost = searched.compacted ? " Kafka compacts this topic, so older versions may be removed." : "";
  if (searched.complete) {
    const how = searched.indexed === 100 ? "what the index of the topic names, of all that Kafka still has" : "all that Kafka still has";
    return [element("p", { class: "quiet" }, `${events}: ${how}.${lost}${indexing(searched)}`)];
  }
  const back = searched.lsn ? `, back to ${searched.lsn} (${new Date(searched.at).toLocaleString()})` : "";
  const button = element("button", { type: "button", id: "further" }, "Search further back");
  button.addEventListener("click", () => { button.disabled = true; further(); });
  return [element("p", { class: "quiet", role: "status" }, `${events}${back}: older versions are not shown.${lost}${indexing(searched)}`), button];
}

function indexing(searched) {
  if (searched.index_error) return ` The topic can't be indexed: ${searched.index_error}.`;
  return searched.indexed === null || searched.indexed === 100 ? "" : ` ${number(searched.indexed)} % of these partitions are indexed: a later search is faster.`;
}

export function versions(found, stores) {
  const list = element("ol", { class: "rows" });
  for (const each of [...found].reverse()) {
    const holding = stores.map((store) => `${store.name} ${store.seq === null ? "unknown" : store.seq >= each.seq ? "has it" : "not yet"}`).join(", ");
    const author = each.author === null ? "" : ` · by ${text(each.author)}`;
    list.append(element("li", {},
      element("div", { class: "head" }, element("span", { class: `op ${each.op[0] === "r" ? "r" : { insert: "c", update: "u", delete: "d", truncate: "t" }[each.op] ?? ""}` }, each.op),
        element("span", {}, new Date(each.at).toLocaleString()),
        element("span", { class: "quiet" }, `seq ${each.seq} · ${each.lsn} · transaction ${each.transaction ?? "unknown"}${author} · from the ${each.held_by}`)),
      row(each.before, each.after, each.unknown, "unknown"), element("div", { class: "quiet" }, holding)));
  }
  return list;
}
