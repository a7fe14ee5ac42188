// Asks the console's API every two seconds and draws what it answers. The verdict is the server's
// own; the page only ever makes it worse: what is old or does not answer is unknown, never green.

import { offerTables, showActions, start } from "./act.js";
import { bar, definitions, duration, element, line, number, rate, shape, size } from "./draw.js";
import { follow, joined, reach, versions } from "./tail.js";

const EVERY_MS = 2000;
// Without an answer for so long, nothing is known. Commands end within a minute by themselves.
const ANSWER_MS = 10000;
const COMMAND_MS = 70000;
const COMMANDS = /^api\/(explain|large)\b/;
const TABLES_SHOWN = 200;
const MARKS = { ok: "✓", degraded: "!", failed: "✗", unknown: "?" };
const by = (id) => document.getElementById(id);
let token = sessionStorage.getItem("token") ?? "";
let stores = [];
let following = false;

// A link may bring the token after the #, which browsers never send; it leaves the address at once.
const given = /^#token=(.+)$/.exec(location.hash);
if (given) {
  token = decodeURIComponent(given[1]);
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname);
}

async function request(path, options = {}, headers = {}) {
  // Several requests run at once: an answer is about the token that was sent, not about a newer one.
  const sent = token;
  // The console has no cookies; a proxy in front of it may know its users by one.
  // The live tail has a signal of its own, and no end.
  const signal = options.signal ?? AbortSignal.timeout(COMMANDS.test(path) ? COMMAND_MS : ANSWER_MS);
  const answer = await fetch(path, { ...options, signal, headers: sent ? { ...headers, authorization: `Bearer ${sent}` } : headers, credentials: "same-origin", redirect: "manual" });
  if (answer.type === "opaqueredirect") return signedOut("the proxy asks for a login", answer);
  // The console's own answers are JSON; a proxy's may be a page.
  const isPage = !answer.ok && !answer.headers.get("content-type")?.startsWith("application/json");
  if (answer.status === 401 || (answer.status === 403 && isPage)) {
    const { error, by_proxy: byProxy = true } = isPage ? {} : await answer.clone().json();
    if (byProxy) return signedOut(error ?? "the proxy asks for a login", answer);
    if (sent === token || !token) ask(sent ? "this token is not accepted" : "");
  }
  if (answer.ok) by("signed-out").hidden = true;
  return answer;
}

// Only the proxy in front of the console can ask for a login: by an address that is opened, not here.
function signedOut(why, answer) {
  sessionStorage.removeItem("token");
  token = "";
  by("signed-out").hidden = false;
  by("signed-out-why").textContent = why;
  if (answer.status !== 401) throw new Error(why);
  return answer;
}

function ask(why) {
  sessionStorage.removeItem("token");
  token = "";
  by("login").hidden = false;
  by("console").hidden = true;
  by("login-error").textContent = why;
}

by("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = by("token").value.trim();
  sessionStorage.setItem("token", token);
  by("token").value = "";
  by("login").hidden = true;
  by("console").hidden = false;
  refresh();
});

function verdict(level, sentence, causes) {
  by("verdict").className = level;
  const [mark, word, text] = by("sentence").children;
  mark.textContent = MARKS[level] ?? "?";
  word.textContent = level;
  text.textContent = sentence.startsWith(`${level}: `) ? sentence.slice(level.length + 2) : sentence;
  by("causes").replaceChildren(...causes.map((each) => {
    const since = each.since ? `, since ${each.since}` : "";
    const item = element("li", {}, `${each.what}${since}`);
    if (each.remedy) item.append(element("div", { class: "quiet" }, "to do: ", element("code", {}, each.remedy)));
    return item;
  }));
  document.title = `${MARKS[level] ?? "?"} ${by("pipeline").textContent} – Lockstep`;
}

function showStatus(found) {
  by("pipeline").textContent = found.pipeline;
  by("version").textContent = `Version ${found.version}.`;
  by("viewer").textContent = found.viewer;
  const measured = found.measured;
  if (measured === null) {
    verdict("unknown", found.failed ? `the console cannot measure: ${found.failed}, see its log` : "measuring …", []);
    return;
  }
  by("age").textContent = `measured ${duration(found.age_seconds)} ago`;
  const status = measured.status, found_verdict = status.verdict;
  if (found.stale && found_verdict.level !== "failed") verdict("unknown", `nothing was measured for ${duration(found.age_seconds)}; before: ${found_verdict.sentence}`, found_verdict.causes);
  else verdict(found_verdict.level, found_verdict.sentence, found_verdict.causes);
  stores = status.followers;
  flow(status, measured.rates, measured.stale);
  slot(status, measured.slot);
  showActions(status, found.actions, found.may_act, found.viewer);
  incidents(measured.incidents);
  webhooks(status.webhooks);
}

function incidents(found) {
  by("incidents").replaceChildren(...found.map((each) => element("li", {},
    element("div", { class: "head" }, element("span", { class: "kind" }, each.kind),
      element("time", { class: "quiet", datetime: new Date(each.at_us / 1000).toISOString() }, new Date(each.at_us / 1000).toLocaleString())),
    element("div", {}, each.what))));
  if (!found.length) by("incidents").replaceChildren(element("li", { class: "quiet" }, "none since the console started"));
}

function webhooks(found) {
  by("webhooks-section").hidden = !found.length;
  by("webhooks").replaceChildren(...found.map((each) => element("tr", {},
    element("td", {}, each.name),
    element("td", {}, each.state.replace("_", " "), each.what ? element("div", { class: "quiet" }, each.what) : null),
    element("td", { class: "number" }, number(each.members)),
    element("td", {}, each.lag === null ? "unknown" : `${number(each.lag)} offsets, ${duration(each.lag_seconds)}`),
    element("td", { class: "number" }, number(each.failing)),
    element("td", { class: "number" }, number(each.undelivered)),
    element("td", {}, each.away_seconds === null ? "" : duration(each.away_seconds)),
    element("td", {}, each.command ? element("code", {}, each.command) : null))));
}

function node(level, name, ...lines) {
  return element("div", { class: `node ${level}` }, element("strong", {}, name), ...lines.filter(Boolean).map((each) => element("span", { class: "quiet" }, each)));
}

function edge(...lines) {
  const arrow = shape("svg", { viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": "true" }, shape("line", { x1: 2, y1: 6, x2: 98, y2: 6 }), shape("path", { d: "M94 2 L98 6 L94 10" }));
  return element("div", { class: "edge" }, arrow, ...lines.filter(Boolean).map((each) => element("span", {}, each)));
}

// What a store holds of these tables may differ from them at every frontier.
const STALE_NAMED = 3;
function staleTables(names = []) {
  const shown = names.slice(0, STALE_NAMED).join(", ");
  return names.length ? `stale: ${shown}${names.length > STALE_NAMED ? ` and ${number(names.length - STALE_NAMED)} more` : ""}` : "";
}

function flow(status, rates, stale) {
  const levels = new Map();
  for (const cause of status.verdict.causes) {
    const about = cause.about === "follower" ? cause.subject : cause.about;
    if (levels.get(about) !== "failed") levels.set(about, cause.level);
  }
  const unreached = status.verdict.causes.some((each) => each.about === "server");
  const down = (known) => (known ? "ok" : unreached ? "failed" : "unknown");
  const parts = by("flow");
  const { source, slot: kept, resume, daemon } = status;
  const slotLevel = levels.get("slot") ?? (kept && kept.active_pid === null ? "degraded" : down(kept !== null));
  const logLevel = resume === null ? down(false) : levels.get("daemon") ?? (daemon === null ? "degraded" : "ok");
  const lanes = element("div", { class: "stores" });
  for (const each of stores) {
    const level = levels.get(each.name) ?? (["halted", "not_running", "new", "stopped"].includes(each.state) ? "failed" : "ok");
    lanes.append(element("div", {},
      edge(each.lag_seconds === null ? "lag unknown" : `lag ${duration(each.lag_seconds)}, ${size(each.lag_bytes)}`, each.lsn && rate(rates.followers[each.name], "events/s")),
      node(level, each.name, `${each.store ?? ""} ${each.state.replace("_", " ")}`, each.lsn && `${each.lsn}, seq ${number(each.seq)}`, each.what, staleTables(stale[each.name]))));
  }
  if (!stores.length) lanes.append(element("p", { class: "quiet" }, "no followers are configured"));
  parts.replaceChildren(
    node(slotLevel, source ? source.database : "Postgres", source ? `WAL ends at ${source.wal_lsn}` : "does not answer, see above", kept ? `slot ${kept.name}` : source && "no slot"),
    edge(status.lag_bytes === null ? "lag unknown" : `lag ${status.lag_seconds === null ? "" : `${duration(status.lag_seconds)}, `}${size(status.lag_bytes)}`, rate(rates.log_bytes_per_second === null ? null : rates.log_bytes_per_second / 1024, "kB/s of WAL")),
    node(logLevel, "Kafka log", resume ? `${resume.end_lsn}, seq ${number(resume.seq)}` : "cannot be read, or is empty", rate(rates.log_events_per_second, "events/s"), daemon ? `daemon ${daemon.state}` : "no daemon answers"),
    lanes);
}

function slot(status, measured) {
  const box = by("slot"), kept = status.slot;
  if (kept === null || measured === null) {
    box.replaceChildren(element("p", { class: "quiet" }, status.source === null ? "Postgres does not answer" : "there is no slot"));
    return;
  }
  const limit = measured.limit_bytes;
  const held = kept.held_by.map((each) => `${each.prepared === null ? `pid ${each.pid}` : `prepared ${each.prepared}`}, ${duration(each.age_seconds)} old`);
  const facts = definitions([
    ["keeps", limit === null ? `${size(measured.retained_bytes)} of WAL, without a limit` : `${size(measured.retained_bytes)} of at most ${size(limit)} of WAL`],
    ["invalid in", measured.lost_in_seconds === null ? (limit === null ? "never: max_slot_wal_keep_size is not set" : "not at the present rate") : `${duration(measured.lost_in_seconds)}, if it stopped moving now`],
    ["WAL rate", measured.wal_bytes_per_second === null ? "measuring" : `${size(measured.wal_bytes_per_second)}/s`],
    ["state", `${kept.wal_status}, ${kept.active_pid === null ? "read by nobody" : `read by pid ${kept.active_pid}`}`],
    ["restart LSN", `${kept.restart_lsn}, confirmed ${kept.confirmed_flush_lsn}`],
    ["held back by", held.length ? held.slice(0, 5).join("; ") + (held.length > 5 ? ` and ${held.length - 5} more` : "") : "no open transaction that writes"],
  ]);
  box.replaceChildren(...(limit ? [bar(measured.retained_bytes / limit, "share of the limit that is used")] : []), facts);
}

function showChart(found) {
  if (found === null || !found.seconds_ago.length) {
    by("chart").replaceChildren(element("p", { class: "quiet" }, "measuring …"));
    return;
  }
  const ago = found.seconds_ago;
  const lines = [line("Events/s into the log", ago, found.events_per_second, (value) => value.toFixed(1))];
  if (found.lag_seconds.some((value) => value !== null)) lines.push(line("Lag of the log", ago, found.lag_seconds, duration));
  for (const [name, lags] of Object.entries(found.follower_lag_seconds)) lines.push(line(`Lag of ${name}`, ago, lags, duration));
  const late = (value) => duration(value / 1000), hour = found.hour;
  if (found.late_p50_ms.some((value) => value !== null)) {
    lines.splice(1, 0, line("Commit to log, p50", ago, found.late_p50_ms, late), line("Commit to log, p99", ago, found.late_p99_ms, late));
  }
  const all = definitions([
    ["measured for", duration(hour.seconds)],
    ["throughput", hour.events_per_second === null ? "measuring" : rate(hour.events_per_second, "events/s")],
    ["commit to log", hour.late_p50_ms === null ? "no event yet" : `p50 ${late(hour.late_p50_ms)}, p99 ${late(hour.late_p99_ms)}`],
  ]);
  by("chart").replaceChildren(all, element("div", { class: "lines" }, ...lines));
}

function showTables({ tables, since_ms }) {
  offerTables(tables);
  const wanted = by("tables-filter").value.trim();
  const found = tables.filter((each) => each.name.includes(wanted));
  const since = new Date(since_ms ?? 0).toLocaleTimeString();
  by("tables-count").textContent = `${number(found.length)} of ${number(tables.length)}${found.length > TABLES_SHOWN ? `, the first ${TABLES_SHOWN} are shown` : ""}`;
  by("tables").replaceChildren(...found.slice(0, TABLES_SHOWN).map((each) => {
    const changes = each.changes;
    const at = each.snapshot;
    const percent = at && at.percent !== null ? `${at.percent.toFixed(0)} %, ` : "";
    const snapshot = at ? `${at.kind}: ${at.state}, ${percent}${number(at.rows)} rows` : "";
    return element("tr", {},
      element("td", {}, each.name, each.incomplete ? element("div", { class: "quiet" }, each.incomplete) : null),
      element("td", { class: "number" }, changes ? changes.events_per_second.toFixed(1) : "0.0"),
      element("td", {}, changes ? new Date(changes.published_ms).toLocaleTimeString() : `none since ${since}`),
      element("td", {}, snapshot),
      element("td", { class: "number" }, `${each.versions}`),
      element("td", {}, each.key.join(", ") || "none"));
  }));
}

by("explain-form").addEventListener("submit", (event) => {
  event.preventDefault();
  explain(by("explain-table").value.trim(), by("explain-key").value.trim());
});

async function explain(table, key, before = "", newer = []) {
  by("explain-table").value = table;
  by("explain-key").value = key;
  const box = by("explain");
  if (!before) {
    box.replaceChildren(element("p", { class: "quiet" }, "reading …"));
    by("explain-form").scrollIntoView({ block: "nearest" });
  }
  const frontiers = definitions(stores.map((each) => [each.name, each.lsn === null || each.seq === null ? `${each.state}, no frontier` : `holds everything up to ${each.lsn}, seq ${number(each.seq)}`]));
  try {
    const answer = await request(`api/explain?${new URLSearchParams({ table, key, before })}`);
    const found = await answer.json();
    if (!found.versions) {
      box.replaceChildren(element("p", {}, found.error), element("h2", {}, "Frontiers of the stores"), frontiers);
      return;
    }
    const all = joined(found.versions, newer);
    const further = reach(found.searched, () => explain(table, key, found.searched.before, all));
    box.replaceChildren(...[element("p", {}, `${number(newer.length + found.count)} versions, the newest first`), versions(all, stores), ...further, element("h2", {}, "Frontiers of the stores"), frontiers]);
    if (before) box.querySelector("#further")?.focus();
  } catch (error) {
    box.replaceChildren(element("p", {}, `no answer: ${error.message}`));
  }
}

by("tables-filter").addEventListener("input", () => refresh());

let busy = false;
async function refresh() {
  if (busy) return;
  busy = true;
  try {
    const answers = await Promise.all(["status", "tables", "chart"].map((name) => request(`api/${name}`)));
    if (answers.every((each) => each.ok)) {
      const [status, tables, chart] = await Promise.all(answers.map((each) => each.json()));
      showStatus(status);
      showTables(tables);
      showChart(chart);
      if (!following) { following = true; follow(request, explain); }
    } else if (answers[0].status !== 401) {
      verdict("unknown", (await answers[0].json()).error, []);
    } else {
      verdict("unknown", "nothing was measured since the login has ended", []);
    }
  } catch (error) {
    verdict("unknown", `the console does not answer: ${error.message}`, []);
    by("age").textContent = "";
  } finally {
    busy = false;
  }
}

start(request);
refresh();
setInterval(() => { if (by("login").hidden) refresh(); }, EVERY_MS);
