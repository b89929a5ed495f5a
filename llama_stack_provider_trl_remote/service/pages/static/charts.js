// Draws curves with plotly: those of a job here, those of machines in nodes.js.
import { Cursor } from "./cursor.js";
import { along, aroundEqual, groups, isNoisy, legendOf, smoothed, withoutOutliers } from "./curves.js";
import { csvOf, Figure, save } from "./figure.js";
import { short } from "./texts.js";

const DRAW_MS = 500;
// Charts this near to the part of the page that is seen are drawn: whoever scrolls finds them there.
const NEAR = "300px 0px";
const HEIGHT = 290;
// Of a part of a curve, and of a file.
const CLOSER_POINTS = 4000;
const FILE_POINTS = 20000;
const THINNED = `The CSV is thinned: a curve has more than ${FILE_POINTS.toLocaleString("en")} points, and the file has the lowest \
and the highest of each part. Enlarge a part of the chart to save all points of it.`;
// No bar of buttons: some of them lead to a site of plotly's.
export const CONFIG = { responsive: true, displayModeBar: false };
// Plotly shows some tags of HTML in texts: a name is shown as it is.
export const plain = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const COLORS = ["#2f6fb0", "#c0561e", "#2a8a4a", "#8a4fb5", "#b0862f", "#4a8f9c", "#b5477f", "#6b7480"];
const ON_DARK = ["#79b8ff", "#ff9d6b", "#63c77f", "#c79bf2", "#e2b655", "#7fd0dd", "#f48fb9", "#aab4bf"];
const dark = matchMedia("(prefers-color-scheme: dark)");
// The colour of a curve by its number, and how opaque what is not smoothed is: on a dark page lines are fainter.
export const colorOf = (number) => (dark.matches ? ON_DARK : COLORS)[number % COLORS.length];
export const rawOpacity = () => (dark.matches ? 0.55 : 0.35);
// Where numbers are written with a power of ten: plotly would write 1e-4 as 100µ on one axis and as 0.0001 on another.
const POWERS = { tickformat: "~e", labelalias: { "0e+0": "0", "1e+0": "1", "1e+1": "10", "1e+2": "100", "1e−1": "0.1", "1e−2": "0.01" } };
const SMALL = 1e-3;

const MARKS = {
  checkpoint: { symbol: "triangle-down", dash: "dot", color: "#8a939c" },
  attempt: { symbol: "diamond", dash: "dash", color: "#8a939c" },
  pause: { symbol: "square", dash: "longdash", color: "#4a8f9c" },
  warning: { symbol: "x", dash: "solid", color: "#c0561e" },
};
// Marks of a kind from which on they have no lines: these would hide the curves.
const MANY_MARKS = 8;
export function withLines(marks) {
  const counts = Map.groupBy(marks, ({ kind }) => kind);
  return marks.filter(({ kind }) => counts.get(kind).length < MANY_MARKS);
}
// Points of a curve from which on none has a symbol: they would run together to a band.
const MANY_SYMBOLS = 40;
const LONGEST_TEXT = 300;
const LINE = /(.{1,70})(?:\s+|$)|(.{70})/gs;

// A text in lines that fit beside the pointer.
const wrapped = (text) => [...text.slice(0, LONGEST_TEXT).matchAll(LINE)].map((one) => plain(one[1] ?? one[2])).join("<br>");

const UNITS = [
  { name: "hours", seconds: 3600 },
  { name: "minutes", seconds: 60 },
  { name: "seconds", seconds: 1 },
];

// How a curve is drawn: a line through a single point is nothing, and points of evaluations are few.
export const modeOf = ({ step }, kind) => (step.length < 2 || (kind === "validation" && step.length < MANY_SYMBOLS) ? "lines+markers" : "lines");

// Memory is in GiB on every page.
const isMemory = (name) => name.includes("memory_bytes");
export const valuesOf = (name, curve) =>
  isMemory(name) ? curve.value.map((value) => (value === null ? null : value / 2 ** 30)) : curve.value;

// What the pointer shows of a curve: its numbers as tables have them, where plotly would write 0.0003 as 300µ.
export const hovered = (values) => ({ text: values.map((value) => (value === null ? "" : short(value))), hovertemplate: "%{text}" });

// An empty chart at the end of an element; label: for who does not see it.
export function addChart(container, label) {
  const element = document.createElement("div");
  element.className = "chart";
  element.setAttribute("role", "figure");
  element.setAttribute("aria-label", label);
  container.append(element);
  return element;
}

// Of any chart, in the colours of the page. shown: a zoom lasts until this value changes.
export function layout(title, axis, shown) {
  const style = getComputedStyle(document.documentElement);
  const [text, line] = ["--text", "--line"].map((name) => style.getPropertyValue(name).trim());
  const lines = { gridcolor: line, zerolinecolor: line, linecolor: line };
  return {
    title: { text: plain(title), font: { size: 14 }, x: 0.01, xanchor: "left" },
    margin: { l: 55, r: 15, t: 36, b: 80 }, // two lines of a legend: charts beside each other are of equal height
    height: HEIGHT,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, family: "system-ui, sans-serif" },
    xaxis: { ...lines, title: { text: axis, standoff: 4 } },
    yaxis: { ...lines, automargin: true },
    legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", font: { size: 11 } },
    uirevision: shown,
  };
}

// Calls back when the browser changes between light and dark.
export function onColors(redraw) {
  dark.addEventListener("change", redraw);
}

export class Charts {
  // fetchSeries(options): the points of some metrics between two steps.
  constructor(curves, marks, fetchSeries) {
    this.curves = curves;
    this.marks = marks;
    this.fetchSeries = fetchSeries;
    this.charts = new Map();
    this.waiting = new Set();
    this.near = new Set();
    this.observer = new IntersectionObserver((found) => this.moved(found), { rootMargin: NEAR });
    this.timer = 0;
    this.container = document.getElementById("charts");
    this.axis = document.getElementById("axis");
    this.smoothing = document.getElementById("smoothing");
    this.output = document.getElementById("smoothing-value");
    this.logarithmic = document.getElementById("logarithmic");
    this.outliers = document.getElementById("outliers");
    this.cursor = new Cursor();
    this.restore();
    for (const one of [this.axis, this.logarithmic, this.outliers]) one.addEventListener("change", () => this.choose());
    this.smoothing.addEventListener("input", () => this.choose());
    onColors(() => this.all());
    addEventListener("beforeprint", () => this.stale().forEach((chart) => this.drawChart(chart)));
  }

  // The choices are in the address, so that a reload and a copied link keep them.
  restore() {
    const found = new URLSearchParams(location.search);
    if (["step", "epoch", "relative", "time"].includes(found.get("axis"))) this.axis.value = found.get("axis");
    if (found.has("smoothing")) this.smoothing.value = found.get("smoothing");
    this.logarithmic.checked = found.get("scale") === "log";
    this.outliers.checked = found.get("outliers") === "no";
    this.output.value = this.smoothing.value;
  }

  choose() {
    this.output.value = this.smoothing.value;
    const kept = new URLSearchParams(location.search);
    kept.set("axis", this.axis.value);
    kept.set("smoothing", this.smoothing.value);
    const boxes = [["scale", "log", this.logarithmic], ["outliers", "no", this.outliers]];
    for (const [name, value, box] of boxes) {
      if (box.checked) kept.set(name, value);
      else kept.delete(name);
    }
    history.replaceState(null, "", `?${kept}`);
    for (const chart of this.charts.values()) [chart.zoomed, chart.range, chart.asked] = [null, null, null];
    this.all();
  }

  names() {
    return new Set(this.curves.names());
  }

  // The curves of each job that is shown, by its name.
  jobs() {
    return new Map([[document.querySelector("main").dataset.job, this.curves]]);
  }

  each() {
    return [...this.jobs().values()];
  }

  // Points of a job, as /series answers.
  ask(_, options) {
    return this.fetchSeries(options);
  }

  // Of relative times: that in which the longest of the jobs has at least two.
  unit() {
    const longest = Math.max(0, ...this.each().map((one) => one.seconds()));
    return UNITS.find(({ seconds }) => longest >= 2 * seconds) ?? UNITS.at(-1);
  }

  // The places of a curve's points on the axis.
  along(curves, curve) {
    return along(curve, this.axis.value, curves.begin(), this.unit());
  }

  // Charts, with the metrics of each.
  grouped() {
    return groups(this.names());
  }

  all() {
    this.changed(this.names());
  }

  mark(marks) {
    this.marks = marks;
    this.all();
  }

  // The first charts are drawn at once, and what changes in them a moment later, together.
  changed(names) {
    for (const name of names) this.waiting.add(name);
    this.later(this.charts.size ? DRAW_MS : 0);
  }

  later(wait) {
    this.timer ||= setTimeout(() => this.draw(), wait);
  }

  // Charts that have come near to what is seen, or are no longer.
  moved(found) {
    for (const { target, isIntersecting } of found) this.near[isIntersecting ? "add" : "delete"](target);
    if (this.stale(this.near).length) this.later(0);
  }

  // Charts that lack points, in their order; near: only those of some elements.
  stale(near = null) {
    return [...this.charts.values()].filter((chart) => chart.isStale && (!near || near.has(chart.element)));
  }

  // Only what is near to what is seen, and one chart at a time: a page that draws twenty of them at once answers to
  // nothing for a second.
  async draw() {
    const changed = this.waiting;
    this.waiting = new Set();
    try {
      for (const group of this.grouped()) {
        if (!group.names.some((name) => changed.has(name))) continue;
        const chart = this.charts.get(group.title) ?? this.add(group);
        Object.assign(chart, { group, isStale: true });
      }
      for (const chart of this.stale(this.near)) {
        if (chart.isStale) this.drawChart(chart);
        await new Promise((next) => setTimeout(next));
      }
    } finally {
      this.timer = 0;
      if (this.stale(this.near).length) this.later(0);
      else if (this.waiting.size) this.later(DRAW_MS);
    }
  }

  // Where a new chart goes: its section of the page.
  place({ section }) {
    const found = this.container.querySelector(`[data-section="${section}"]`);
    found.hidden = false;
    return found.querySelector(".chart-grid");
  }

  // A chart in its place, without curves. isSeen: it is drawn at once, wherever it is.
  add(group, isSeen = !this.charts.size) {
    const chart = { group, zoomed: null, range: null, isStale: true, isDrawn: false };
    chart.figure = new Figure(this.place(group), group.title, `${group.title} by ${this.axis.value}`, {
      csv: () => this.csv(chart.group, chart),
      drawn: () => this.resized(chart),
    });
    chart.element = chart.figure.element;
    this.charts.set(group.title, chart);
    if (isSeen) this.near.add(chart.element);
    this.observer.observe(chart.element);
    return chart;
  }

  drawChart(chart) {
    const { group, element } = chart;
    chart.isStale = false;
    const curves = group.names.flatMap((name, at) => this.traces(name, chart.zoomed, colorOf(at)));
    // A line to 0 would fall through the floor of a logarithmic axis.
    if (this.logarithmic.checked) for (const one of curves) one.y = one.y.map((value) => (value > 0 ? value : null));
    const traces = [...curves, ...this.markers(group)];
    if (chart.isDrawn) {
      window.Plotly.react(element, traces, this.drawn(group, chart, curves), CONFIG);
      return;
    }
    chart.isDrawn = true;
    window.Plotly.newPlot(element, traces, this.drawn(group, chart, curves), CONFIG);
    element.on("plotly_relayout", (change) => this.zoom(chart, change));
    this.cursor.add(element);
    performance.mark("chart"); // benchmarks.dashboard reads the first one
  }

  // The layout of a chart with these curves.
  drawn(group, chart, curves) {
    const found = this.layout(group);
    const isLogarithmic = this.logarithmic.checked;
    if (isLogarithmic) found.yaxis.type = "log";
    const values = curves.flatMap(({ y }) => y);
    const sizes = values.map(Math.abs).filter((value) => value > 0);
    if (sizes.length && (isLogarithmic ? Math.min(...sizes) : Math.max(...sizes)) < SMALL) Object.assign(found.yaxis, POWERS);
    const equal = isLogarithmic ? null : aroundEqual(values);
    const range = equal ?? (this.outliers.checked && withoutOutliers(values, isLogarithmic));
    if (range) found.yaxis.range = range;
    found.yaxis.uirevision = `${found.uirevision} ${isLogarithmic} ${this.outliers.checked}`;
    if (chart.figure.isWhole) found.height = chart.element.clientHeight;
    return found;
  }

  // The ends of the axis, the same on all charts: plotly would leave room for symbols on those alone that have any.
  ends() {
    const every = this.each().flatMap((all) => Object.values(all.metrics).flatMap((metrics) => [...metrics.values()].map((curve) => [all, curve])));
    const last = every.filter(([, { step }]) => step.length).map(([all, curve]) => this.along(all, { ...curve, step: [curve.step.at(-1)], epoch: [curve.epoch.at(-1)], time: [curve.time.at(-1)] })[0]);
    const end = last.reduce((most, one) => (one > most ? one : most), 0);
    return this.axis.value !== "time" && end > 0 ? { minallowed: 0, maxallowed: end } : {};
  }

  // A chart whose place has another size.
  resized(chart) {
    this.drawChart(chart);
    window.Plotly.Plots.resize(chart.element);
  }

  // Saves the points of the part that a chart shows. Of a file that lacks some of them its name says so, too.
  async csv(group, chart) {
    const found = [];
    try {
      for (const [job, curves] of this.jobs()) {
        const options = chart.range
          ? this.options(curves, group, ...chart.range, FILE_POINTS)
          : [...group.names.map((name) => ["metric", name]), ["points", FILE_POINTS]];
        if (options) found.push([job, await this.ask(job, options)]);
      }
    } catch {
      chart.figure.say("No CSV is saved: the service does not answer with the points. Try again.");
      return;
    }
    const isThinned = found.some(([, series]) => !series.exact);
    const name = found.length === 1 ? found[0][0] : "jobs";
    chart.figure.say(isThinned ? THINNED : "");
    const end = isThinned ? "-thinned.csv" : ".csv";
    save(new Blob([csvOf(found, group.names)], { type: "text/csv" }), `${name}-${group.title}${end}`);
  }

  traces(name, zoomed, color) {
    const found = [];
    for (const kind of ["train", "validation"]) {
      const curve = (zoomed?.[kind] ?? Object.fromEntries(this.curves.metrics[kind]))[name];
      if (!curve?.step.length) continue;
      const label = plain(kind === "validation" ? `${legendOf(name)} (validation)` : legendOf(name));
      const values = valuesOf(name, curve);
      const whole = { x: this.along(this.curves, curve), y: values, name: label, type: "scatter", ...hovered(values) };
      whole.mode = modeOf(curve, kind);
      whole.cliponaxis = whole.mode === "lines"; // a symbol at the end of the axis is whole
      if (kind === "validation" || !isNoisy(name)) {
        found.push({ ...whole, line: { width: 1.5, color } });
        continue;
      }
      found.push({ ...whole, line: { width: 1, color }, opacity: rawOpacity(), showlegend: false });
      const y = smoothed(curve.value, Number(this.smoothing.value));
      found.push({ ...whole, ...hovered(y), y, name: `${label}, smoothed`, mode: "lines", line: { width: 2, color } });
    }
    return found;
  }

  layout(group) {
    const unit = this.unit();
    const titles = { time: "time (UTC)", relative: `${unit.name} since the first point` };
    const axis = titles[this.axis.value] ?? this.axis.value;
    const found = layout(group.title, axis, axis);
    const places = { step: "step %{x}", epoch: "epoch %{x:.4~g}", relative: `%{x:.4~g} ${unit.name}` };
    if (places[this.axis.value]) found.xaxis.unifiedhovertitle = { text: places[this.axis.value] };
    found.xaxis.autorangeoptions = this.ends();
    if (group.names.every(isMemory)) found.yaxis.title = { text: "GiB", standoff: 4 };
    found.hovermode = "x unified";
    found.hoverlabel = { namelength: -1 };
    found.hoverdistance = -1; // of points that are thinned out the nearest is shown, however far it is
    // Marks have an axis of their own: they are at the top of a chart, whatever its values are.
    found.yaxis2 = { overlaying: "y", range: [0, 1], fixedrange: true, visible: false };
    found.shapes = withLines(this.placed(group)).map(({ kind, x }) => ({
      ...{ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper" },
      line: { width: 1, dash: MARKS[kind].dash, color: MARKS[kind].color },
    }));
    return found;
  }

  // The marks of a chart that have a place on the axis. Many checkpoints are marked at the top of the page alone.
  placed({ section }) {
    const isFew = this.marks.filter(({ kind }) => kind === "checkpoint").length < MANY_MARKS;
    const marks = this.marks.filter(({ kind }) => kind !== "checkpoint" || isFew || !section);
    const found = marks.map((mark) => ({ ...mark, x: this.curves.place(mark.step, this.axis.value, this.unit()) }));
    return found.filter(({ x }) => x !== null && x !== undefined);
  }

  // Of each kind of mark a curve of points, which the legend names and whose texts are shown by the pointer.
  markers(group) {
    const placed = this.marks.length ? this.placed(group) : [];
    return Object.entries(MARKS).flatMap(([kind, { symbol, color }]) => {
      const found = placed.filter((mark) => mark.kind === kind);
      if (!found.length) return [];
      return [{
        ...{ x: found.map(({ x }) => x), y: found.map(() => 1), yaxis: "y2", name: kind, type: "scatter", mode: "markers" },
        marker: found.length < MANY_MARKS * 2 ? { symbol, color, size: 9 } : { symbol: "line-ns", size: 6, line: { width: 1, color } },
        text: found.map(({ step, text }) => `step ${step}: ${wrapped(text)}`),
        hovertemplate: "%{text}<extra></extra>",
        cliponaxis: false,
      }];
    });
  }

  // The service has more points of a part than the whole shows.
  async zoom(chart, change) {
    const { group } = chart;
    const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (from === undefined && !change["xaxis.autorange"]) return;
    let zoomed = null;
    const asked = (chart.asked = {});
    if (from !== undefined) {
      try {
        zoomed = await this.closer(group, from, to);
      } catch {
        return; // the points that are drawn stay
      }
      if (!zoomed || chart.asked !== asked) return; // another part is shown meanwhile
    }
    chart.zoomed = zoomed;
    chart.range = from === undefined ? null : [from, to];
    this.changed(group.names);
  }

  // The points of a part of the axis.
  async closer(group, from, to) {
    const options = this.options(this.curves, group, from, to);
    return options && this.fetchSeries(options);
  }

  // What requests the points of a part of the axis; null: there are none.
  options(curves, group, from, to, points = CLOSER_POINTS) {
    const range = curves.range(group.names[0], this.axis.value, from, to, this.unit());
    if (!range) return null;
    const options = group.names.map((name) => ["metric", name]);
    return [...options, ["begin", range[0]], ...(range[1] === null ? [] : [["end", range[1]]]), ["points", points]];
  }
}
