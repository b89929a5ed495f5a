// Several jobs over each other: their curves as they grow, and their states.
import { Charts, COLORS, hovered, modeOf, plain, valuesOf } from "./charts.js";
import { Curves, isNoisy, separate, smoothed } from "./curves.js";
import { Parts } from "./parts.js";
import { Stream } from "./stream.js";

const live = document.getElementById("live");
const found = document.getElementById("jobs");
// Each job, in the order of the tables, and whether it runs.
const followed = new Map(found ? JSON.parse(found.textContent) : []);
const curves = new Map([...followed.keys()].map((job) => [job, new Curves()]));
const parts = new Parts(["states"]);

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
    return curves;
  }

  ask(job, options) {
    return this.fetchSeries(job, options);
  }

  traces(name, zoomed) {
    return [...curves].flatMap(([job, all], number) => {
      const color = COLORS[number % COLORS.length];
      return ["train", "validation"].flatMap((kind) => {
        const curve = zoomed?.[job] ? zoomed[job][kind][name] : all.metrics[kind].get(name);
        if (!curve?.step.length) return [];
        const x = this.along(all, curve);
        const label = plain(kind === "validation" ? `${job} (validation)` : job);
        const line = { color, width: 2, dash: kind === "validation" ? "dot" : "solid" };
        const values = valuesOf(name, curve);
        const whole = { x, y: values, ...hovered(values), name: label, mode: modeOf(curve, kind), type: "scatter", line };
        if (kind === "validation" || !isNoisy(name)) return [whole];
        const raw = { ...whole, line: { color, width: 1 }, opacity: 0.25, showlegend: false, hoverinfo: "skip", hovertemplate: "" };
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
    await Promise.all([...curves].map(fetchPart));
    return zoomed;
  }
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
  show();
  const running = [...followed.keys()].filter((job) => followed.get(job));
  if (!running.length) return;
  new Stream(running, running.map((job) => cursors.get(job)).join("~"), {
    event: onEvent,
    state: () => parts.refresh(),
    lost: () => (live.textContent = "The service does not answer; trying again."),
    live: () => (live.textContent = ""),
  });
}

function show() {
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

// The page of a job leads to the differences.
const differences = document.querySelector("#settings details");
if (differences && location.hash === "#settings") differences.open = true;
if (curves.size) begin();
