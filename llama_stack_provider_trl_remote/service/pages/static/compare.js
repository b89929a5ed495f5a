// Several jobs over each other: their curves as they grow, and a table of runs that shows, hides and marks them.
import { Charts, colorOf, hovered, modeOf, onColors, plain, rawOpacity, valuesOf } from "./charts.js";
import { Curves, isNoisy, separate, smoothed } from "./curves.js";
import { Parts } from "./parts.js";
import { Stream } from "./stream.js";

const live = document.getElementById("live");
const found = document.getElementById("jobs");
// Each job, in the order of the tables, and whether it runs.
const followed = new Map(found ? JSON.parse(found.textContent) : []);
const curves = new Map([...followed.keys()].map((job) => [job, new Curves()]));
const numbers = new Map([...followed.keys()].map((job, number) => [job, number]));
const parts = new Parts(["states"], { replaced: color });
// Jobs whose curves are not drawn.
const hidden = new Set(new URLSearchParams(location.search).getAll("hide"));
const FAINT = 0.15;

async function fetchSeries(job, options = null) {
  const path = `/v1/post-training/jobs/${encodeURIComponent(job)}/series`;
  // The address of all curves is the one that the page preloads.
  const answer = await fetch(options ? `${path}?${new URLSearchParams(options)}` : path);
  if (answer.status === 401) location.reload();
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

// A chart for each metric, in it a colour for each job.
class Overlaid extends Charts {
  names() {
    return new Set([...curves.values()].flatMap((job) => job.names()));
  }

  grouped() {
    return separate(this.names());
  }

  jobs() {
    return new Map([...curves].filter(([job]) => !hidden.has(job)));
  }

  ask(job, options) {
    return this.fetchSeries(job, options);
  }

  traces(name, zoomed) {
    return [...this.jobs()].flatMap(([job, all]) => {
      const color = colorOf(numbers.get(job));
      return ["train", "validation"].flatMap((kind) => {
        const curve = zoomed?.[job] ? zoomed[job][kind][name] : all.metrics[kind].get(name);
        if (!curve?.step.length) return [];
        const x = this.along(all, curve);
        const label = plain(kind === "validation" ? `${job} (validation)` : job);
        const line = { color, width: 2, dash: kind === "validation" ? "dot" : "solid" };
        const values = valuesOf(name, curve);
        const opacity = this.opacity(job);
        const whole = { x, y: values, ...hovered(values), name: label, mode: modeOf(curve, kind), cliponaxis: modeOf(curve, kind) === "lines", type: "scatter", line, opacity, meta: job };
        if (kind === "validation" || !isNoisy(name)) return [whole];
        const raw = { ...whole, line: { color, width: 1 }, opacity: rawOpacity() * opacity, showlegend: false, hoverinfo: "skip", hovertemplate: "" };
        const y = smoothed(curve.value, Number(this.smoothing.value));
        return [raw, { ...whole, ...hovered(y), y }];
      });
    });
  }

  async closer(group, from, to) {
    const zoomed = {};
    const fetchPart = async ([job, all]) => {
      const options = this.options(all, group, from, to);
      if (options) zoomed[job] = await this.ask(job, options);
    };
    await Promise.all([...this.jobs()].map(fetchPart));
    return zoomed;
  }

  opacity(job) {
    const one = this.emphasized;
    return one && one !== job && !hidden.has(one) ? FAINT : 1;
  }

  // Has the curves of a job stand out; null: of none.
  emphasize(job) {
    if (job === (this.emphasized ?? null)) return;
    this.emphasized = job;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => {
      const isSeen = (chart) => this.near.has(chart.element) || this.faint?.has(chart);
      const drawn = [...this.charts.values()].filter((chart) => chart.isDrawn && isSeen(chart));
      for (const { element } of drawn) {
        const opacity = element.data.map(({ meta, showlegend }) => this.opacity(meta) * (showlegend === false ? rawOpacity() : 1));
        if (opacity.length) window.Plotly.restyle(element, { opacity });
      }
      this.faint = job && new Set(drawn);
    });
  }

  drawChart(chart) {
    const isNew = !chart.isDrawn;
    super.drawChart(chart);
    if (!isNew) return;
    chart.element.on("plotly_hover", ({ points, event }) => points && event instanceof MouseEvent && markRow(nearest(chart.element, points, event)));
    chart.element.on("plotly_unhover", () => markRow(null));
    // A curve is hidden in all charts, or in none.
    chart.element.on("plotly_legendclick", ({ curveNumber }) => {
      show(chart.element.data[curveNumber].meta, false);
      return false;
    });
    chart.element.on("plotly_legenddoubleclick", () => false);
  }
}

// The job whose curve is nearest to the pointer, of the points at its place of the axis.
function nearest(element, points, { clientY }) {
  const place = clientY - element.getBoundingClientRect().top;
  const far = ({ yaxis, y }) => Math.abs(yaxis._offset + yaxis.d2p(y) - place);
  return points.filter(({ data }) => data.meta).sort((a, b) => far(a) - far(b))[0]?.data.meta ?? null;
}

function rowOf(job) {
  return document.querySelector(`tr[data-run="${CSS.escape(job)}"]`);
}

function markRow(job) {
  for (const row of document.querySelectorAll("tr[data-run]")) row.classList.toggle("marked", row.dataset.run === job);
}

// The boxes of the table have the colours of the curves.
function color() {
  for (const [job, number] of numbers) {
    const box = rowOf(job)?.querySelector("[name=show]");
    if (box) box.style.accentColor = colorOf(number);
  }
}

// Draws or hides the curves of a job, which the address keeps.
function show(job, isShown) {
  hidden[isShown ? "delete" : "add"](job);
  const box = rowOf(job)?.querySelector("[name=show]");
  if (box) box.checked = isShown;
  const kept = new URLSearchParams(location.search);
  kept.delete("hide");
  for (const one of hidden) kept.append("hide", one);
  history.replaceState(null, "", `?${kept}`);
  charts?.all();
}

const charts = curves.size && window.Plotly && new Overlaid(null, [], fetchSeries);

async function begin() {
  const cursors = new Map();
  try {
    for (const [job, all] of curves) {
      const series = await fetchSeries(job);
      all.replace(series);
      cursors.set(job, series.next);
    }
  } catch {
    live.textContent = "The service does not answer; trying again.";
    setTimeout(begin, 2000);
    return;
  }
  live.textContent = "";
  showCurves();
  const running = [...followed.keys()].filter((job) => followed.get(job));
  if (!running.length) return;
  new Stream(running, running.map((job) => cursors.get(job)).join("~"), {
    event: onEvent,
    state: () => parts.refresh(),
    lost: () => (live.textContent = "The service does not answer; trying again."),
    live: () => (live.textContent = ""),
  });
}

function showCurves() {
  if (![...curves.values()].some((all) => all.names().length)) return;
  document.getElementById("curves").hidden = false;
  charts?.all();
}

function onEvent(job, message) {
  const changed = curves.get(job).add(message);
  if (!changed.length) return;
  document.getElementById("curves").hidden = false;
  charts?.changed(changed);
  parts.refresh(5000);
}

const table = document.querySelector(".of-runs");
table?.addEventListener("change", ({ target }) => target.name === "show" && show(target.value, target.checked));
const emphasizeRowOf = (target) => charts?.emphasize(target.closest("tr[data-run]")?.dataset.run ?? null);
table?.addEventListener("pointerover", ({ target, pointerType }) => pointerType === "mouse" && emphasizeRowOf(target));
table?.addEventListener("focusin", ({ target }) => target.matches(":focus-visible") && emphasizeRowOf(target));
for (const event of ["pointerleave", "focusout"]) table?.addEventListener(event, () => charts?.emphasize(null));
// The choices of the charts, which the service does not know, stay in the address.
table?.addEventListener("click", (event) => {
  const link = event.target.closest("a.sort, a.remove");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const [kept, wanted] = [new URLSearchParams(location.search), new URL(link.href).searchParams];
  for (const name of ["job", "hide", "sort"]) kept.delete(name);
  const jobs = wanted.getAll("job");
  for (const job of jobs) kept.append("job", job);
  for (const job of hidden) if (jobs.includes(job)) kept.append("hide", job);
  if (wanted.get("sort")) kept.set("sort", wanted.get("sort"));
  if (link.className === "remove") return location.assign(`?${kept}`);
  history.replaceState(null, "", `?${kept}`);
  parts.fetch();
});

// On a phone, the curves come first. The page of a job leads to the differences.
const differences = document.querySelector("#settings details");
if (differences && document.querySelector(".beside-curves") && matchMedia("(max-width: 48rem)").matches) differences.open = false;
if (differences && location.hash === "#settings") differences.open = true;
color();
onColors(color);
if (curves.size) begin();
