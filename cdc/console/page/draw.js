// Elements and numbers. Text is only ever set as text, so nothing from the pipeline becomes markup.

const SVG = "http://www.w3.org/2000/svg";

export const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const shape = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

export const size = (bytes) => {
  if (bytes === null || bytes === undefined) return "unknown";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${bytes.toFixed(unit && bytes < 100 ? 1 : 0)} ${units[unit]}`;
};

export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds === 0) return "0 s";
  if (seconds < 0.1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
};

export const rate = (value, what) => {
  if (value === null || value === undefined) return `measuring ${what}`;
  return `${value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en")} ${what}`;
};

export const number = (value) => value.toLocaleString("en");

export function definitions(pairs) {
  const list = element("dl");
  for (const [name, value] of pairs) list.append(element("dt", {}, name), element("dd", {}, value));
  return list;
}

export function bar(share, label) {
  const used = Math.min(1, Math.max(0, share)) * 100;
  return shape("svg", { class: "bar", viewBox: "0 0 100 14", preserveAspectRatio: "none", role: "img", "aria-label": label },
    shape("rect", { class: "all", width: 100, height: 14, rx: 2 }),
    shape("rect", { class: share > 0.8 ? "used much" : "used", width: used, height: 14, rx: 2 }));
}

// A line over the last hour: its values in order, null where it was not measured.
export function line(caption, ago, values, format) {
  const known = values.filter((value) => value !== null);
  const most = Math.max(...known, 0);
  const newest = values.length ? values[values.length - 1] : null;
  const span = Math.max(ago[0] ?? 0, 60);
  const head = element("figcaption", {}, element("span", {}, caption),
    element("span", {}, newest === null ? "not measured" : `${format(newest)} (at most ${format(most)})`));
  const drawing = shape("svg", { class: "spark", viewBox: "0 0 1000 56", preserveAspectRatio: "none", role: "img", "aria-label": `${caption}, last ${duration(span)}` });
  let part = [];
  const finish = () => { if (part.length) drawing.append(shape("polyline", { points: part.join(" ") })); part = []; };
  values.forEach((value, at) => {
    if (value === null) { finish(); return; }
    part.push(`${(1000 * (1 - ago[at] / span)).toFixed(1)},${(53 - 48 * (most ? value / most : 0)).toFixed(1)}`);
  });
  finish();
  return element("figure", {}, head, drawing);
}
