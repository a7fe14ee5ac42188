// Commands as buttons, and what was given up. A button runs the command that is shown next to it,
// and nothing else: the server refuses a request whose command is another one.

import { element, number, size } from "./draw.js";

const by = (id) => document.getElementById(id);
// As Python's shlex.quote.
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
const WORDS = {
  snapshot: (target) => ["snapshot", "start", target],
  pause: (target, id) => ["snapshot", "pause", id],
  resume: (target, id) => ["snapshot", "resume", id],
  stop: (target, id) => ["snapshot", "stop", id],
  rebuild: (target) => ["rebuild", target],
  send: (target, id) => ["webhook", "send", target, id],
  retry: (target, id) => ["queue", "retry", target, id],
  discard: (target, id) => [...target.split(/\.(.*)/s, 1), "discard", "--yes", target.split(/\.(.*)/s)[1], id],
};
let allowed = false, send = null;

const command = (action, target, id) => ["cdc", ...WORDS[action](target, id).filter(Boolean)].map(quoted).join(" ");

async function run(action, target, id) {
  const line = command(action, target, id);
  if (!confirm(`Run this?\n\n${line}`)) return;
  const note = by("act-note");
  try {
    const answer = await send("api/act", { method: "POST", body: JSON.stringify({ action, target, id, command: line }) });
    const found = await answer.json();
    note.textContent = answer.ok ? `started: ${line}` : `refused: ${found.error}`;
  } catch (error) {
    note.textContent = `no answer: ${error.message}`;
  }
  dead();
}

// The rows of the panel: a button, what it is about, and its command.
function rows() {
  for (const row of document.querySelectorAll("#actions [data-action]")) {
    const action = row.dataset.action, input = row.querySelector("input"), button = row.querySelector("button"), shown = row.querySelector("code");
    const isNumber = ["pause", "resume", "stop"].includes(action);
    const given = () => (isNumber ? ["", input.value.trim()] : [input.value.trim(), ""]);
    const show = () => {
      const [target, id] = given();
      shown.textContent = target || isNumber ? command(action, target, id) : `${command(action, "", "")} …`;
      button.disabled = !allowed || !(target || isNumber);
    };
    input.addEventListener("input", show);
    button.addEventListener("click", () => run(action, ...given()));
    row.show = show;
    show();
  }
}

function offer(id, names) {
  const list = by(id), before = [...list.children].map((each) => each.value);
  if (before.join("\n") !== names.join("\n")) list.replaceChildren(...names.map((value) => element("option", { value })));
}

export function showActions(status, found, now, viewer) {
  if (now !== allowed) {
    allowed = now;
    document.querySelectorAll("#actions [data-action]").forEach((row) => row.show());
    dead();
  }
  const readOnly = found === null ? "This console is read-only: the buttons need cdc console --allow-actions." : `The buttons are off for ${viewer}, who is not in console.oidc.actors.`;
  by("act-state").textContent = allowed ? "Each runs on the console's host, with its rights, and is logged." : `${readOnly} The commands work in a terminal.`;
  offer("followers-known", status.followers.map((each) => each.name));
  offer("snapshots-known", status.incremental_snapshots.map((each) => each.id));
  by("acts").replaceChildren(...(found ?? []).map((each) => element("li", {},
    element("div", { class: "head" }, element("code", {}, each.command),
      element("span", { class: each.exit_code ? "op d" : "op" }, each.exit_code === null ? "runs" : `exit code ${each.exit_code}`),
      element("span", { class: "quiet" }, `${new Date(each.began_ms).toLocaleTimeString()} by ${each.by}`)),
    each.output ? element("pre", {}, each.output.trim()) : null)));
}

export const offerTables = (tables) => offer("tables-known", tables.slice(0, 1000).map((each) => each.name));

let drawn = "", reading = false;
async function dead() {
  // One at a time: a browser has few connections, and the verdict needs one.
  if (reading || send === null || by("dead").closest("details").open === false) return;
  reading = true;
  let found;
  try {
    found = await (await send("api/dead")).json();
  } catch (error) {
    found = { events: null, error: error.message };
  } finally {
    reading = false;
  }
  // Drawn again only where something changed: a button keeps the focus.
  const text = JSON.stringify([found, allowed]);
  if (text === drawn) return;
  drawn = text;
  by("dead-note").textContent = found.events === null ? `cannot be read: ${found.error}` : `${number(found.undecided)} undecided of ${number(found.count)}${found.count > found.events.length ? `, ${number(found.events.length)} are shown` : ""}`;
  by("dead").replaceChildren(...(found.events ?? []).map(letter));
}

function letter(each) {
  const what = `${each.kind} ${each.name}`;
  const item = element("li", {},
    element("div", { class: "head" }, element("strong", {}, what), element("span", { class: "code" }, each.id),
      element("span", { class: "quiet" }, `${new Date(each.at_ms).toLocaleString()} · ${each.place} · ${each.attempts} attempts`)),
    element("div", {}, each.why));
  if (each.state !== "undelivered") {
    item.append(element("div", { class: "quiet" }, `${each.state} by ${each.decided_by}, ${new Date(each.decided_at_ms).toLocaleString()}`));
    return item;
  }
  const decisions = each.kind === "webhook" ? [["Retry", "send", each.name], ["Discard", "discard", `webhook.${each.name}`]] : [["Retry", "retry", each.name], ["Discard", "discard", `queue.${each.name}`]];
  for (const [word, action, target] of decisions) {
    const button = element("button", { type: "button", "aria-label": `${word} ${each.id} of ${what}` }, word);
    button.disabled = !allowed;
    button.addEventListener("click", () => run(action, target, each.id));
    item.append(element("div", { class: "act" }, button, element("code", {}, command(action, target, each.id))));
  }
  return item;
}

async function large() {
  const box = by("large");
  box.replaceChildren(element("li", { class: "quiet" }, "reading …"));
  try {
    const { events, error } = await (await send("api/large")).json();
    box.replaceChildren(...(events ?? []).reverse().map((each) => element("li", {},
      element("div", { class: "head" }, element("strong", {}, each.table ? `${each.schema}.${each.table}` : each.topic), element("span", { class: "code" }, each.key ?? "no key"),
        element("span", { class: "quiet" }, `${each.commit_lsn} · ${size(each.bytes)} in ${each.columns.join(", ")}: too large for its topic, which has the rest of the event`)),
      element("code", {}, `cdc dead show ${quoted(each.id)}`))));
    if (!box.children.length) box.replaceChildren(element("li", { class: "quiet" }, events === null ? error : "there are none"));
  } catch (error) {
    box.replaceChildren(element("li", {}, `no answer: ${error.message}`));
  }
}

export function start(request) {
  send = (path, options = {}) => request(path, options, { "content-type": "application/json", "x-lockstep-console": "1" });
  rows();
  by("dead").closest("details").addEventListener("toggle", dead);
  by("large-list").addEventListener("click", large);
  setInterval(dead, 5000);
}
